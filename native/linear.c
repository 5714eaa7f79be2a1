#include "linear.h"

#if (defined(__x86_64__) || defined(_M_X64)) && defined(__GNUC__) && defined(_OPENMP)

#include <immintrin.h>
#include <omp.h>
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

/* The same with a panel's line in one register: every output is the same chain, so the same bits. */
#define WIDE_ROWS(R)                                                                               \
    __attribute__((target("avx512f"))) static void wide_rows_##R(                                  \
        const float *x, ptrdiff_t K, const float *panel, const float *bias, const float *next,     \
        int shift, float *y, ptrdiff_t ldy) {                                                      \
        __m512 sum[R];                                                                             \
        _Pragma("GCC unroll 9") for (int r = 0; r < R; r++) sum[r] = _mm512_setzero_ps();         \
        for (ptrdiff_t k = 0; k < K; k++) {                                                        \
            const __m512 w = _mm512_load_ps(panel + k * PANEL);                                    \
            _mm_prefetch((const char *)(next + (k >> shift) * PANEL), _MM_HINT_T1);                \
            _Pragma("GCC unroll 9") for (int r = 0; r < R; r++) sum[r] =                          \
                _mm512_fmadd_ps(_mm512_set1_ps(x[r * K + k]), w, sum[r]);                          \
        }                                                                                          \
        _Pragma("GCC unroll 9") for (int r = 0; r < R; r++) {                                     \
            if (bias != NULL) sum[r] = _mm512_add_ps(sum[r], _mm512_loadu_ps(bias));               \
            _mm512_storeu_ps(y + r * ldy, sum[r]);                                                 \
        }                                                                                          \
    }

WIDE_ROWS(1)
WIDE_ROWS(2)
WIDE_ROWS(3)
WIDE_ROWS(4)
WIDE_ROWS(5)
WIDE_ROWS(6)
WIDE_ROWS(7)
WIDE_ROWS(8)
WIDE_ROWS(9)

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
static const kernel_set WIDE = {9,
                                {NULL, wide_rows_1, wide_rows_2, wide_rows_3, wide_rows_4,
                                 wide_rows_5, wide_rows_6, wide_rows_7, wide_rows_8, wide_rows_9}};

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

void ddtree_linear(const float *x, const float *packed, const float *bias, float *y, ptrdiff_t M,
                   ptrdiff_t N, ptrdiff_t K, int num_threads, int lanes) {
    const kernel_set *kernels = kernels_for(lanes);
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

#else

int ddtree_linear_supported(void) { return 0; }

void ddtree_linear(const float *x, const float *packed, const float *bias, float *y, ptrdiff_t M,
                   ptrdiff_t N, ptrdiff_t K, int num_threads, int lanes) {
    (void)x, (void)packed, (void)bias, (void)y, (void)M, (void)N, (void)K, (void)num_threads;
    (void)lanes;
}

#endif
