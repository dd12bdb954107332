/* Packing in memory of exactly the promised sizes: under the address sanitizer any byte too far is found. */
#include <assert.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "coremill.h"
#include "kernels.h"

static const struct {
    int32_t format, block_len, block_bytes;
} formats[] = {
    {CM_F32, 1, 4},     {CM_F16, 1, 2},     {CM_BF16, 1, 2},      {CM_Q4_0, 32, 18},    {CM_Q4_1, 32, 20},   {CM_Q5_0, 32, 22},
    {CM_Q5_1, 32, 24},  {CM_Q8_0, 32, 34},  {CM_Q4_K, 256, 144},  {CM_Q5_K, 256, 176},  {CM_Q6_K, 256, 210},
};

/* An odd address, because rows of a file start anywhere. */
static uint8_t *random_bytes(size_t len, uint8_t **allocation) {
    *allocation = malloc(len + 1);
    assert(*allocation);
    for (size_t i = 0; i <= len; i++)
        (*allocation)[i] = (uint8_t)rand();
    return *allocation + 1;
}

static void pack_one(int f, int32_t k, int32_t rows, size_t gap) {
    const size_t row_bytes = (size_t)(k / formats[f].block_len) * (size_t)formats[f].block_bytes;
    const size_t panel = cm_panel_bytes(formats[f].format, k), panels = ((size_t)rows + 15) / 16;
    const size_t stride = panel + gap, dst_len = (panels - 1) * stride + panel;
    uint8_t *allocation, *src = random_bytes(row_bytes * (size_t)rows, &allocation), *dst = malloc(dst_len);
    assert(panel && panel % 64 == 0 && dst);
    memset(dst, 0xaa, dst_len);
    assert(cm_pack_panels(formats[f].format, src, row_bytes * (size_t)rows, k, rows, dst, dst_len, stride) == 0);
    for (size_t i = 0; i + 1 < panels; i++)
        for (size_t j = 0; j < gap; j++)
            assert(dst[i * stride + panel + j] == 0xaa);
    assert(cm_pack_panels(formats[f].format, src, row_bytes * (size_t)rows, k, rows, dst, dst_len - 1, stride) == -1);
    assert(cm_pack_panels(formats[f].format, src, row_bytes * (size_t)rows - 1, k, rows, dst, dst_len, stride) == -1);
    free(allocation);
    free(dst);
}

static void test_all_formats(void) {
    for (int f = 0; f < (int)(sizeof formats / sizeof formats[0]); f++)
        for (int32_t blocks = 1; blocks <= 5; blocks++)
            for (int32_t rows = 1; rows <= 35; rows += rows < 15 ? 7 : 1)
                pack_one(f, blocks * formats[f].block_len, rows, rows % 3 ? 0 : 64);
}

static void test_sizes(void) {
    assert(cm_panel_bytes(CM_Q4_0, 32) == 320 && cm_panel_bytes(CM_Q4_0, 48) == 0);
    assert(cm_panel_bytes(CM_Q4_K, 256) == 2368 && cm_panel_bytes(CM_Q4_K, 32) == 0);
    assert(cm_panel_bytes(CM_F32, 1) == 64 && cm_panel_bytes(CM_F16, 1) == 64 && cm_panel_bytes(CM_F32, 0) == 0);
    assert(cm_panel_bytes(-1, 32) == 0 && cm_panel_bytes(4, 32) == 0 && cm_panel_bytes(INT32_MAX, 32) == 0);
    /* The largest k does not wrap. */
    assert(cm_panel_bytes(CM_F32, INT32_MAX) == (uint64_t)INT32_MAX * 64);
}

static void test_panel_tables(void) {
    cm_panel table[2] = {{128, CM_F32, 0}, {192, CM_F16, 0}};
#define CHECK(begin, end) cm_pack_check_panels((const uint8_t *)table, sizeof table, 1, begin, end)
    assert(CHECK(128, 256) == -1 && CHECK(0, UINT64_MAX) == -1);
    assert(CHECK(129, 256) == 0 && CHECK(128, 255) == 1 && CHECK(128, 127) == 0);
    assert(cm_pack_check_panels((const uint8_t *)table, 17, 1, 0, 256) == 0);
    assert(cm_pack_check_panels((const uint8_t *)table, 0, 1, 0, 256) == -1);
    for (int i = 0; i < 5; i++) {
        static const cm_panel bad[5] = {
            {UINT64_MAX - 63, CM_F16, 0}, {193, CM_F16, 0}, {192, 4, 0}, {192, UINT32_MAX, 0}, {192, CM_F16, 1}};
        table[1] = bad[i];
        assert(CHECK(0, UINT64_MAX) == 1);
    }
    table[1] = (cm_panel){192, CM_Q4_0, 0}; /* k = 1 is not one of its */
    assert(CHECK(0, UINT64_MAX) == 1);
}

int main(void) {
    test_all_formats();
    test_sizes();
    test_panel_tables();
    puts("ok");
    return 0;
}
