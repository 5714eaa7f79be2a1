#include "linear.h"

#if (defined(__x86_64__) || defined(_M_X64)) && defined(__GNUC__) && defined(_OPENMP)

#include <immintrin.h>
#include <omp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define PANEL DDTREE_PANEL
#define MOST_ROWS 9 /* of any kernel below */
#define AHEAD 32    /* lines: how far a single row, which only streams, looks ahead */
#define CACHED 262144 /* bytes of inputs */
#define FEWEST (7 * MOST_ROWS)
/* Below so many multiply-adds waking the threads costs more than they save. */
#define SMALL 65536

int ddtree_linear_supported(void) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

/* One panel for R rows. A line of 16 weights serves R rows from registers; meanwhile a line of what
 * comes next is fetched, one for every 2^shift lines, so that memory and arithmetic overlap. */
#define ROWS(R)                                                                                    \
    __attribute__((target("avx2,fma"))) static void rows_##R(                                      \
        const float *x, ptrdiff_t K, const float *panel, const float *bias, const float *next,     \
        int shift, float *y, ptrdiff_t ldy) {                                                      \
        __m256 low[R], high[R];                                                                    \
        _Pragma("GCC unroll 6") for (int r = 0; r < R; r++) {                                      \
            low[r] = _mm256_setzero_ps();                                                          \
            high[r] = _mm256_setzero_ps();                                                         \
        }                                                                                          \
        for (ptrdiff_t k = 0; k < K; k++) {                                                        \
            const __m256 w0 = _mm256_load_ps(panel + k * PANEL);                                   \
            const __m256 w1 = _mm256_load_ps(panel + k * PANEL + 8);                               \
            _mm_prefetch((const char *)(next + (k >> shift) * PANEL), _MM_HINT_T1);                \
            _Pragma("GCC unroll 6") for (int r = 0; r < R; r++) {                                  \
                const __m256 value = _mm256_broadcast_ss(x + r * K + k);                           \
                low[r] = _mm256_fmadd_ps(value, w0, low[r]);                                       \
                high[r] = _mm256_fmadd_ps(value, w1, high[r]);                                     \
            }                                                                                      \
        }                                                                                          \
        _Pragma("GCC unroll 6") for (int r = 0; r < R; r++) {                                      \
            if (bias != NULL) {                                                                    \
                low[r] = _mm256_add_ps(low[r], _mm256_loadu_ps(bias));                             \
                high[r] = _mm256_add_ps(high[r], _mm256_loadu_ps(bias + 8));                       \
            }                                                                                      \
            _mm256_storeu_ps(y + r * ldy, low[r]);                                                 \
            _mm256_storeu_ps(y + r * ldy + 8, high[r]);                                            \
        }                                                                                          \
    }

ROWS(1)
ROWS(2)
ROWS(3)
ROWS(4)
ROWS(5)
ROWS(6)

/* The same with a panel's line in one register: every output is the same chain, so the same bits.
 * A line is 16 floats, or 16 pairs of bfloat16 for neighbouring k; an input is then such a pair. */
#define WIDE_ROWS(NAME, R, TARGET, STEP)                                                           \
    __attribute__((target(TARGET))) static void NAME##_##R(                                        \
        const float *x, ptrdiff_t K, const float *panel, const float *bias, const float *next,     \
        int shift, float *y, ptrdiff_t ldy) {                                                      \
        __m512 sum[R];                                                                             \
        _Pragma("GCC unroll 9") for (int r = 0; r < R; r++) sum[r] = _mm512_setzero_ps();         \
        for (ptrdiff_t k = 0; k < K; k++) {                                                        \
            const __m512 w = _mm512_load_ps(panel + k * PANEL);                                    \
            _mm_prefetch((const char *)(next + (k >> shift) * PANEL), _MM_HINT_T1);                \
            _Pragma("GCC unroll 9") for (int r = 0; r < R; r++) sum[r] =                          \
                STEP(x + r * K + k, w, sum[r]);                                                    \
        }                                                                                          \
        _Pragma("GCC unroll 9") for (int r = 0; r < R; r++) {                                     \
            if (bias != NULL) sum[r] = _mm512_add_ps(sum[r], _mm512_loadu_ps(bias));               \
            _mm512_storeu_ps(y + r * ldy, sum[r]);                                                 \
        }                                                                                          \
    }
