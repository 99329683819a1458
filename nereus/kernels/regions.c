/* Move, convert and sum strided regions of CPU memory in one pass over it; built by native.py, equal to reference.py. */

#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define HAVE_AVX2 1
#endif

#include "cells.h"

/* Bytes moved and summed at one time, so that the sum reads a core's nearest cache. */
#define CHUNK_BYTES 16384

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

/* `index`: of the first word in its tensor; `factors`: of all places. */
static u64 sum(const u8 *data, i64 num_words, int word, u64 key, u64 index, const u64 *factors) {
    u64 total = 0;
    while (num_words > 0) {
        const i64 place = (i64)(index % BLOCK_WORDS), rest = BLOCK_WORDS - place, take = num_words < rest ? num_words : rest;
        total += block_factor(key, index / BLOCK_WORDS) * block_sum(data, factors + place, take, word);
        data += take * word;
        index += (u64)take;
        num_words -= take;
    }
    return total;
}

/* Loops that a compiler turns into vector code, once for any machine and once for AVX2. */
#define CONVERT_AS(name, attributes, from, to, convert)                                                                \
    attributes static void name(const from *in, to *out, i64 num) {                                                    \
        for (i64 i = 0; i < num; i++) out[i] = (to)convert(in[i]);                                                     \
    }
#ifdef HAVE_AVX2
#define CONVERT(name, from, to, convert)                                                                               \
    CONVERT_AS(name##_plain, , from, to, convert)                                                                      \
    CONVERT_AS(name##_avx2, __attribute__((target("avx2"))), from, to, convert)                                        \
    static void name(const from *in, to *out, i64 num) {                                                               \
        if (__builtin_cpu_supports("avx2"))                                                                            \
            name##_avx2(in, out, num);                                                                                 \
        else                                                                                                           \
            name##_plain(in, out, num);                                                                                \
    }
#else
#define CONVERT(name, from, to, convert) CONVERT_AS(name, , from, to, convert)
#endif

#define BF16_OF_F16(bits) bf16_of_f32(f32_of_f16(bits))
#define F16_OF_BF16(bits) f16_of_f32(f32_of_bf16(bits))

CONVERT(f32_to_bf16, u32, u16, bf16_of_f32)
CONVERT(f32_to_f16, u32, u16, f16_of_f32)
CONVERT(bf16_to_f32, u16, u32, f32_of_bf16)
CONVERT(f16_to_f32, u16, u32, f32_of_f16)
CONVERT(f16_to_bf16, u16, u16, BF16_OF_F16)
CONVERT(bf16_to_f16, u16, u16, F16_OF_BF16)

static void convert(i64 from, i64 to, const u8 *in, u8 *out, i64 num) {
    if (from == F32 && to == BF16) f32_to_bf16((const u32 *)in, (u16 *)out, num);
    if (from == F32 && to == F16) f32_to_f16((const u32 *)in, (u16 *)out, num);
    if (from == BF16 && to == F32) bf16_to_f32((const u16 *)in, (u32 *)out, num);
    if (from == F16 && to == F32) f16_to_f32((const u16 *)in, (u32 *)out, num);
    if (from == F16 && to == BF16) f16_to_bf16((const u16 *)in, (u16 *)out, num);
    if (from == BF16 && to == F16) bf16_to_f16((const u16 *)in, (u16 *)out, num);
}

/* `table`: num_regions x NUM_COLUMNS, checked by regions.py; `bases`: addresses; `sums`: one for each slot, added to. */
void nereus_regions(const i64 *table, i64 num_regions, const i64 *bases, u64 *sums) {
    u64 factors[BLOCK_WORDS];
    for (u32 place = 0; place < BLOCK_WORDS; place++) factors[place] = place_factor(place);
    for (const i64 *region = table; region < table + num_regions * NUM_COLUMNS; region += NUM_COLUMNS) {
        const i64 from = region[FROM], to = region[TO];
        i64 rows = region[NUM_ROWS], cols = region[NUM_COLS];
        const int in = width_of(from), out = width_of(to), word = out == 8 ? 4 : out, sums_it = region[SLOT] >= 0;
        const i64 most = CHUNK_BYTES / (in > out ? in : out), scale = out / word;
        const u8 *src = (const u8 *)bases[region[SRC]] + region[SRC_OFFSET] * in;
        u8 *dst = region[DST] < 0 ? 0 : (u8 *)bases[region[DST]] + region[DST_OFFSET] * out;
        u64 total = 0;
        if (region[SRC_STRIDE] == cols && (!dst || region[DST_STRIDE] == cols) &&
            (!sums_it || region[GLOBAL_STRIDE] == cols)) {
            cols *= rows;
            rows = 1;
        }
        for (i64 row = 0; row < rows; row++) {
            const u8 *source = src + row * region[SRC_STRIDE] * in;
            u8 *target = dst ? dst + row * region[DST_STRIDE] * out : 0;
            u64 index = (u64)(region[GLOBAL_START] + row * region[GLOBAL_STRIDE]) * (u64)scale;
            for (i64 left = cols; left > 0;) {
                const i64 take = left < most ? left : most;
                if (target && from == to) memcpy(target, source, (size_t)(take * out));
                if (target && from != to) convert(from, to, source, target, take);
                if (sums_it)
                    total += sum(target ? target : source, take * scale, word, (u64)region[KEY], index, factors);
                index += (u64)(take * scale);
                source += take * in;
                target += target ? take * out : 0;
                left -= take;
            }
        }
        if (sums_it) sums[region[SLOT]] += total;
    }
}
