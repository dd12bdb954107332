/* The dispatch table, and that the kernels of every supported row agree with scalar. */
#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "coremill.h"
#include "dispatch.h"

static void test_selection(void) {
    char err[256];
    assert(cm_isa_active() == NULL && cm_kernels_active() == NULL);
    assert(cm_isa_select("nonsense", err, sizeof err) == -1 && strstr(err, "scalar"));
    assert(cm_isa_active() == NULL);
    int best = cm_isa_select(NULL, err, sizeof err);
    assert(best >= 0 && cm_isa_supported(best));
    for (int i = 0; i < best; i++)
        assert(!cm_isa_supported(i));
    /* A short buffer cuts the message off and still ends in NUL. */
    memset(err, 'x', sizeof err);
    assert(cm_isa_select("nonsense", err, 8) == -1 && strlen(err) == 7 && err[8] == 'x');
    assert(cm_isa_select("nonsense", NULL, 0) == -1);
}

static void test_dot(void) {
    for (size_t n = 0; n < 300; n++) {
        /* Exact-size heap blocks, so that the sanitizer sees any read past the end. */
        uint8_t *a = malloc(n + 1);
        int8_t *b = malloc(n + 1);
        for (size_t i = 0; i < n; i++) {
            a[i] = (uint8_t)(255 - i * 7);
            b[i] = (int8_t)(i * 31 - 128);
        }
        int32_t expected = cm_kernels_scalar.dot_u8s8(a, b, n);
        for (int isa = 0; isa < cm_isa_count(); isa++)
            if (cm_isa_supported(isa))
                assert(cm_kernels_of(isa)->dot_u8s8(a, b, n) == expected);
        free(a);
        free(b);
    }
}

int main(void) {
    test_selection();
    test_dot();
    puts("ok");
    return 0;
}
