/* Tokens from logits. A token depends on the logits, the parameters, the seed and the position, nothing else. */
#ifndef CM_SAMPLING_H
#define CM_SAMPLING_H

#include <stddef.h>
#include <stdint.h>

#include "coremill.h"
#include "kernels.h"

typedef struct cm_candidate {
    float weight; /* relative to the most likely token's, which is 1 */
    int32_t id;
} cm_candidate;

/* Working memory for rows of n logits; see cm_sample_scratch_bytes. */
typedef struct cm_sample_scratch {
    float *weights;           /* [n] */
    float *chunk_sums;        /* [ceil(n / 256)] */
    cm_candidate *candidates; /* [n] */
} cm_sample_scratch;

#define CM_SAMPLE_CHUNK 256

/* Bytes for one row of n logits at a time, and the parts of such memory (64-byte aligned). */
size_t cm_sample_scratch_bytes(int32_t n);
cm_sample_scratch cm_sample_scratch_at(void *memory, int32_t n);

/* NULL, or what is wrong with the parameters. */
const char *cm_sampling_problem(const cm_sampling *s);

/* One token of n finite logits whose largest is max, for temperature > 0. */
int32_t cm_sample(const cm_kernels *kernels, const float *logits, int32_t n, float max, const cm_sampling *s,
                  int64_t position, const cm_sample_scratch *scratch);

#endif
