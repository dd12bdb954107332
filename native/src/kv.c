/* Layout of keys and values in a block of the arena, for those who do not compute with them. */
#include <string.h>

#include "coremill.h"
#include "kernels.h"

int cm_kv_type(const char *name) {
    return strcmp(name, "f16") == 0 ? CM_KV_F16 : strcmp(name, "q8") == 0 ? CM_KV_Q8 : -1;
}

size_t cm_kv_head_len(int type, int head_dim) {
    size_t width = (size_t)head_dim;
    switch (type) {
    case CM_KV_F16: return 2 * width * CM_BLOCK_TOKENS * sizeof(uint16_t);
    case CM_KV_Q8: return 2 * width * CM_BLOCK_TOKENS + 2 * CM_BLOCK_TOKENS * sizeof(uint16_t);
    default: return 0;
    }
}

uint64_t cm_kv_head_bytes(int32_t type, int32_t head_dim) {
    return head_dim < 1 ? 0 : cm_kv_head_len(type, head_dim);
}

/* `rows` rows of 32 tokens, of which the first `tokens` are copied. */
static void copy_tokens(uint8_t *to, const uint8_t *from, size_t rows, size_t token_bytes, size_t tokens) {
    for (size_t i = 0; i < rows; i++)
        memcpy(to + i * CM_BLOCK_TOKENS * token_bytes, from + i * CM_BLOCK_TOKENS * token_bytes, tokens * token_bytes);
}

void cm_kv_copy_tokens(const cm_kv *kv, int32_t source, int32_t target, int num_tokens) {
    size_t width = (size_t)kv->head_dim, tokens = (size_t)num_tokens, plane = width * CM_BLOCK_TOKENS;
    for (int layer = 0; layer < kv->num_layers; layer++)
        for (int head = 0; head < kv->num_kv_heads; head++) {
            size_t part = (size_t)layer * kv->layer_bytes + (size_t)head * kv->head_bytes;
            const uint8_t *from = kv->arena + (size_t)source * kv->block_bytes + part;
            uint8_t *to = kv->arena + (size_t)target * kv->block_bytes + part;
            memset(to, 0, kv->head_bytes);
            if (kv->type == CM_KV_F16) {
                copy_tokens(to, from, width, 2, tokens);
                memcpy(to + 2 * plane, from + 2 * plane, tokens * width * 2);
                continue;
            }
            copy_tokens(to, from, width / 4, 4, tokens);
            memcpy(to + plane, from + plane, tokens / 4 * 4 * width); /* V: whole groups of 4 tokens */
            size_t last = plane + tokens / 4 * 4 * width;
            for (size_t d = 0; d < width; d++)
                memcpy(to + last + 4 * d, from + last + 4 * d, tokens % 4);
            copy_tokens(to + 2 * plane, from + 2 * plane, 2, sizeof(uint16_t), tokens);
        }
}
