#include "sampling.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- the generator: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", 2011 ---- */

void cm_philox4x32(const uint32_t *counter, const uint32_t *key, uint32_t *out) {
    uint32_t c0 = counter[0], c1 = counter[1], c2 = counter[2], c3 = counter[3];
    uint32_t k0 = key[0], k1 = key[1];
    for (int round = 0; round < 10; round++) {
        uint64_t product0 = (uint64_t)c0 * 0xD2511F53u;
        uint64_t product1 = (uint64_t)c2 * 0xCD9E8D57u;
        c0 = (uint32_t)(product1 >> 32) ^ c1 ^ k0;
        c1 = (uint32_t)product1;
        c2 = (uint32_t)(product0 >> 32) ^ c3 ^ k1;
        c3 = (uint32_t)product0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    out[0] = c0, out[1] = c1, out[2] = c2, out[3] = c3;
}

/* In [0, 1), 53 bits. */
static double uniform(uint64_t seed, int64_t position) {
    uint32_t counter[4] = {(uint32_t)position, (uint32_t)((uint64_t)position >> 32), 0, 0};
    uint32_t key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
    uint32_t out[4];
    cm_philox4x32(counter, key, out);
    return (double)(((uint64_t)out[1] << 32 | out[0]) >> 11) * 0x1p-53;
}

/* ---- scratch and parameters ---- */

static size_t round64(size_t bytes) {
    return (bytes + 63) & ~(size_t)63;
}

static size_t num_chunks(int32_t n) {
    return ((size_t)n + CM_SAMPLE_CHUNK - 1) / CM_SAMPLE_CHUNK;
}

size_t cm_sample_scratch_bytes(int32_t n) {
    return round64((size_t)n * sizeof(float)) + round64(num_chunks(n) * sizeof(float)) +
           round64((size_t)n * sizeof(cm_candidate));
}

cm_sample_scratch cm_sample_scratch_at(void *memory, int32_t n) {
    uint8_t *at = memory;
    cm_sample_scratch scratch;
    scratch.weights = (float *)at;
    at += round64((size_t)n * sizeof(float));
    scratch.chunk_sums = (float *)at;
    at += round64(num_chunks(n) * sizeof(float));
    scratch.candidates = (cm_candidate *)at;
    return scratch;
}

const char *cm_sampling_problem(const cm_sampling *s) {
    /* Negated, so that NaN is a problem too. */
    if (!(s->temperature >= 0 && s->temperature <= 1e6))
        return "temperature is not between 0 and 1e6";
    if (!(s->top_p > 0 && s->top_p <= 1))
        return "top_p is not above 0 and at most 1";
    if (!(s->min_p >= 0 && s->min_p <= 1))
        return "min_p is not between 0 and 1";
    if (s->top_k < 0)
        return "top_k is negative";
    return NULL;
}

/* ---- the draw from the whole vocabulary ---- */

/* Sums in double, in order: the same on every machine, and exact enough that no token's share moves. */
static double sum_of(const float *values, size_t n) {
    double sum = 0;
    for (size_t i = 0; i < n; i++)
        sum += values[i];
    return sum;
}

/* The token at `target` when all weights lie end to end. */
static int32_t find_in_all(const cm_sample_scratch *scratch, int32_t n, double target) {
    size_t chunk = 0, chunks = num_chunks(n);
    for (; chunk + 1 < chunks && target >= scratch->chunk_sums[chunk]; chunk++)
        target -= scratch->chunk_sums[chunk];
    /* A chunk's sum was rounded in another order than this walk, so it may end short: then the last that can be. */
    int32_t end = chunk + 1 < chunks ? (int32_t)(chunk + 1) * CM_SAMPLE_CHUNK : n;
    int32_t last = -1;
    for (int32_t id = (int32_t)chunk * CM_SAMPLE_CHUNK; id < end; id++) {
        if (!(scratch->weights[id] > 0))
            continue;
        last = id;
        target -= scratch->weights[id];
        if (target < 0)
            break;
    }
    /* Rounding may also push a target near the total past the last chunk with any weight. */
    for (int32_t id = n; last < 0 && id-- > 0;)
        if (scratch->weights[id] > 0)
            last = id;
    return last;
}

/* ---- top_k, top_p, min_p: candidates in a heap, the best on top, taken off only as far as needed ---- */

static int better(cm_candidate a, cm_candidate b) {
    return a.weight > b.weight || (a.weight == b.weight && a.id < b.id);
}

static void sift_down(cm_candidate *heap, int32_t n, int32_t at) {
    cm_candidate moving = heap[at];
    for (;;) {
        int32_t child = 2 * at + 1;
        if (child >= n)
            break;
        if (child + 1 < n && better(heap[child + 1], heap[child]))
            child++;
        if (!better(heap[child], moving))
            break;
        heap[at] = heap[child];
        at = child;
    }
    heap[at] = moving;
}

/* Takes the best off a heap of n and leaves it at heap[n - 1]. */
static void take_best(cm_candidate *heap, int32_t n) {
    cm_candidate best = heap[0];
    heap[0] = heap[n - 1];
    sift_down(heap, n - 1, 0);
    heap[n - 1] = best;
}

/* Everything not below the cutoff, as a heap. */
static int32_t collect(const cm_sample_scratch *scratch, int32_t n, double cutoff) {
    cm_candidate *heap = scratch->candidates;
    int32_t count = 0;
    for (int32_t id = 0; id < n; id++)
        if (scratch->weights[id] >= cutoff && scratch->weights[id] > 0)
            heap[count++] = (cm_candidate){scratch->weights[id], id};
    for (int32_t at = count / 2 - 1; at >= 0; at--)
        sift_down(heap, count, at);
    return count;
}

/* Weights below this cannot be chosen, so they need not enter the heap. With top_k everything may matter, as
 * top_p then counts shares of what top_k leaves. */
static double cutoff_for(const cm_sampling *s, int32_t n, double total) {
    if (s->top_k > 0)
        return 0;
    /* All weights below it together are less than half of what top_p leaves out. */
    double tail = 0.5 * (1.0 - s->top_p) * total / n;
    return s->min_p > tail ? s->min_p : tail;
}

static int32_t draw_filtered(const cm_sampling *s, const cm_sample_scratch *scratch, int32_t n, double total,
                             double share) {
    cm_candidate *heap = scratch->candidates;
    int32_t count = collect(scratch, n, cutoff_for(s, n, total));
    int32_t limit = s->top_k > 0 && s->top_k < count ? s->top_k : count;
    /* The i-th best lies at heap[count - 1 - i] once taken. */
    int32_t taken = 0;
    if (s->top_k > 0) {
        total = 0;
        for (; taken < limit; taken++) {
            take_best(heap, count - taken);
            total += heap[count - 1 - taken].weight;
        }
    }
    double kept_total = 0, wanted_total = s->top_p * total;
    int32_t kept = 0;
    for (; kept < limit; kept++) {
        if (kept == taken) {
            take_best(heap, count - taken);
            taken++;
        }
        float weight = heap[count - 1 - kept].weight;
        if (kept > 0 && (weight < s->min_p * (double)heap[count - 1].weight || (s->top_p < 1 && kept_total >= wanted_total)))
            break;
        kept_total += weight;
    }
    double target = share * kept_total;
    for (int32_t i = 0; i < kept; i++) {
        target -= heap[count - 1 - i].weight;
        if (target < 0)
            return heap[count - 1 - i].id;
    }
    return heap[count - kept].id;
}

int32_t cm_sample(const cm_kernels *kernels, const float *logits, int32_t n, float max, const cm_sampling *s,
                  int64_t position, const cm_sample_scratch *scratch) {
    /* Cold enough for greedy, and far from 0 * infinity. */
    float inv_temp = s->temperature > 1e-20 ? (float)(1.0 / s->temperature) : 1e20f;
    double share = uniform(s->seed, position);
    kernels->softmax_weights(scratch->weights, logits, n, max, inv_temp, scratch->chunk_sums);
    double total = sum_of(scratch->chunk_sums, num_chunks(n));
    if (s->top_k > 0 || s->top_p < 1 || s->min_p > 0)
        return draw_filtered(s, scratch, n, total, share);
    return find_in_all(scratch, n, share * total);
}

/* ---- for tests ---- */

static int best_of(const float *logits, int32_t n, int32_t *best) {
    *best = 0;
    for (int32_t i = 0; i < n; i++) {
        if (!(logits[i] - logits[i] == 0))
            return -1;
        if (logits[i] > logits[*best])
            *best = i;
    }
    return 0;
}

int cm_sample_logits(const float *logits, int32_t n, const cm_sampling *s, int64_t first_position, int32_t count,
                     int32_t *tokens, char *err, size_t err_len) {
    const cm_kernels *kernels = cm_active();
    const char *problem = cm_sampling_problem(s);
    int32_t best;
    if (!kernels || n < 1 || first_position < 0)
        problem = "no kernels selected, no logits, or a negative position";
    else if (!problem && best_of(logits, n, &best) < 0)
        problem = "a logit is not finite";
    void *memory = problem ? NULL : aligned_alloc(64, cm_sample_scratch_bytes(n));
    if (!memory) {
        snprintf(err, err_len, "%s", problem ? problem : "out of memory");
        return -1;
    }
    cm_sample_scratch scratch = cm_sample_scratch_at(memory, n);
    for (int32_t i = 0; i < count; i++)
        tokens[i] = s->temperature > 0 ? cm_sample(kernels, logits, n, logits[best], s, first_position + i, &scratch)
                                       : best;
    free(memory);
    return 0;
}
