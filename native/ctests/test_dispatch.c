/* The dispatch table, and that each row names its own kernels. */
#include <assert.h>
#include <stdio.h>
#include <string.h>

#include "coremill.h"
#include "dispatch.h"

static void test_selection(void) {
    char err[256];
    assert(cm_isa_active() == NULL && cm_active() == NULL);
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

static void test_tables(void) {
    for (int isa = 0; isa < cm_isa_count(); isa++) {
        assert(strcmp(cm_kernels_of(isa)->name, cm_isa_name(isa)) == 0);
        if (cm_isa_supported(isa))
            assert(cm_kernels_of(isa)->dot_rounds(10) >= 80);
    }
}

int main(void) {
    test_selection();
    test_tables();
    puts("ok");
    return 0;
}
