/* Who sees whom in a tree, as src/ddtree/tree/geometry.py defines it. Knows no Python. */
#ifndef DDTREE_ANCESTOR_MASK_H
#define DDTREE_ANCESTOR_MASK_H

#include <stddef.h>
#include <stdint.h>

/* Fills mask [N, N] with 1 at (i, j) where row j is row i or an ancestor of it, with 0 elsewhere.
 *
 * Args: parents [N], from row 1 on the row of the parent, which comes first.
 * Returns 0, or the first row whose parent does not come before it.
 */
size_t ddtree_ancestor_mask(const int32_t *parents, size_t num_rows, uint8_t *mask);

#endif
