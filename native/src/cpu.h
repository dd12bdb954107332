/* CPU features: what the kernels may use on this machine. */
#ifndef CM_CPU_H
#define CM_CPU_H

#include <stddef.h>
#include <stdint.h>

/* Only features that some row of the dispatch table requires; the order is that of cm_cpu_feature_name. */
enum {
    CM_CPU_AVX2,
    CM_CPU_FMA,
    CM_CPU_F16C,
    CM_CPU_BMI2,
    CM_CPU_AVXVNNI,
    CM_CPU_AVX512F,
    CM_CPU_AVX512BW,
    CM_CPU_AVX512VL,
    CM_CPU_AVX512DQ,
    CM_CPU_AVX512VNNI,
    CM_CPU_FEATURE_COUNT
};

#define CM_CPU_BIT(name) (UINT32_C(1) << CM_CPU_##name)

/* Features of the CPU and the operating system, before any mask. */
uint32_t cm_cpu_detect(void);

/* Features that COREMILL_CPU_MASK hides. Returns 0, or -1 with a message when it names an unknown one. */
int cm_cpu_masked(uint32_t *masked, char *err, size_t err_len);

#endif
