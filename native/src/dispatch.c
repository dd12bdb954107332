/* Which kernels to run: a named table, best first, each row with the CPU features it needs. */
#include "dispatch.h"

#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "coremill.h"
#include "cpu.h"

#define BIT CM_CPU_BIT
/* A row needs every feature its flags in native_flags.json let the compiler use. */
#define AVX2_BITS (BIT(AVX2) | BIT(FMA) | BIT(F16C) | BIT(BMI2))
#define AVX512_BITS                                                                                          \
    (BIT(AVX2) | BIT(FMA) | BIT(F16C) | BIT(AVX512F) | BIT(AVX512BW) | BIT(AVX512VL) | BIT(AVX512DQ) |       \
     BIT(AVX512VNNI))

static const struct {
    const char *name;
    uint32_t needs;
    const cm_kernels *kernels;
} isas[] = {
    {"avx512_vnni", AVX512_BITS, &cm_kernels_avx512_vnni},
    {"avx_vnni", AVX2_BITS | BIT(AVXVNNI), &cm_kernels_avx_vnni},
    {"avx2", AVX2_BITS, &cm_kernels_avx2},
    {"scalar", 0, &cm_kernels_scalar},
};

#define NUM_ISAS ((int)(sizeof isas / sizeof isas[0]))

/* Index + 1, so that zero-initialised means "none yet". Any thread may select or read. */
static atomic_int active;

static int supported_with(int isa, uint32_t features) {
    return (isas[isa].needs & ~features) == 0;
}

/* Appends to err, cutting off at its end. */
__attribute__((format(printf, 3, 4))) static void append(char *err, size_t err_len, const char *format, ...) {
    size_t used = err_len ? strnlen(err, err_len) : 0;
    va_list args;
    if (used + 1 >= err_len)
        return;
    va_start(args, format);
    vsnprintf(err + used, err_len - used, format, args);
    va_end(args);
}

static void list_isas(char *err, size_t err_len, uint32_t features) {
    append(err, err_len, "; known:");
    for (int i = 0; i < NUM_ISAS; i++)
        append(err, err_len, "%s %s", i ? "," : "", isas[i].name);
    append(err, err_len, "; supported by this CPU%s:", getenv("COREMILL_CPU_MASK") ? " under COREMILL_CPU_MASK" : "");
    const char *separator = "";
    for (int i = 0; i < NUM_ISAS; i++)
        if (supported_with(i, features)) {
            append(err, err_len, "%s %s", separator, isas[i].name);
            separator = ",";
        }
}

int cm_isa_select(const char *name, char *err, size_t err_len) {
    const char *asker = name ? "instruction set" : "COREMILL_ISA";
    uint32_t masked;
    int chosen = 0;
    if (err_len)
        err[0] = 0;
    if (cm_cpu_masked(&masked, err, err_len) < 0)
        return -1;
    uint32_t features = cm_cpu_detect() & ~masked;

    if (!name)
        name = getenv("COREMILL_ISA");
    if (name && *name) {
        while (chosen < NUM_ISAS && strcmp(isas[chosen].name, name) != 0)
            chosen++;
        if (chosen == NUM_ISAS || !supported_with(chosen, features)) {
            append(err, err_len, "%s: '%.64s' is %s", asker, name,
                   chosen == NUM_ISAS ? "unknown" : "not supported by this CPU");
            list_isas(err, err_len, features);
            return -1;
        }
    } else {
        while (!supported_with(chosen, features)) /* ends at scalar, which needs nothing */
            chosen++;
    }
    atomic_store(&active, chosen + 1);
    return chosen;
}

int cm_isa_count(void) {
    return NUM_ISAS;
}

const char *cm_isa_name(int isa) {
    return isa >= 0 && isa < NUM_ISAS ? isas[isa].name : NULL;
}

int cm_isa_supported(int isa) {
    uint32_t masked;
    char err[1];
    if (isa < 0 || isa >= NUM_ISAS || cm_cpu_masked(&masked, err, sizeof err) < 0)
        return 0;
    return supported_with(isa, cm_cpu_detect() & ~masked);
}

const char *cm_isa_active(void) {
    return cm_isa_name(atomic_load(&active) - 1);
}

const cm_kernels *cm_active(void) {
    return cm_kernels_of(atomic_load(&active) - 1);
}

const cm_kernels *cm_kernels_of(int isa) {
    return isa >= 0 && isa < NUM_ISAS ? isas[isa].kernels : NULL;
}
