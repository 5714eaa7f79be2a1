/* What a drafter's probabilities are worth, as src/ddtree/sampling/worth.py defines it.
 *
 * Knows no Python. Letters in shapes: L depths counted, D <= L depths at hand, M rows of each, K
 * ranks, J bins.
 */
#ifndef DDTREE_CALIBRATION_H
#define DDTREE_CALIBRATION_H

#include <stdint.h>

enum { DDTREE_MAX_BINS = 64 };

/* centres and edges [J], log-probs, rising: bin j holds what is above edge j - 1, up to edge j. */
typedef struct {
    const double *centres;
    const double *edges;
    int64_t num_bins;
} ddtree_bins;

/* [D, M, K], row-major. */
typedef struct {
    const float *log_probs;
    const int64_t *token_ids;
    int64_t num_depths;
    int64_t num_rows;
    int64_t num_ranks;
} ddtree_said;

/* Lets `counts` [L, 2 J + 2] fade, and adds the choices at the first `num_chosen` <= D depths, of
 * one row each: M is 1. */
void ddtree_count(double *counts, int64_t num_counted, const ddtree_bins *bins,
                  const ddtree_said *said, const int64_t *chosen, int64_t num_chosen, double fade);

/* Fills `worth` [D, M, K] with log-probs as the counts have it; `token_ids` is not read. */
void ddtree_worth(const double *counts, const ddtree_bins *bins, const ddtree_said *said,
                  double prior_weight, double prior_tokens, float *worth);

#endif