#define ALL_WIDE_ROWS(NAME, TARGET, STEP)                                                          \
    WIDE_ROWS(NAME, 1, TARGET, STEP)                                                               \
    WIDE_ROWS(NAME, 2, TARGET, STEP)                                                               \
    WIDE_ROWS(NAME, 3, TARGET, STEP)                                                               \
    WIDE_ROWS(NAME, 4, TARGET, STEP)                                                               \
    WIDE_ROWS(NAME, 5, TARGET, STEP)                                                               \
    WIDE_ROWS(NAME, 6, TARGET, STEP)                                                               \
    WIDE_ROWS(NAME, 7, TARGET, STEP)                                                               \
    WIDE_ROWS(NAME, 8, TARGET, STEP)                                                               \
    WIDE_ROWS(NAME, 9, TARGET, STEP)

#define WIDE_STEP(x, w, sum) _mm512_fmadd_ps(_mm512_set1_ps(*(x)), w, sum)

ALL_WIDE_ROWS(wide, "avx512f", WIDE_STEP)

#if defined(__clang__) || __GNUC__ >= 11 /* know AVX512-BF16 */
#define PAIRS 1
#define PAIRS_TARGET "avx512f,avx512bw,avx512vl,avx512bf16"
typedef int32_t __attribute__((may_alias)) pair;
/* Both products of a pair and their sum, in the processor's own order. Integers are broadcast: as
 * floats the same takes an eighth longer. */
#define PAIR_STEP(x, w, sum)                                                                       \
    _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_epi32(*(const pair *)(x)), (__m512bh)(w))

ALL_WIDE_ROWS(pairs, PAIRS_TARGET, PAIR_STEP)
#endif

typedef void (*rows_kernel)(const float *, ptrdiff_t, const float *, const float *, const float *,
                            int, float *, ptrdiff_t);

/* Kernels by rows, 1 to `most`. */
typedef struct {
    ptrdiff_t most;
    rows_kernel of[MOST_ROWS + 1];
} kernel_set;

/* 12 accumulators, 2 weights, 1 input: 15 of 16 registers. */
static const kernel_set NARROW = {6, {NULL, rows_1, rows_2, rows_3, rows_4, rows_5, rows_6}};
/* 9 accumulators hide a multiply-add's latency; more rows read their inputs from too many places.
 * 17 rows, the root and a usual tree, are two blocks. */
