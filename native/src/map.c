/* Shared memory at addresses that huge pages can back: the weights (a file) and the arena (a memfd). */
#define _GNU_SOURCE
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#include "coremill.h"

#define HUGE_PAGE (UINT64_C(2) << 20)

/* Newer than some C libraries' headers. */
#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#endif

void *cm_map(int fd, uint64_t offset, uint64_t length, int writable, char *err, size_t err_len) {
    if (length == 0 || length > (UINT64_C(1) << 46) || offset % 4096) {
        snprintf(err, err_len, "cannot map %llu bytes at %llu", (unsigned long long)length,
                 (unsigned long long)offset);
        return NULL;
    }
    /* Address space for any alignment is reserved first; the map then replaces its aligned middle. */
    uint64_t reserved = ((length + 4095) & ~UINT64_C(4095)) + HUGE_PAGE;
    uint8_t *reservation = mmap(NULL, reserved, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (reservation == MAP_FAILED) {
        snprintf(err, err_len, "reserving %llu bytes of addresses: %s", (unsigned long long)reserved,
                 strerror(errno));
        return NULL;
    }
    uint8_t *aligned = (uint8_t *)(((uintptr_t)reservation + HUGE_PAGE - 1) & ~(uintptr_t)(HUGE_PAGE - 1));
    uint8_t *end = aligned + reserved - HUGE_PAGE;
    int protection = writable ? PROT_READ | PROT_WRITE : PROT_READ;
    if (mmap(aligned, length, protection, MAP_SHARED | MAP_FIXED, fd, (off_t)offset) == MAP_FAILED) {
        snprintf(err, err_len, "mapping %llu bytes: %s", (unsigned long long)length, strerror(errno));
        munmap(reservation, reserved);
        return NULL;
    }
    if (aligned != reservation)
        munmap(reservation, (size_t)(aligned - reservation));
    if (end != reservation + reserved)
        munmap(end, (size_t)(reservation + reserved - end));
    /* Advice only: without it everything works on small pages. */
    madvise(aligned, length, MADV_HUGEPAGE);
    if (!writable)
        madvise(aligned, length, MADV_POPULATE_READ);
    return aligned;
}

int cm_unmap(void *address, uint64_t length) {
    return munmap(address, length);
}
