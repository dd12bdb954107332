/* Angles of rotary position embedding, in double precision and without libm: the same bits on every machine. */
#ifndef CM_ROPE_H
#define CM_ROPE_H

#include <stdint.h>

#include "coremill.h"

/* sin and cos of |x| <= 2^31, with an absolute error below 1e-15. */
void cm_sincos(double x, double *sin_x, double *cos_x);

#endif
