#include "elementwise.h"

#include "simd.h"

#ifdef DDTREE_AVX2

#include <math.h>
#include <omp.h>
#include <string.h>

#define LANES 8
/* Below so many elements waking the threads costs more than it saves. */
#define SMALL 8192

DDTREE_TARGET void ddtree_rms_norm(const float *x, const float *weight, float *y, ptrdiff_t M,
                                   ptrdiff_t D, float eps) {
    for (ptrdiff_t m = 0; m < M; m++, x += D, y += D) {
        __m256 sum = _mm256_setzero_ps();
        ptrdiff_t d = 0;
        for (; d + LANES <= D; d += LANES) {
            const __m256 value = _mm256_loadu_ps(x + d);
            sum = _mm256_fmadd_ps(value, value, sum);
        }
        float squares = ddtree_sum(sum);
        for (; d < D; d++) squares += x[d] * x[d];
        const float scale = 1.0f / sqrtf(squares / (float)D + eps);
        const __m256 scales = _mm256_set1_ps(scale);
        for (d = 0; d + LANES <= D; d += LANES)
            _mm256_storeu_ps(y + d, _mm256_mul_ps(_mm256_loadu_ps(weight + d),
                                                  _mm256_mul_ps(_mm256_loadu_ps(x + d), scales)));
        for (; d < D; d++) y[d] = weight[d] * (x[d] * scale);
    }
}

DDTREE_TARGET static __m256 swiglu(__m256 gate, __m256 up) {
    const __m256 one = _mm256_set1_ps(1.0f);
    const __m256 other = ddtree_exp(_mm256_sub_ps(_mm256_setzero_ps(), gate));
    return _mm256_mul_ps(_mm256_div_ps(gate, _mm256_add_ps(one, other)), up);
}

DDTREE_TARGET static void swiglu_part(const float *gate, const float *up, float *y,
                                      ptrdiff_t first, ptrdiff_t end) {
    ptrdiff_t i = first;
    for (; i + LANES <= end; i += LANES)
        _mm256_storeu_ps(y + i, swiglu(_mm256_loadu_ps(gate + i), _mm256_loadu_ps(up + i)));
    if (i == end) return;
    float rest[3][LANES] = {{0}}; /* the same arithmetic for the last few */
    const size_t bytes = (size_t)(end - i) * sizeof(float);
    memcpy(rest[0], gate + i, bytes);
    memcpy(rest[1], up + i, bytes);
    _mm256_storeu_ps(rest[2], swiglu(_mm256_loadu_ps(rest[0]), _mm256_loadu_ps(rest[1])));
    memcpy(y + i, rest[2], bytes);
}

void ddtree_swiglu(const float *gate, const float *up, float *y, ptrdiff_t count, int num_threads) {
#pragma omp parallel num_threads(num_threads) if (count > SMALL)
    {
        const int thread = omp_get_thread_num(), threads = omp_get_num_threads();
        /* Whole lines of 16, so that two threads never write the same one. */
        const ptrdiff_t lines = (count + 15) / 16;
        const ptrdiff_t first = lines * thread / threads * 16, end = lines * (thread + 1) / threads * 16;
        swiglu_part(gate, up, y, first, end < count ? end : count);
    }
}

#else

void ddtree_rms_norm(const float *x, const float *weight, float *y, ptrdiff_t M, ptrdiff_t D,
                     float eps) {
    (void)x, (void)weight, (void)y, (void)M, (void)D, (void)eps;
}

void ddtree_swiglu(const float *gate, const float *up, float *y, ptrdiff_t count, int num_threads) {
    (void)gate, (void)up, (void)y, (void)count, (void)num_threads;
}

#endif
