/* y = x W^T + b for few rows: a row's result does not depend on the rows beside it. */
#ifndef DDTREE_LINEAR_H
#define DDTREE_LINEAR_H

#include <stddef.h>

/* Columns of a panel. A packed weight is [ceil(N / PANEL)][K][PANEL], padded with zeros, 64-byte
 * aligned: the outputs of PANEL neighbours lie side by side for every k. */
#define DDTREE_PANEL 16

/* Whether this processor can run `ddtree_linear`. */
int ddtree_linear_supported(void);

/* x [M][K], packed weight of W [N][K], bias padded to whole panels or NULL, y [M][N].
 * Every y[m][n] is one chain of fused multiply-adds over k = 0 .. K-1, then the bias,
 * whatever the width of vectors: `lanes` floats, 8 or 16, are the most that are used. */
void ddtree_linear(const float *x, const float *packed, const float *bias, float *y, ptrdiff_t M,
                   ptrdiff_t N, ptrdiff_t K, int num_threads, int lanes);

/* Whether this processor multiplies pairs of bfloat16. */
int ddtree_linear_pairs_supported(void);

/* The same with products of bfloat16 and sums of float32. The packed weight is
 * [ceil(N / PANEL)][ceil(K / 2)][PANEL][2] in bfloat16; inputs are rounded to it. Every y[m][n] is
 * one chain over pairs of k, whatever rows are beside it. 0, or 1 where memory is missing. */
int ddtree_linear_pairs(const float *x, const void *packed, const float *bias, float *y,
                        ptrdiff_t M, ptrdiff_t N, ptrdiff_t K, int num_threads);

#endif
