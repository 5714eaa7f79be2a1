/* The best draft tree of B nodes, as src/ddtree/tree/reference.py defines it. Knows no Python.
 *
 * Letters in shapes: L drafted depths, K ranks kept per depth, N rows of the tree, root included.
 */
#ifndef DDTREE_BUILD_TREE_H
#define DDTREE_BUILD_TREE_H

#include <stddef.h>
#include <stdint.h>

enum { DDTREE_BAD_MARGINALS = -1 };

/* [L, K], row-major; log_probs sorted from high to low in each row, L and K below 2^31.
 *
 * A first-order draft has transitions too, [L - 1, K, K] each, NULL otherwise: entry (d, p, j) is of
 * what is j-th best at depth d + 2 behind rank p of depth d + 1, and `followers` its rank there.
 */
typedef struct {
    const float *log_probs;
    const int64_t *token_ids;
    int64_t num_depths;
    int64_t num_ranks;
    const float *transitions;
    const int64_t *followers;
} ddtree_marginals;

/* A candidate, ordered as two words: see build_tree.c. */
typedef struct {
    uint64_t high;
    uint64_t low;
} ddtree_candidate;

/* What the caller lends: room for `max_rows` entries in each array. Rows as in types.DraftTree, and
 * the column of each one's token in its depth's `token_ids`. */
typedef struct {
    ddtree_candidate *heap;
    int64_t *token_ids;
    int32_t *parents;
    int32_t *depths;
    int32_t *ranks;
    int32_t *columns;
    float *log_probs;
} ddtree_rows;

/* Checks the log-probs (no NaN, none above 0, each row sorted) and the followers, and counts.
 *
 * Returns the most rows that a tree of this budget can have, from 1 to min(budget, 2^31 - 2) + 1,
 * or DDTREE_BAD_MARGINALS.
 */
int64_t ddtree_max_rows(const ddtree_marginals *marginals, int64_t budget);

/* Builds the tree of checked marginals; returns N, from 1 to `max_rows`. */
int64_t ddtree_build_tree(const ddtree_marginals *marginals, int64_t root_id, int64_t max_rows,
                          const ddtree_rows *rows);

#endif
