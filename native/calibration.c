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

/* What a depth's log-probs are worth, as functions of them. */
typedef struct {
    const double *centres;
    int64_t num_bins;
    double rates[DDTREE_MAX_BINS], centre_odds[DDTREE_MAX_BINS], odds[DDTREE_MAX_BINS];
} depth_map;

static float worth_of(const depth_map *map, float x) {
    const double *centres = map->centres;
    const int64_t num_bins = map->num_bins;
    int64_t right = 0;
    while (right < num_bins && centres[right] < x) right++;
    if (right == 0 || right == num_bins) {
        const int64_t nearest = right == 0 ? 0 : num_bins - 1;
        return (float)(x + (map->rates[nearest] - centres[nearest]));
    }
    const double left = map->centre_odds[right - 1];
    const double along = (log_odds_of(x) - left) / (map->centre_odds[right] - left);
    const double step = map->odds[right] - map->odds[right - 1];
    return log_prob_of((float)(map->odds[right - 1] + along * step));
}

void ddtree_worth(const double *counts, const ddtree_bins *bins, const ddtree_said *said,
                  double prior_weight, double prior_tokens, float *worth) {
    const int64_t num_bins = bins->num_bins;
    const float *log_prob = said->log_probs;
    depth_map map = {bins->centres, num_bins, {0}, {0}, {0}};
    for (int64_t bin = 0; bin < num_bins; bin++) map.centre_odds[bin] = log_odds(map.centres[bin]);
    for (int64_t depth = 0; depth < said->num_depths; depth++, counts += 2 * num_bins + 2) {
        rates_of(counts, bins, prior_weight, prior_tokens, map.rates);
        for (int64_t bin = 0; bin < num_bins; bin++) map.odds[bin] = log_odds(map.rates[bin]);
        for (int64_t row = 0; row < said->num_rows; row++) {
            float lowest = 0.0f;
            for (int64_t rank = 0; rank < said->num_ranks; rank++, log_prob++, worth++) {
                const float value = worth_of(&map, *log_prob);
                /* Not fminf: a NaN must reach the builder, which refuses it. */
                if (!(value >= lowest)) lowest = value;
                *worth = lowest;
            }
        }
    }
}
