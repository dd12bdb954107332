/* What memory and the clock give on this machine, for `coremill doctor` and `coremill bench`.
 *
 * Memory: one thread on each core streams over a buffer of its own, as a step streams over the weights: reads
 * only, in order, from huge pages where the kernel hands them out. Clock: a chain of multiplications, each
 * waiting for the one before, whose latency is the same 3 cycles on every x86-64 core of the last decade.
 */
#define _GNU_SOURCE /* CPU sets */
#include <errno.h>
#include <immintrin.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "coremill.h"
#include "cpu.h"

#define HUGE_PAGE ((size_t)2 << 20)
#define CHUNK_BYTES ((size_t)1 << 20) /* read between two looks at the clock: some 30 us */

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* ---- reading ---- */

/* Both read every byte of data [bytes], bytes a multiple of 512, and return something that depends on all. */
static uint64_t read_sse2(const uint8_t *data, size_t bytes) {
    __m128i seen[8];
    for (int i = 0; i < 8; i++)
        seen[i] = _mm_setzero_si128();
    for (size_t at = 0; at < bytes; at += 128)
        for (int i = 0; i < 8; i++)
            seen[i] = _mm_xor_si128(seen[i], _mm_load_si128((const __m128i *)(data + at + 16 * (size_t)i)));
    for (int i = 1; i < 8; i++)
        seen[0] = _mm_xor_si128(seen[0], seen[i]);
    return (uint64_t)_mm_cvtsi128_si64(seen[0]);
}

__attribute__((target("avx2"))) static uint64_t read_avx2(const uint8_t *data, size_t bytes) {
    __m256i seen[8];
    for (int i = 0; i < 8; i++)
        seen[i] = _mm256_setzero_si256();
    for (size_t at = 0; at < bytes; at += 256)
        for (int i = 0; i < 8; i++)
            seen[i] = _mm256_xor_si256(seen[i], _mm256_load_si256((const __m256i *)(data + at + 32 * (size_t)i)));
    for (int i = 1; i < 8; i++)
        seen[0] = _mm256_xor_si256(seen[0], seen[i]);
    return (uint64_t)_mm_cvtsi128_si64(_mm256_castsi256_si128(seen[0]));
}

/* ---- one reader per core ---- */

typedef struct reader reader;

typedef struct {
    atomic_int num_waiting; /* readers whose buffer is filled */
    atomic_int go;          /* 1: read, -1: give up */
    int num_readers;
    size_t bytes;
    double seconds;
} race;

struct reader {
    race *race;
    int core;
    int error; /* errno of what failed, 0 */
    void *mapping;
    uint8_t *data;
    double bytes_per_second;
    uint64_t seen; /* keeps the reads alive */
};

static int pin(int core) {
    if (core < 0 || core >= CPU_SETSIZE)
        return EINVAL;
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(core, &set);
    return pthread_setaffinity_np(pthread_self(), sizeof set, &set);
}

