/* Attention of tree rows over a paged cache, in float32. Knows no Python.
 *
 * A row sees the context of its request, which lies in blocks of the cache, and of the step's own
 * rows its ancestors and itself. All rows of a request and all query heads that share keys are
 * done together, so that a block's keys and values are read once for them.
 *
 * A request's result depends neither on the requests beside it nor on the number of threads.
 */
#ifndef DDTREE_PAGED_ATTENTION_H
#define DDTREE_PAGED_ATTENTION_H

#include <stddef.h>
#include <stdint.h>

typedef struct {
    const float *query; /* [rows, heads, width]; strides in floats, a vector is contiguous */
    ptrdiff_t query_row, query_head;
    const float *keys; /* [rows, kv_heads, width], of this step */
    ptrdiff_t key_row, key_head;
    const float *values; /* [rows, kv_heads, width], of this step */
    ptrdiff_t value_row, value_head;
    const float *key_cache; /* [blocks, kv_heads] of [width, block_size] contiguous: transposed */
    ptrdiff_t key_cache_block, key_cache_head;
    const float *value_cache; /* [blocks, kv_heads] of [block_size, width] contiguous */
    ptrdiff_t value_cache_block, value_cache_head;
    float *out; /* [rows, heads, width]; only the rows of the requests are written */
    ptrdiff_t out_row, out_head;
    const int32_t *row_starts, *num_rows, *context_lens; /* [S] */
    const int32_t *block_tables;                         /* [S, blocks of a request] */
    ptrdiff_t table_request;
    const int64_t *ancestor_words; /* [rows of all requests, num_words] contiguous */
    ptrdiff_t num_words, num_requests, num_heads, num_kv_heads;
    ptrdiff_t width, block_size; /* multiples of 16 */
    float scale;
} ddtree_paged_attention_args;

/* 0, or -1 if there was no memory. */
int ddtree_paged_attention(const ddtree_paged_attention_args *args, int num_threads);

#endif
