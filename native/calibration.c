#include "calibration.h"

#include <math.h>

/* The bin of a log-prob; most are in the lowest. */
static int64_t bin_of(const ddtree_bins *bins, double log_prob) {
    int64_t bin = 0;
    while (bin < bins->num_bins - 1 && bins->edges[bin] < log_prob) bin++;
    return bin;
}

void ddtree_count(double *counts, int64_t num_counted, const ddtree_bins *bins,
                  const ddtree_said *said, const int64_t *chosen, int64_t num_chosen, double fade) {
    const int64_t num_bins = bins->num_bins, width = 2 * num_bins + 2;
    const float *log_prob = said->log_probs;
    const int64_t *token_id = said->token_ids;
    for (int64_t i = 0; i < num_counted * width; i++) counts[i] *= fade;
    for (int64_t depth = 0; depth < num_chosen; depth++, counts += width) {
        for (int64_t rank = 0; rank < said->num_ranks; rank++, log_prob++, token_id++) {
            const int64_t bin = bin_of(bins, *log_prob);
            counts[bin] += 1.0;
            counts[2 * num_bins + 1] += exp(*log_prob);
            if (*token_id != chosen[depth]) continue;
            counts[num_bins + bin] += 1.0;
            counts[2 * num_bins] += 1.0;
        }
    }
}

static double log_odds(double log_prob) { return log_prob - log(-expm1(log_prob)); }

/* The same of log-probs between the outermost centres, and back, as well as float32 can tell. */
static float log_odds_of(float log_prob) { return log_prob - logf(1.0f - expf(log_prob)); }
static float log_prob_of(float log_odds) { return -logf(1.0f + expf(-log_odds)); }

/* What each bin of a depth is worth, rising, as log-probs: pool adjacent violators. */
static void rates_of(const double *counts, const ddtree_bins *bins, double prior_weight,
                     double prior_tokens, double *rates) {
    const int64_t num_bins = bins->num_bins;
    const double *seen = counts, *hits = counts + num_bins, *whole = counts + 2 * num_bins;
    const double share = fmin((whole[0] + prior_tokens) / (whole[1] + prior_tokens), 1.0);
    double sums[DDTREE_MAX_BINS], weights[DDTREE_MAX_BINS];
    int64_t ends[DDTREE_MAX_BINS], num_blocks = 0;
    for (int64_t bin = 0; bin < num_bins; bin++) {
        double sum = hits[bin] + prior_weight * share * exp(bins->centres[bin]);
        double weight = seen[bin] + prior_weight;
        while (num_blocks > 0 && sums[num_blocks - 1] * weight > sum * weights[num_blocks - 1]) {
            num_blocks--;
            sum += sums[num_blocks];
            weight += weights[num_blocks];
        }
        sums[num_blocks] = sum;
        weights[num_blocks] = weight;
        ends[num_blocks++] = bin + 1;
    }
    for (int64_t bin = 0, block = 0; block < num_blocks; block++) {
        const double rate = log(sums[block] / weights[block]);
        while (bin < ends[block]) rates[bin++] = rate;
    }
}

void ddtree_worth(const double *counts, const ddtree_bins *bins, const ddtree_said *said,
                  double prior_weight, double prior_tokens, float *worth) {
    const double *centres = bins->centres;
    const int64_t num_bins = bins->num_bins, last = num_bins - 1;
    const float *log_prob = said->log_probs;
    double rates[DDTREE_MAX_BINS], centre_odds[DDTREE_MAX_BINS], odds[DDTREE_MAX_BINS];
    for (int64_t bin = 0; bin < num_bins; bin++) centre_odds[bin] = log_odds(centres[bin]);
    for (int64_t depth = 0; depth < said->num_depths; depth++, counts += 2 * num_bins + 2) {
        rates_of(counts, bins, prior_weight, prior_tokens, rates);
        for (int64_t bin = 0; bin < num_bins; bin++) odds[bin] = log_odds(rates[bin]);
        float lowest = 0.0f;
        for (int64_t rank = 0; rank < said->num_ranks; rank++, log_prob++, worth++) {
            const float x = *log_prob;
            int64_t right = 0;
            while (right < num_bins && centres[right] < x) right++;
            float value;
            if (right == 0 || right == num_bins) {
                const int64_t nearest = right == 0 ? 0 : last;
                value = (float)(x + (rates[nearest] - centres[nearest]));
            } else {
                const double left = centre_odds[right - 1];
                const double along = (log_odds_of(x) - left) / (centre_odds[right] - left);
                const double found = odds[right - 1] + along * (odds[right] - odds[right - 1]);
                value = log_prob_of((float)found);
            }
            /* Not fminf: a NaN must reach the builder, which refuses it. */
            if (!(value >= lowest)) lowest = value;
            *worth = lowest;
        }
    }
}
