/* Move, convert and sum strided regions of CPU memory in one pass over it; built by native.py, equal to reference.py. */

#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define HAVE_AVX2 1
#endif

#include "cells.h"

/* Bytes moved and summed at one time, so that the sum reads a core's nearest cache. */
#define CHUNK_BYTES 16384

#define PLAIN(name, type)                                                                                              \
    static u64 name(const type *words, i64 from, i64 num, u64 seed) {                                                  \
        u64 total = 0;                                                                                                 \
        for (i64 i = from; i < num; i++) {                                                                             \
            total += weight(seed + (u64)i * STEP) * words[i];                                                          \
        }                                                                                                              \
        return total;                                                                                                  \
    }

PLAIN(plain1, u8)
PLAIN(plain2, u16)
PLAIN(plain4, u32)

#ifdef HAVE_AVX2
/* AVX2 multiplies 32 x 32 bits: a product modulo 2^64 is put together from halves, and words have a low half only. */
#define VECTOR(name, type, plain, load)                                                                                \
    __attribute__((target("avx2"))) static u64 name(const type *words, i64 num, u64 seed) {                            \
        const __m256i step = _mm256_set1_epi64x((long long)(4 * STEP)), one = _mm256_set1_epi64x(1);                   \
        const __m256i low = _mm256_set1_epi64x((long long)(MIX & 0xFFFFFFFFull));                                      \
        const __m256i high = _mm256_set1_epi64x((long long)(MIX >> 32));                                               \
        __m256i x = _mm256_set_epi64x((long long)(seed + 3 * STEP), (long long)(seed + 2 * STEP),                      \
                                      (long long)(seed + STEP), (long long)seed);                                      \
        __m256i lows = _mm256_setzero_si256(), highs = lows;                                                           \
        i64 i = 0;                                                                                                     \
        for (; i + 4 <= num; i += 4) {                                                                                 \
            const __m256i top = _mm256_srli_epi64(x, 32), h = _mm256_xor_si256(x, top);                                \
            const __m256i cross = _mm256_add_epi64(_mm256_mul_epu32(h, high), _mm256_mul_epu32(top, low));             \
            __m256i m = _mm256_add_epi64(_mm256_mul_epu32(h, low), _mm256_slli_epi64(cross, 32));                      \
            m = _mm256_or_si256(_mm256_xor_si256(m, _mm256_srli_epi64(m, 29)), one);                                   \
            const __m256i w = load;                                                                                    \
            lows = _mm256_add_epi64(lows, _mm256_mul_epu32(m, w));                                                     \
            highs = _mm256_add_epi64(highs, _mm256_mul_epu32(_mm256_srli_epi64(m, 32), w));                            \
            x = _mm256_add_epi64(x, step);                                                                             \
        }                                                                                                              \
        u64 a[4], b[4];                                                                                                \
        _mm256_storeu_si256((__m256i *)a, lows);                                                                       \
        _mm256_storeu_si256((__m256i *)b, highs);                                                                      \
        return a[0] + a[1] + a[2] + a[3] + ((b[0] + b[1] + b[2] + b[3]) << 32) + plain(words, i, num, seed);           \
    }

static inline int four_bytes(const void *at) {
    int out;
    memcpy(&out, at, 4);
    return out;
}

VECTOR(vector1, u8, plain1, _mm256_cvtepu8_epi64(_mm_cvtsi32_si128(four_bytes(words + i))))
VECTOR(vector2, u16, plain2, _mm256_cvtepu16_epi64(_mm_loadl_epi64((const __m128i *)(words + i))))
VECTOR(vector4, u32, plain4, _mm256_cvtepu32_epi64(_mm_loadu_si128((const __m128i *)(words + i))))
#endif

static u64 sum(const u8 *data, i64 num_words, int word, u64 seed) {
#ifdef HAVE_AVX2
    if (__builtin_cpu_supports("avx2") && word == 1) return vector1(data, num_words, seed);
    if (__builtin_cpu_supports("avx2") && word == 2) return vector2((const u16 *)data, num_words, seed);
    if (__builtin_cpu_supports("avx2") && word == 4) return vector4((const u32 *)data, num_words, seed);
#endif
    if (word == 1) return plain1(data, 0, num_words, seed);
    if (word == 2) return plain2((const u16 *)data, 0, num_words, seed);
    return plain4((const u32 *)data, 0, num_words, seed);
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
            u64 seed = (u64)region[KEY] + (u64)(region[GLOBAL_START] + row * region[GLOBAL_STRIDE]) * (u64)scale * STEP;
            for (i64 left = cols; left > 0;) {
                const i64 take = left < most ? left : most;
                if (target && from == to) memcpy(target, source, (size_t)(take * out));
                if (target && from != to) convert(from, to, source, target, take);
                if (sums_it) total += sum(target ? target : source, take * scale, word, seed);
                seed += (u64)(take * scale) * STEP;
                source += take * in;
                target += target ? take * out : 0;
                left -= take;
            }
        }
        if (sums_it) sums[region[SLOT]] += total;
    }
}