#define WIDE_SET(NAME)                                                                             \
    {9,                                                                                            \
     {NULL, NAME##_1, NAME##_2, NAME##_3, NAME##_4, NAME##_5, NAME##_6, NAME##_7, NAME##_8,        \
      NAME##_9}}
static const kernel_set WIDE = WIDE_SET(wide);
#ifdef PAIRS
static const kernel_set PAIRED = WIDE_SET(pairs);
#endif

static const kernel_set *kernels_for(int lanes) {
    return lanes >= 16 && __builtin_cpu_supports("avx512f") ? &WIDE : &NARROW;
}

/* All rows for the columns of one panel, in blocks of about equal height. */
static void one_panel(const kernel_set *kernels, const float *x, ptrdiff_t M, ptrdiff_t K,
                      const float *panel, const float *bias, float *y, ptrdiff_t N,
                      ptrdiff_t width) {
    const ptrdiff_t num_blocks = (M + kernels->most - 1) / kernels->most;
    int shift = 0;
    while ((2 << shift) <= num_blocks) shift++;
    float whole[MOST_ROWS * PANEL];
    ptrdiff_t m = 0;
    for (ptrdiff_t block = 0; block < num_blocks; block++) {
        const ptrdiff_t left = num_blocks - block, rows = (M - m + left - 1) / left;
        /* Each block fetches its share of the next panel; the last ones may find it fetched. */
        const ptrdiff_t share = (block & ((1 << shift) - 1)) * (K >> shift);
        const float *next = panel + PANEL * (M == 1 ? AHEAD : K + share);
        if (width == PANEL) {
            kernels->of[rows](x + m * K, K, panel, bias, next, shift, y + m * N, N);
        } else {
            kernels->of[rows](x + m * K, K, panel, bias, next, shift, whole, PANEL);
            for (ptrdiff_t r = 0; r < rows; r++)
                memcpy(y + (m + r) * N, whole + r * PANEL, (size_t)width * sizeof(float));
        }
        m += rows;
    }
}

/* Rows that all panels serve before the next ones: their inputs stay in the second-level cache,
 * and they are enough for reading all weights again to cost little. */
static ptrdiff_t chunk_of(ptrdiff_t K) {
    const ptrdiff_t fitting = CACHED / (K * (ptrdiff_t)sizeof(float)) / MOST_ROWS * MOST_ROWS;
    return fitting > FEWEST ? fitting : FEWEST;
}

static void all_panels(const kernel_set *kernels, const float *x, const float *packed,
                       const float *bias, float *y, ptrdiff_t M, ptrdiff_t N, ptrdiff_t K,
                       int num_threads) {
    const ptrdiff_t num_panels = (N + PANEL - 1) / PANEL, chunk = chunk_of(K);
#pragma omp parallel num_threads(num_threads) if (M * N * K > SMALL)
    {
        const int thread = omp_get_thread_num(), threads = omp_get_num_threads();
        const ptrdiff_t first = num_panels * thread / threads;
        const ptrdiff_t end = num_panels * (thread + 1) / threads;
        for (ptrdiff_t m = 0; m < M; m += chunk) {
            const ptrdiff_t rows = M - m < chunk ? M - m : chunk;
            for (ptrdiff_t j = first; j < end; j++) {
                const ptrdiff_t column = j * PANEL, width = N - column < PANEL ? N - column : PANEL;
                one_panel(kernels, x + m * K, rows, K, packed + column * K,
                          bias == NULL ? NULL : bias + column, y + m * N + column, N, width);
            }
        }
    }
}

void ddtree_linear(const float *x, const float *packed, const float *bias, float *y, ptrdiff_t M,
                   ptrdiff_t N, ptrdiff_t K, int num_threads, int lanes) {
    all_panels(kernels_for(lanes), x, packed, bias, y, M, N, K, num_threads);
}

#ifdef PAIRS

int ddtree_linear_pairs_supported(void) {
    return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl");
}

/* Each row's values to the nearest bfloat16, an odd number of them with a zero behind. */
__attribute__((target(PAIRS_TARGET))) static void round_rows(const float *x, ptrdiff_t M,
                                                             ptrdiff_t K, float *pairs) {
    const ptrdiff_t width = (K + 1) / 2;
    for (ptrdiff_t m = 0; m < M; m++, x += K, pairs += width) {
        uint16_t *out = (uint16_t *)pairs;
        for (ptrdiff_t k = 0; k < K; k += PANEL) {
            const ptrdiff_t left = K - k;
            const __mmask16 some = left < PANEL ? (__mmask16)((1u << left) - 1) : 0xffff;
            /* A row of an odd number of values is followed by one more. */
            const __mmask16 kept = left < PANEL ? (__mmask16)(some | some << (left & 1)) : 0xffff;
            const __m256bh rounded = _mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(some, x + k));
            _mm256_mask_storeu_epi16(out + k, kept, (__m256i)rounded);
        }
    }
}

int ddtree_linear_pairs(const float *x, const void *packed, const float *bias, float *y,
                        ptrdiff_t M, ptrdiff_t N, ptrdiff_t K, int num_threads) {
    const ptrdiff_t width = (K + 1) / 2;
    float *pairs = malloc((size_t)(M * width) * sizeof(float) + 1);
    if (pairs == NULL) return 1;
    round_rows(x, M, K, pairs);
    all_panels(&PAIRED, pairs, packed, bias, y, M, N, width, num_threads);
    free(pairs);
    return 0;
}

#endif

#else

int ddtree_linear_supported(void) { return 0; }

void ddtree_linear(const float *x, const float *packed, const float *bias, float *y, ptrdiff_t M,
                   ptrdiff_t N, ptrdiff_t K, int num_threads, int lanes) {
    (void)x, (void)packed, (void)bias, (void)y, (void)M, (void)N, (void)K, (void)num_threads;
    (void)lanes;
}

#endif

#ifndef PAIRS

int ddtree_linear_pairs_supported(void) { return 0; }

int ddtree_linear_pairs(const float *x, const void *packed, const float *bias, float *y,
                        ptrdiff_t M, ptrdiff_t N, ptrdiff_t K, int num_threads) {
    (void)x, (void)packed, (void)bias, (void)y, (void)M, (void)N, (void)K, (void)num_threads;
    return 0;
}

#endif
