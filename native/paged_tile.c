#include "paged_tile.h"

#ifdef DDTREE_AVX2

#include <math.h>

#define MAX_ROWS 6 /* 12 accumulators, 2 keys, 1 query: 15 of 16 vector registers */
#define FEW_ROWS 3 /* so few have registers left for two panels at once */
#define LINE 16    /* floats of a cache line */
#define INLINE static inline __attribute__((always_inline)) DDTREE_TARGET
#define UNROLL _Pragma("GCC unroll 8")

INLINE float highest_lane(__m256 v) {
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_shuffle_ps(s, s, 1)));
}

/* Scores of the keys of `vectors` / 2 panels for R queries. */
INLINE void score_panels(const int R, const int vectors, const float *queries, ptrdiff_t width,
                         const float *const *panels, ptrdiff_t key_step, float *scores) {
    __m256 sum[MAX_ROWS][4];
    UNROLL for (int r = 0; r < R; r++) {
        UNROLL for (int v = 0; v < vectors; v++) sum[r][v] = _mm256_setzero_ps();
    }
    for (ptrdiff_t c = 0; c < width; c++) {
        __m256 key[4];
        UNROLL for (int v = 0; v < vectors; v++) key[v] =
            _mm256_loadu_ps(panels[v / 2] + c * key_step + v % 2 * LANES);
        UNROLL for (int r = 0; r < R; r++) {
            const __m256 query = _mm256_broadcast_ss(queries + r * width + c);
            UNROLL for (int v = 0; v < vectors; v++) sum[r][v] =
                _mm256_fmadd_ps(query, key[v], sum[r][v]);
        }
    }
    UNROLL for (int r = 0; r < R; r++) {
        UNROLL for (int v = 0; v < vectors; v++)
            _mm256_storeu_ps(scores + r * TILE + v * LANES, sum[r][v]);
    }
}

/* Add the weighted values of a tile to 8 * `vectors` columns of R sums, which first shrink. */
INLINE void add_values(const int R, const int vectors, const key_tile *tile, ptrdiff_t column,
                       const float *weights, const float *shrink, float *sums, ptrdiff_t width) {
    __m256 sum[MAX_ROWS][4];
    UNROLL for (int r = 0; r < R; r++) {
        UNROLL for (int v = 0; v < vectors; v++) sum[r][v] =
            _mm256_mul_ps(_mm256_broadcast_ss(shrink + r),
                          _mm256_loadu_ps(sums + r * width + v * LANES));
    }
    for (ptrdiff_t first = 0; first < tile->count; first += PANEL) {
        const float *value = tile->values[first / PANEL] + column;
        const ptrdiff_t end = first + PANEL < tile->count ? first + PANEL : tile->count;
        for (ptrdiff_t k = first; k < end; k++, value += tile->value_step) {
            __m256 part[4];
            UNROLL for (int v = 0; v < vectors; v++) part[v] = _mm256_loadu_ps(value + v * LANES);
            UNROLL for (int r = 0; r < R; r++) {
                const __m256 weight = _mm256_broadcast_ss(weights + r * TILE + k);
                UNROLL for (int v = 0; v < vectors; v++) sum[r][v] =
                    _mm256_fmadd_ps(weight, part[v], sum[r][v]);
            }
        }
    }
    UNROLL for (int r = 0; r < R; r++) {
        UNROLL for (int v = 0; v < vectors; v++)
            _mm256_storeu_ps(sums + r * width + v * LANES, sum[r][v]);
    }
}

/* Scores of keys that are neither ancestors nor the row itself become -inf. */
INLINE void hide(const int64_t *words, ptrdiff_t first_key, ptrdiff_t padded, float *scores) {
    const __m256i bits = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    for (ptrdiff_t k = 0; k < padded; k += LANES) {
        const uint64_t word = (uint64_t)words[(first_key + k) / 64];
        const __m256i eight = _mm256_set1_epi32((int)(word >> (first_key + k) % 64 & 255));
        const __m256i seen = _mm256_cmpeq_epi32(_mm256_and_si256(eight, bits), bits);
        const __m256 score = _mm256_loadu_ps(scores + k);
        _mm256_storeu_ps(scores + k, _mm256_blendv_ps(_mm256_set1_ps(-INFINITY), score,
                                                      _mm256_castsi256_ps(seen)));
    }
}

/* Turn scores of R queries into weights relative to the highest score so far. Earlier weights are
 * to be multiplied with `shrink`. */
