/* The best draft tree of B nodes, as src/ddtree/tree/reference.py defines it. Knows no Python.
 *
 * Letters in shapes: L drafted depths, K ranks kept per depth, N rows of the tree, root included.
 */
#ifndef DDTREE_BUILD_TREE_H
#define DDTREE_BUILD_TREE_H

#include <stddef.h>
#include <stdint.h>

enum { DDTREE_BAD_MARGINALS = -1 };

/* [L, K], row-major; log_probs sorted from high to low in each row, L and K below 2^31. */
typedef struct {
    const float *log_probs;
    const int64_t *token_ids;
    int64_t num_depths;
    int64_t num_ranks;
} ddtree_marginals;

/* A candidate, ordered as two words: see build_tree.c. */
typedef struct {
    uint64_t high;
    uint64_t low;
} ddtree_candidate;

/* What the caller lends: room for `max_rows` entries in each array. Rows as in types.DraftTree. */
typedef struct {
    ddtree_candidate *heap;
    int64_t *token_ids;
    int32_t *parents;
    int32_t *depths;
    int32_t *ranks;
    float *log_probs;
} ddtree_rows;

/* Checks the log-probs (no NaN, none above 0, each row sorted) and counts.
 *
 * Returns the most rows that a tree of this budget can have, from 1 to min(budget, 2^31 - 2) + 1,
 * or DDTREE_BAD_MARGINALS.
 */
int64_t ddtree_max_rows(const ddtree_marginals *marginals, int64_t budget);

/* Builds the tree of checked marginals; returns N, from 1 to `max_rows`. */
int64_t ddtree_build_tree(const ddtree_marginals *marginals, int64_t root_id, int64_t max_rows,
                          const ddtree_rows *rows);

#endif
