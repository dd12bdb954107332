/* The choice of kernels, made once per process by cm_isa_select. */
#ifndef CM_DISPATCH_H
#define CM_DISPATCH_H

#include "kernels.h"

/* The kernels of one instruction set, whether or not this CPU can run them; NULL when out of range. */
const cm_kernels *cm_kernels_of(int isa);

#endif