INLINE void soften(const int R, ptrdiff_t padded, float *scores, float *highest, float *totals,
                   float shrink[LANES]) {
    float before[LANES] = {0}, now[LANES] = {0};
    for (int r = 0; r < R; r++) {
        __m256 most = _mm256_set1_ps(highest[r]);
        for (ptrdiff_t k = 0; k < padded; k += LANES)
            most = _mm256_max_ps(most, _mm256_loadu_ps(scores + r * TILE + k));
        before[r] = highest[r];
        now[r] = highest[r] = highest_lane(most);
    }
    _mm256_storeu_ps(
        shrink, exp2_lanes(_mm256_sub_ps(_mm256_loadu_ps(before), _mm256_loadu_ps(now))));
    for (int r = 0; r < R; r++) {
        __m256 sum = _mm256_mul_ps(_mm256_set1_ps(shrink[r]), _mm256_loadu_ps(totals + r * LANES));
        for (ptrdiff_t k = 0; k < padded; k += LANES) {
            float *at = scores + r * TILE + k;
            const __m256 weight =
                exp2_lanes(_mm256_sub_ps(_mm256_loadu_ps(at), _mm256_set1_ps(now[r])));
            _mm256_storeu_ps(at, weight);
            sum = _mm256_add_ps(sum, weight);
        }
        _mm256_storeu_ps(totals + r * LANES, sum);
    }
}

/* Fetch share `share` of `shares` of what comes next, so that memory and arithmetic overlap. */
INLINE void fetch(const key_tile *next, ptrdiff_t width, ptrdiff_t share, ptrdiff_t shares,
                  ptrdiff_t panel) {
    if (panel * PANEL >= next->count) return;
    for (ptrdiff_t c = width * share / shares; c < width * (share + 1) / shares; c++) {
        /* A panel has as many lines of keys as of values. */
        _mm_prefetch((const char *)(next->keys[panel] + c * next->key_step), _MM_HINT_T1);
        _mm_prefetch((const char *)(next->values[panel] + c * LINE), _MM_HINT_T1);
    }
}

/* R queries from `first` on look at a tile; they are block `block` of `num_blocks` that do. */
INLINE void look(const int R, const key_tile *tile, const key_tile *next, const query_block *all,
                 ptrdiff_t first, ptrdiff_t block, ptrdiff_t num_blocks) {
    float scores[MAX_ROWS * TILE], shrink[LANES];
    const ptrdiff_t count = tile->count, width = all->width;
    const ptrdiff_t padded = (count + LANES - 1) / LANES * LANES;
    const float *queries = all->queries + first * width;
    ptrdiff_t p = 0;
    if (R <= FEW_ROWS)
        for (; (p + 1) * PANEL < count; p += 2)
            score_panels(R, 4, queries, width, tile->keys + p, tile->key_step, scores + p * PANEL);
    for (; p * PANEL < count; p++) {
        /* Few rows stream as fast as memory gives, and fetching only gets in their way. */
        if (R > FEW_ROWS) fetch(next, width, block, num_blocks, p);
        score_panels(R, 2, queries, width, tile->keys + p, tile->key_step, scores + p * PANEL);
    }
    for (int r = 0; r < R; r++) {
        for (ptrdiff_t k = count; k < padded; k++) scores[r * TILE + k] = -INFINITY;
        if (tile->words != NULL)
            hide(tile->words + (first + r) / all->group * all->num_words, tile->first_key, padded,
                 scores + r * TILE);
    }
    soften(R, padded, scores, all->highest + first, all->totals + first * LANES, shrink);
    float *sums = all->sums + first * width;
    ptrdiff_t c = 0;
    if (R <= FEW_ROWS)
        for (; c + 2 * PANEL <= width; c += 2 * PANEL)
            add_values(R, 4, tile, c, scores, shrink, sums + c, width);
    for (; c < width; c += PANEL) add_values(R, 2, tile, c, scores, shrink, sums + c, width);
}

#define LOOK(R)                                                                                    \
    DDTREE_TARGET static void look_##R(const key_tile *tile, const key_tile *next,                 \
                                       const query_block *all, ptrdiff_t first, ptrdiff_t block,   \
                                       ptrdiff_t num_blocks) {                                     \
        look(R, tile, next, all, first, block, num_blocks);                                        \
    }

LOOK(1)
LOOK(2)
LOOK(3)
LOOK(4)
LOOK(5)
LOOK(6)

typedef void (*look_kernel)(const key_tile *, const key_tile *, const query_block *, ptrdiff_t,
                            ptrdiff_t, ptrdiff_t);
static const look_kernel LOOKS[MAX_ROWS + 1] = {NULL,   look_1, look_2, look_3,
                                                look_4, look_5, look_6};

/* In blocks of about equal height. */
void ddtree_look(const key_tile *tile, const key_tile *next, const query_block *all) {
    const ptrdiff_t num_blocks = (all->count + MAX_ROWS - 1) / MAX_ROWS;
    ptrdiff_t first = 0;
    for (ptrdiff_t block = 0; block < num_blocks; block++) {
        const ptrdiff_t left = num_blocks - block, rows = (all->count - first + left - 1) / left;
        LOOKS[rows](tile, next, all, first, block, num_blocks);
        first += rows;
    }
}

#endif
