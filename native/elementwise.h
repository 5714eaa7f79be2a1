/* What stands between the linear layers, row by row in float32. Knows no Python. */
#ifndef DDTREE_ELEMENTWISE_H
#define DDTREE_ELEMENTWISE_H

#include <stddef.h>

/* y[m] = weight * x[m] / sqrt(mean(x[m]^2) + eps), all [M][D] contiguous. */
void ddtree_rms_norm(const float *x, const float *weight, float *y, ptrdiff_t M, ptrdiff_t D,
                     float eps);

/* y = gate / (1 + exp(-gate)) * up, element by element, `count` of them. */
void ddtree_swiglu(const float *gate, const float *up, float *y, ptrdiff_t count, int num_threads);

#endif
