#include "ancestor_mask.h"

#include <string.h>

size_t ddtree_ancestor_mask(const int32_t *parents, size_t num_rows, uint8_t *mask) {
    for (size_t row = 0; row < num_rows; row++) {
        uint8_t *seen = mask + row * num_rows;
        size_t known = 0; /* a parent sees nothing behind itself */
        if (row > 0) {
            if (parents[row] < 0 || (size_t)parents[row] >= row) return row;
            known = (size_t)parents[row] + 1;
            memcpy(seen, mask + (known - 1) * num_rows, known);
        }
        memset(seen + known, 0, num_rows - known);
        seen[row] = 1;
    }
    return 0;
}
