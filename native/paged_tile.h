/* Queries look at a tile of keys and values: what `paged_attention.c` is made of. Knows no cache. */
#ifndef DDTREE_PAGED_TILE_H
#define DDTREE_PAGED_TILE_H

#include <stddef.h>
#include <stdint.h>

#include "simd.h"

#ifdef DDTREE_AVX2

#define LANES 8
#define PANEL 16 /* keys, or columns of values, that a register block covers */
#define TILE 128 /* keys between two corrections of the highest score */

/* Up to TILE keys and their values, in panels that lie anywhere. */
typedef struct {
    const float *keys[TILE / PANEL];   /* [width, PANEL], `key_step` floats between lines */
    const float *values[TILE / PANEL]; /* [PANEL, width], `value_step` floats between lines */
    ptrdiff_t key_step, value_step, count;
    const int64_t *words; /* of the tree's rows; NULL where every row sees all keys */
    ptrdiff_t first_key;  /* this tile's first key among the tree's rows */
} key_tile;

/* The queries of one request that share keys, and what they have seen so far. Query q is head
 * q % group of the tree's row q / group. */
typedef struct {
    ptrdiff_t count, group, width, num_words;
    float *queries; /* [count, width], times scale and log2(e): weights are powers of 2 */
    float *sums;    /* [count, width] of weighted values */
    float *highest; /* [count] scores */
    float *totals;  /* [count, LANES] of weights */
    float *tail;    /* [width, TILE] room for the keys of the tree's rows */
} query_block;

/* All queries look at a tile; meanwhile what comes next is fetched. */
void ddtree_look(const key_tile *tile, const key_tile *next, const query_block *all);

/* 2^x: 2^n 2^r with |r| <= 1/2 and 2^r by a polynomial, about one unit in the last place. Below
 * -126 it is 0. */
DDTREE_TARGET static inline __m256 exp2_lanes(__m256 x) {
    const __m256 kept = _mm256_cmp_ps(x, _mm256_set1_ps(-126.0f), _CMP_GE_OQ);
    const __m256 n = _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m256 r = _mm256_sub_ps(x, n);
    __m256 p = _mm256_set1_ps(1.55946775e-4f);
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.34066439e-3f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(9.61769297e-3f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(5.55031055e-2f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(2.40226528e-1f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(6.93147215e-1f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f));
    const __m256i power = _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23);
    const __m256i product = _mm256_add_epi32(_mm256_castps_si256(p), power);
    return _mm256_and_ps(_mm256_castsi256_ps(product), kept);
}

#endif
#endif
