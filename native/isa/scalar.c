/* Plain C for any x86-64: the specification of every kernel. */
#include "kernels.h"

static int32_t dot_u8s8(const uint8_t *a, const int8_t *b, size_t n) {
    int32_t sum = 0;
    for (size_t i = 0; i < n; i++)
        sum += (int32_t)a[i] * b[i];
    return sum;
}

const cm_kernels cm_kernels_scalar = {
    .name = "scalar",
    .dot_u8s8 = dot_u8s8,
};
