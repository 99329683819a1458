/* The checksum of words that lie in CPU memory, as checksum.py defines it. */

#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define HAVE_AVX2 1
#endif

#include "cells.h"

/* Words of one block, times the factors of their places. */
#define PLAIN(name, type)                                                                                              \
    static u64 name(const type *words, const u64 *factors, i64 num) {                                                  \
        u64 total = 0;                                                                                                 \
        for (i64 i = 0; i < num; i++) total += factors[i] * words[i];                                                  \
        return total;                                                                                                  \
    }

PLAIN(plain1, u8)
PLAIN(plain2, u16)
PLAIN(plain4, u32)

#ifdef HAVE_AVX2
/* AVX2 multiplies 32 x 32 bits to 64, which is what a word and its factor need. */
#define PRODUCTS(load, at) _mm256_mul_epu32(load, _mm256_loadu_si256((const __m256i *)(factors + (at))))
#define VECTOR(name, type, plain, load)                                                                                \
    __attribute__((target("avx2"))) static u64 name(const type *words, const u64 *factors, i64 num) {                  \
        __m256i even = _mm256_setzero_si256(), odd = even;                                                             \
        i64 i = 0;                                                                                                     \
        for (; i + 8 <= num; i += 8) {                                                                                 \
            even = _mm256_add_epi64(even, PRODUCTS(load(words + i), i));                                               \
            odd = _mm256_add_epi64(odd, PRODUCTS(load(words + i + 4), i + 4));                                         \
        }                                                                                                              \
        u64 lanes[4];                                                                                                  \
        _mm256_storeu_si256((__m256i *)lanes, _mm256_add_epi64(even, odd));                                            \
        return lanes[0] + lanes[1] + lanes[2] + lanes[3] + plain(words + i, factors + i, num - i);                     \
    }

static inline int four_bytes(const void *at) {
    int out;
    memcpy(&out, at, 4);
    return out;
}

#define LOAD1(at) _mm256_cvtepu8_epi64(_mm_cvtsi32_si128(four_bytes(at)))
#define LOAD2(at) _mm256_cvtepu16_epi64(_mm_loadl_epi64((const __m128i *)(at)))
#define LOAD4(at) _mm256_cvtepu32_epi64(_mm_loadu_si128((const __m128i *)(at)))
VECTOR(vector1, u8, plain1, LOAD1)
VECTOR(vector2, u16, plain2, LOAD2)
VECTOR(vector4, u32, plain4, LOAD4)
#endif

static u64 block_sum(const u8 *data, const u64 *factors, i64 num, int word) {
#ifdef HAVE_AVX2
    if (__builtin_cpu_supports("avx2") && word == 1) return vector1(data, factors, num);
    if (__builtin_cpu_supports("avx2") && word == 2) return vector2((const u16 *)data, factors, num);
    if (__builtin_cpu_supports("avx2") && word == 4) return vector4((const u32 *)data, factors, num);
#endif
    if (word == 1) return plain1(data, factors, num);
    if (word == 2) return plain2((const u16 *)data, factors, num);
    return plain4((const u32 *)data, factors, num);
}

/* Of all places of a block. */
static u64 place_factors[BLOCK_WORDS];

__attribute__((constructor)) static void make_place_factors(void) {
    for (u32 at = 0; at < BLOCK_WORDS; at++) place_factors[at] = place_factor(at);
}

/* `index`: of the first word in its tensor. */
static u64 sum(const u8 *data, i64 num_words, int word, u64 key, u64 index) {
    u64 total = 0;
    while (num_words > 0) {
        const i64 place = (i64)(index % BLOCK_WORDS), rest = BLOCK_WORDS - place, take = num_words < rest ? num_words : rest;
        total += block_factor(key, index / BLOCK_WORDS) * block_sum(data, place_factors + place, take, word);
        data += take * word;
        index += (u64)take;
        num_words -= take;
    }
    return total;
}
