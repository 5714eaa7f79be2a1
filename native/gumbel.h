/* Gumbel noise by seed and position, as src/ddtree/sampling/gumbel.py defines it. Knows no Python. */
#ifndef DDTREE_GUMBEL_H
#define DDTREE_GUMBEL_H

#include <stdint.h>

/* Fills `noise` [V] with the noise of the token at one position: bit for bit that of its twin, on
 * every machine that computes floats as IEEE 754 has it. */
void ddtree_gumbel(uint64_t seed, uint64_t position, float *noise, int64_t vocab_size);

#endif
