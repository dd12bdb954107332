/* CPU feature detection, and the mask that takes features away for tests. */
#include "cpu.h"

#include <cpuid.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "coremill.h"

static const char *const feature_names[CM_CPU_FEATURE_COUNT] = {
    [CM_CPU_AVX2] = "avx2",         [CM_CPU_FMA] = "fma",           [CM_CPU_F16C] = "f16c",
    [CM_CPU_BMI2] = "bmi2",         [CM_CPU_AVXVNNI] = "avxvnni",   [CM_CPU_AVX512F] = "avx512f",
    [CM_CPU_AVX512BW] = "avx512bw", [CM_CPU_AVX512VL] = "avx512vl", [CM_CPU_AVX512DQ] = "avx512dq",
    [CM_CPU_AVX512VNNI] = "avx512vnni",
};

/* Register state the operating system saves: without it the instructions fault although cpuid shows them. */
#define XCR0_YMM 0x06u /* xmm, upper halves of ymm */
#define XCR0_ZMM 0xe6u /* and opmask, upper halves of zmm, zmm16-31 */

static uint32_t read_xcr0(void) {
    uint32_t eax, edx;
    __asm__ volatile("xgetbv" : "=a"(eax), "=d"(edx) : "c"(0));
    return eax;
}

static uint32_t when(unsigned reg, int bit, uint32_t feature) {
    return (reg >> bit & 1) ? feature : 0;
}

uint32_t cm_cpu_detect(void) {
    unsigned eax, ebx, ecx, edx;
    uint32_t found = 0;
    if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx) || !(ecx >> 27 & 1)) /* 27: OSXSAVE, xgetbv is allowed */
        return 0;
    uint32_t xcr0 = read_xcr0();
    if ((xcr0 & XCR0_YMM) != XCR0_YMM)
        return 0;
    int zmm_saved = (xcr0 & XCR0_ZMM) == XCR0_ZMM;

    found |= when(ecx, 12, CM_CPU_BIT(FMA)) | when(ecx, 29, CM_CPU_BIT(F16C));
    if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx))
        return found;
    unsigned max_subleaf = eax;
    found |= when(ebx, 5, CM_CPU_BIT(AVX2)) | when(ebx, 8, CM_CPU_BIT(BMI2));
    if (zmm_saved)
        found |= when(ebx, 16, CM_CPU_BIT(AVX512F)) | when(ebx, 30, CM_CPU_BIT(AVX512BW)) |
                 when(ebx, 31, CM_CPU_BIT(AVX512VL)) | when(ebx, 17, CM_CPU_BIT(AVX512DQ)) |
                 when(ecx, 11, CM_CPU_BIT(AVX512VNNI));
    if (max_subleaf >= 1 && __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx))
        found |= when(eax, 4, CM_CPU_BIT(AVXVNNI));
    return found;
}

static int find_feature(const char *name, size_t len) {
    for (int i = 0; i < CM_CPU_FEATURE_COUNT; i++)
        if (strlen(feature_names[i]) == len && memcmp(feature_names[i], name, len) == 0)
            return i;
    return -1;
}

static void unknown_feature(const char *name, size_t len, char *err, size_t err_len) {
    size_t used = 0;
    int n = snprintf(err, err_len, "COREMILL_CPU_MASK: unknown feature '%.*s'; known:", (int)(len > 64 ? 64 : len),
                     name);
    for (int i = 0; n >= 0; i++) {
        used += (size_t)n;
        if (used >= err_len || i == CM_CPU_FEATURE_COUNT)
            return;
        n = snprintf(err + used, err_len - used, "%s %s", i ? "," : "", feature_names[i]);
    }
}

int cm_cpu_masked(uint32_t *masked, char *err, size_t err_len) {
    const char *at = getenv("COREMILL_CPU_MASK");
    *masked = 0;
    while (at && *at) {
        size_t len = strcspn(at, ",");
        int feature = find_feature(at, len);
        /* A misspelt mask would let a test pass without testing anything: never ignore one. */
        if (feature < 0) {
            unknown_feature(at, len, err, err_len);
            return -1;
        }
        *masked |= UINT32_C(1) << feature;
        at += len;
        at += *at == ',';
    }
    return 0;
}

int cm_cpu_feature_count(void) {
    return CM_CPU_FEATURE_COUNT;
}

const char *cm_cpu_feature_name(int feature) {
    return feature >= 0 && feature < CM_CPU_FEATURE_COUNT ? feature_names[feature] : NULL;
}

int cm_cpu_has(int feature) {
    uint32_t masked;
    char err[1];
    if (feature < 0 || feature >= CM_CPU_FEATURE_COUNT || cm_cpu_masked(&masked, err, sizeof err) < 0)
        return 0;
    return cm_cpu_detect() >> feature & ~masked >> feature & 1;
}
