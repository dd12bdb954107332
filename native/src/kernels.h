/* The table every instruction set fills in: one pointer per kernel, one table per isa/<name>.c.
 *
 * Whatever the table, a kernel gives the same bits as the scalar one, which is the specification.
 * A table is constant and complete: callers never test a pointer for NULL.
 */
#ifndef CM_KERNELS_H
#define CM_KERNELS_H

#include <stddef.h>
#include <stdint.h>

typedef struct cm_kernels {
    const char *name;
    /* Sum of a[i] * b[i]. Exact for n up to 65536; any n, any alignment. */
    int32_t (*dot_u8s8)(const uint8_t *a, const int8_t *b, size_t n);
} cm_kernels;

extern const cm_kernels cm_kernels_scalar;
extern const cm_kernels cm_kernels_avx2;
extern const cm_kernels cm_kernels_avx_vnni;
extern const cm_kernels cm_kernels_avx512_vnni;

#endif
