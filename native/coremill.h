/* The one public header of the C side; see abi.inc for what is promised. */
#ifndef COREMILL_H
#define COREMILL_H

#include <stddef.h>
#include <stdint.h>

#include "abi.inc"

#endif
