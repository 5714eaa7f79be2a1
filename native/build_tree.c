/* Best-first search (arXiv 2604.12989, Algorithm 1) on a binary heap.
 *
 * The contract orders candidates by score from high to low, then depth, parent's row and rank from
 * low to high. A score is never above 0, so the bits of its magnitude grow as it falls, and two
 * words compared as integers are that order:
 *
 *     high = magnitude's bits [32] | depth [32]        low = parent's row [32] | rank [32]
 *
 * Every parent has at most one candidate in the heap, so the heap never outgrows the tree.
 */
#include "build_tree.h"

#include <string.h>

#define INFINITE_BITS 0x7f800000u /* of float32: a prefix of score -inf is never a row */

static uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static int row_is_bad(const float *row, int64_t num_ranks) {
    /* With the first one at most 0, order alone keeps the others there; NaN fails either. */
    int bad = num_ranks > 0 && !(row[0] <= 0.0f);
    for (int64_t rank = 1; rank < num_ranks; rank++) bad |= !(row[rank] <= row[rank - 1]);
    return bad;
}

static int64_t count_allowed(const float *row, int64_t num_ranks) {
    int64_t low = 0, high = num_ranks;
    while (low < high) {
        int64_t middle = low + (high - low) / 2;
        if ((bits_of(row[middle]) & 0x7fffffffu) == INFINITE_BITS) high = middle;
        else low = middle + 1;
    }
    return low;
}

/* The most that may follow one token of the depth before; DDTREE_BAD_MARGINALS if a row is bad. */
static int64_t most_followers(const ddtree_marginals *marginals, int64_t depth) {
    const int64_t num_ranks = marginals->num_ranks;
    const float *row = marginals->log_probs + (depth - 1) * num_ranks;
    if (row_is_bad(row, num_ranks)) return DDTREE_BAD_MARGINALS;
    if (depth == 1 || marginals->transitions == NULL) return count_allowed(row, num_ranks);
    row = marginals->transitions + (depth - 2) * num_ranks * num_ranks;
    const int64_t *followers = marginals->followers + (depth - 2) * num_ranks * num_ranks;
    int64_t most = 0;
    int bad = 0;
    for (int64_t i = 0; i < num_ranks * num_ranks; i++)
        bad |= (uint64_t)followers[i] >= (uint64_t)num_ranks;
    for (int64_t above = 0; above < num_ranks; above++, row += num_ranks) {
        bad |= row_is_bad(row, num_ranks);
        if (most == num_ranks) continue;
        const int64_t found = count_allowed(row, num_ranks);
        if (found > most) most = found;
    }
    return bad ? DDTREE_BAD_MARGINALS : most;
}

int64_t ddtree_max_rows(const ddtree_marginals *marginals, int64_t budget) {
    if (budget > INT32_MAX - 1) budget = INT32_MAX - 1;
    int64_t in_level = 1, in_all = 0; /* prefixes; capped at the budget, which is below 2^31 */
    for (int64_t depth = 1; depth <= marginals->num_depths; depth++) {
        const int64_t most = most_followers(marginals, depth);
        if (most == DDTREE_BAD_MARGINALS) return most;
        if (in_all >= budget) continue;
        in_level *= most;
        if (in_level > budget) in_level = budget;
        in_all += in_level;
    }
    if (in_all > budget) in_all = budget;
    return 1 + (in_all > 0 ? in_all : 0);
}

static int before(const ddtree_candidate *a, const ddtree_candidate *b) {
    return (a->high < b->high) | ((a->high == b->high) & (a->low < b->low));
}

/* Fills the hole at `place`, whose children may go first. */
static void sift_down(ddtree_candidate *heap, size_t length, size_t place, ddtree_candidate item) {
    for (;;) {
        size_t child = 2 * place + 1;
        if (child >= length) break;
        if (child + 1 < length) child += (size_t)before(&heap[child + 1], &heap[child]);
        if (!before(&heap[child], &item)) break;
        heap[place] = heap[child];
        place = child;
    }
    heap[place] = item;
}

/* Fills the hole at `place`, before whose parents the item may go. */
static void sift_up(ddtree_candidate *heap, size_t place, ddtree_candidate item) {
    while (place > 0) {
        size_t above = (place - 1) / 2;
        if (!before(&item, &heap[above])) break;
        heap[place] = heap[above];
        place = above;
    }
    heap[place] = item;
}

/* Where the first rank behind a row begins, in `transitions` and in `followers`. */
static int64_t transition_of(const ddtree_marginals *marginals, const ddtree_rows *rows,
                             int64_t row) {
    const int64_t above = (rows->depths[row] - (int64_t)1) * marginals->num_ranks;
    return (above + rows->columns[row]) * marginals->num_ranks;
}

/* The candidate of this parent and rank; 0 if there is none or it is banned. */
static int open_candidate(const ddtree_marginals *marginals, const ddtree_rows *rows,
                          int64_t parent, int64_t rank, ddtree_candidate *item) {
    const int64_t depth = rows->depths[parent] + (int64_t)1;
    if (depth > marginals->num_depths || rank >= marginals->num_ranks) return 0;
    const float *row = marginals->log_probs + (depth - 1) * marginals->num_ranks;
    if (depth > 1 && marginals->transitions != NULL)
        row = marginals->transitions + transition_of(marginals, rows, parent);
    const float log_prob = row[rank];
    const float score = (float)(rows->log_probs[parent] + log_prob);
    const uint32_t magnitude = bits_of(score) & 0x7fffffffu;
    item->high = (uint64_t)magnitude << 32 | (uint64_t)depth;
    item->low = (uint64_t)parent << 32 | (uint64_t)rank;
    return magnitude != INFINITE_BITS;
}

int64_t ddtree_build_tree(const ddtree_marginals *marginals, int64_t root_id, int64_t max_rows,
                          const ddtree_rows *rows) {
    ddtree_candidate *heap = rows->heap;
    ddtree_candidate item;
    size_t length = 0;
    rows->token_ids[0] = root_id;
    rows->parents[0] = rows->ranks[0] = -1;
    rows->depths[0] = rows->columns[0] = 0;
    rows->log_probs[0] = 0.0f;
    if (open_candidate(marginals, rows, 0, 0, &item)) heap[length++] = item;

    int64_t num_rows = 1;
    while (num_rows < max_rows && length > 0) {
        const ddtree_candidate best = heap[0];
        const uint32_t magnitude = (uint32_t)(best.high >> 32);
        const int64_t depth = (int64_t)(uint32_t)best.high;
        const int64_t parent = (int64_t)(best.low >> 32);
        const int64_t rank = (int64_t)(uint32_t)best.low;
        const int64_t row = num_rows++;
        int64_t column = rank;
        if (depth > 1 && marginals->transitions != NULL)
            column = marginals->followers[transition_of(marginals, rows, parent) + rank];
        rows->token_ids[row] = marginals->token_ids[(depth - 1) * marginals->num_ranks + column];
        rows->parents[row] = (int32_t)parent;
        rows->depths[row] = (int32_t)depth;
        rows->ranks[row] = (int32_t)rank;
        rows->columns[row] = (int32_t)column;
        rows->log_probs[row] = magnitude ? float_of(magnitude | 0x80000000u) : 0.0f;
        /* The next sibling takes the place of the one that leaves: one way through the heap. */
        if (open_candidate(marginals, rows, parent, rank + 1, &item))
            sift_down(heap, length, 0, item);
        else if (--length > 0)
            sift_down(heap, length, 0, heap[length]);
        if (open_candidate(marginals, rows, row, 0, &item)) sift_up(heap, length++, item);
    }
    return num_rows;
}