/* Fills the buffer on the reader's own core, so that its pages come from the nearest memory. */
static int prepare(reader *r) {
    int error = pin(r->core);
    if (error)
        return error;
    r->mapping = mmap(NULL, r->race->bytes + HUGE_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (r->mapping == MAP_FAILED) {
        r->mapping = NULL;
        return errno;
    }
    r->data = (uint8_t *)(((uintptr_t)r->mapping + HUGE_PAGE - 1) & ~(uintptr_t)(HUGE_PAGE - 1));
    /* Refused where the kernel has no huge pages: then small ones are what there is to measure. */
    (void)madvise(r->data, r->race->bytes, MADV_HUGEPAGE);
    memset(r->data, 1, r->race->bytes);
    return 0;
}

static void *read_for_a_while(void *arg) {
    reader *r = arg;
    race *race = r->race;
    uint64_t (*read)(const uint8_t *, size_t) = cm_cpu_has(CM_CPU_AVX2) ? read_avx2 : read_sse2;

    r->error = prepare(r);
    atomic_fetch_add(&race->num_waiting, 1);
    while (atomic_load(&race->go) == 0)
        sched_yield();
    if (atomic_load(&race->go) < 0)
        return NULL;
    size_t at = 0, done = 0;
    double begin = now(), end = begin;
    while (end - begin < race->seconds) {
        size_t chunk = race->bytes - at < CHUNK_BYTES ? race->bytes - at : CHUNK_BYTES;
        r->seen ^= read(r->data + at, chunk);
        at = at + chunk == race->bytes ? 0 : at + chunk;
        done += chunk;
        end = now();
    }
    r->bytes_per_second = (double)done / (end - begin);
    return NULL;
}

/* Bytes of this process on anonymous huge pages; 0 when the kernel does not say. */
static uint64_t huge_bytes(void) {
    char line[256];
    unsigned long long kib = 0;
    FILE *file = fopen("/proc/self/smaps_rollup", "re");
    if (!file)
        return 0;
    while (fgets(line, sizeof line, file))
        if (sscanf(line, "AnonHugePages: %llu kB", &kib) == 1)
            break;
    fclose(file);
    return (uint64_t)kib << 10;
}

int cm_bench_bandwidth(const int32_t *cores, int num_cores, size_t bytes, double seconds, double *bytes_per_second,
                       uint64_t *on_huge_pages, char *err, size_t err_len) {
    race race = {.num_readers = num_cores, .bytes = bytes, .seconds = seconds};
    int num_started = 0, error = 0;
    if (num_cores < 1 || bytes == 0 || bytes % 4096) {
        snprintf(err, err_len, "bandwidth: %d cores and %zu bytes, which must be a multiple of 4096", num_cores, bytes);
        return -1;
    }
    reader *readers = calloc((size_t)num_cores, sizeof *readers);
    pthread_t *threads = calloc((size_t)num_cores, sizeof *threads);
    uint64_t huge_before = huge_bytes();
    if (!readers || !threads)
        error = ENOMEM;
    while (!error && num_started < num_cores) {
        readers[num_started] = (reader){.race = &race, .core = cores[num_started]};
        error = pthread_create(&threads[num_started], NULL, read_for_a_while, &readers[num_started]);
        num_started += !error;
    }
    while (atomic_load(&race.num_waiting) < num_started)
        sched_yield();
    for (int i = 0; i < num_started && !error; i++)
        error = readers[i].error;
    *on_huge_pages = huge_bytes();
    *on_huge_pages = *on_huge_pages > huge_before ? *on_huge_pages - huge_before : 0;
    atomic_store(&race.go, error ? -1 : 1);

    *bytes_per_second = 0;
    for (int i = 0; i < num_started; i++) {
        pthread_join(threads[i], NULL);
        *bytes_per_second += readers[i].bytes_per_second;
        if (readers[i].mapping)
            munmap(readers[i].mapping, bytes + HUGE_PAGE);
    }
    free(readers);
    free(threads);
    if (error)
        snprintf(err, err_len, "bandwidth: %s (%d cores, %zu bytes each)", strerror(error), num_cores, bytes);
    return error ? -1 : 0;
}

/* ---- clock ---- */

#define CHAIN_CYCLES 3
#define CHAIN_LEN 32

double cm_bench_clock(double seconds) {
    double best = 0, begin = now(), slice_begin = begin;
    do {
        /* A slice is about 1 ms: the best of many is one that nobody interrupted. */
        const int rounds = 40000;
        uint32_t x = 3;
        for (int i = 0; i < rounds; i++)
            __asm__ volatile(".rept %c1\n\timull %0, %0\n\t.endr" : "+r"(x) : "i"(CHAIN_LEN) : "cc");
        double slice_end = now();
        double hertz = (double)rounds * CHAIN_LEN * CHAIN_CYCLES / (slice_end - slice_begin);
        best = hertz > best ? hertz : best;
        slice_begin = slice_end;
    } while (slice_begin - begin < seconds);
    return best;
}
