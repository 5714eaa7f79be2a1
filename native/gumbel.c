#include "gumbel.h"

#include <string.h>

/* A fused multiply-add rounds once where the twin rounds twice. Our gcc needs no telling (-std=c11);
 * it warns of a pragma that it does not know. */
#ifdef __clang__
#pragma STDC FP_CONTRACT OFF
#endif

/* Into both variants of `fill`, or the wider one would call what was compiled for the other. */
#ifdef __GNUC__
#define INLINE inline __attribute__((always_inline))
#else
#define INLINE inline
#endif

enum { PER_BLOCK = 8, BLOCKS = 32, PIECE = PER_BLOCK * BLOCKS };

typedef struct {
    uint64_t high, low;
} wide;

#ifdef __SIZEOF_INT128__
__extension__ typedef unsigned __int128 twice;
#endif

static INLINE wide product(uint64_t a, uint64_t b) {
#ifdef __SIZEOF_INT128__
    const twice whole = (twice)a * b;
    return (wide){(uint64_t)(whole >> 64), (uint64_t)whole};
#else
    const uint64_t a0 = (uint32_t)a, a1 = a >> 32, b0 = (uint32_t)b, b1 = b >> 32;
    const uint64_t low = a0 * b0, first = a1 * b0 + (low >> 32);
    const uint64_t second = a0 * b1 + (uint32_t)first;
    return (wide){a1 * b1 + (first >> 32) + (second >> 32), a * b};
#endif
}

/* Philox 4x64 with 10 rounds (Salmon et al., SC 2011), the low half of each word first. */
static INLINE void philox(uint64_t seed, uint64_t block, uint64_t position, uint32_t *bits) {
    uint64_t word[4] = {block, position, 0, 0}, key[2] = {seed, 0};
    for (int round = 0; round < 10; round++) {
        const wide left = product(0xD2E7470EE14C6C93u, word[0]);
        const wide right = product(0xCA5A826395121157u, word[2]);
        word[0] = right.high ^ word[1] ^ key[0];
        word[1] = right.low;
        word[2] = left.high ^ word[3] ^ key[1];
        word[3] = left.low;
        key[0] += 0x9E3779B97F4A7C15u;
        key[1] += 0xBB67AE8584CAA73Bu;
    }
    for (int i = 0; i < 4; i++) {
        bits[2 * i] = (uint32_t)word[i];
        bits[2 * i + 1] = (uint32_t)(word[i] >> 32);
    }
}

/* uint32 to the nearest float; compilers know no vector instruction for it. */
static INLINE float to_float(uint32_t n) {
    return (float)(int32_t)(n >> 16) * 65536.0f + (float)(int32_t)(n & 0xFFFFu);
}

static INLINE int32_t bits_of(float x) {
    int32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static INLINE float float_of(int32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* k ln(2) + log(1 + s), for 1 + s from sqrt(1/2) to sqrt(2); see the twin. */
static INLINE float log_of(float k, float s) {
    const float s2 = s * s;
    const float low = (0.333333283662796f + s * -0.25000298023223877f) +
                      s2 * (0.20001468062400818f + s * -0.16642247140407562f);
    const float high = (0.14202174544334412f + s * -0.12972238659858704f) +
                       s2 * (0.12712307274341583f + s * -0.08101558685302734f);
    const float p = low + (s2 * s2) * high;
    return k * 0.6931471824645996f + (s + s2 * (s * p - 0.5f));
}

static INLINE float gumbel_of(uint32_t n) {
    const float u = (to_float(n) + 0.5f) * 0x1p-32f;
    const float rest = (to_float(~n) + 0.5f) * 0x1p-32f; /* 1 - u */
    const int32_t rest_bits = bits_of(rest), rest_power = (rest_bits - 0x3F3504F3) >> 23;
    const float mantissa = float_of(rest_bits - rest_power * (1 << 23));
    /* Chosen by bits: a branch would keep compilers from vector instructions. */
    const int32_t near = -(rest_power == 0);
    const float s = float_of((bits_of(-u) & near) | (bits_of(mantissa - 1.0f) & ~near));
    const float exponential = -log_of((float)rest_power, s);
    const int32_t bits = bits_of(exponential), power = (bits - 0x3F3504F3) >> 23;
    return -log_of((float)power, float_of(bits - power * (1 << 23)) - 1.0f);
}

static INLINE void fill(uint64_t seed, uint64_t position, float *noise, int64_t vocab_size) {
    uint32_t bits[PIECE];
    float drawn[PIECE];
    uint64_t block = 1; /* numpy's generator counts before it draws */
    for (int64_t first = 0; first < vocab_size; first += PIECE) {
        for (int i = 0; i < BLOCKS; i++) philox(seed, block++, position, bits + PER_BLOCK * i);
        for (int i = 0; i < PIECE; i++) drawn[i] = gumbel_of(bits[i]);
        const int64_t left = vocab_size - first;
        memcpy(noise + first, drawn, (size_t)(left < PIECE ? left : PIECE) * sizeof *drawn);
    }
}

#if defined(__x86_64__) && defined(__GNUC__)
/* The same operations, more of them at once; without "fma", so that none is fused. */
__attribute__((target("avx2"))) static void fill_avx2(uint64_t seed, uint64_t position,
                                                      float *noise, int64_t vocab_size) {
    fill(seed, position, noise, vocab_size);
}
#endif

void ddtree_gumbel(uint64_t seed, uint64_t position, float *noise, int64_t vocab_size) {
#if defined(__x86_64__) && defined(__GNUC__)
    if (__builtin_cpu_supports("avx2")) {
        fill_avx2(seed, position, noise, vocab_size);
        return;
    }
#endif
    fill(seed, position, noise, vocab_size);
}
