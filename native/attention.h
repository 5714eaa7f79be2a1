/* Attention of a few rows of each request over its cached keys and values, in float32. Knows no
 * Python.
 *
 * Each row's result depends on the keys it sees, in their order, and on nothing else: not on the
 * rows beside it, nor on hidden keys between them. So a row of a tree, which sees the context, its
 * ancestors and itself, gets bit for bit what plain decoding would compute at that place.
 */
#ifndef DDTREE_ATTENTION_H
#define DDTREE_ATTENTION_H

#include <stddef.h>

typedef struct {
    const float *query; /* [R, heads, N, width], strides in floats; a vector is contiguous */
    ptrdiff_t query_request, query_head, query_row;
    const float *keys; /* [R, kv_heads, S, width] */
    ptrdiff_t key_request, key_head, key_row;
    const float *values; /* [R, kv_heads, S, width] */
    ptrdiff_t value_request, value_head, value_row;
    const float *mask; /* [R, N, S], added to the scores; NULL shows all */
    ptrdiff_t mask_request, mask_row;
    float *out; /* [R, N, heads, width] contiguous */
    ptrdiff_t num_requests, num_rows, num_keys; /* R, N, S */
    ptrdiff_t num_open; /* the first keys, which every row sees unmasked */
    ptrdiff_t num_heads, num_kv_heads, width; /* width: a multiple of 8 */
    float scale;
} ddtree_attention_args;

/* A mask below this hides its key; any other is added to the score. */
#define DDTREE_HIDDEN -1e30f

/* 0, or -1 if there was no memory. A row that sees no key gets zeros. */
int ddtree_attention(const ddtree_attention_args *args, int num_threads);

#endif
