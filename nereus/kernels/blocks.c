/* Gather, scatter and checksum blocks in one pass over memory; built by native.py, equal to pack.py and checksum.py. */

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define HAVE_AVX2 1
#endif

#define STEP 0x9E3779B97F4A7C15ull
#define MIX 0xD6E8FEB86659FD93ull
/* Bytes copied and summed at one time, so that the sum reads a core's nearest cache. */
#define CHUNK_BYTES 16384

enum { ADDRESS, ROWS, COLS, ROW_STRIDE, GLOBAL_START, GLOBAL_STRIDE, KEY, NUM_COLUMNS };
enum { SUM, GATHER, SCATTER };

#define PLAIN(name, type)                                                                                              \
    static uint64_t name(const type *words, int64_t from, int64_t num, uint64_t seed) {                                \
        uint64_t total = 0;                                                                                            \
        for (int64_t i = from; i < num; i++) {                                                                         \
            uint64_t h = seed + (uint64_t)i * STEP;                                                                    \
            h ^= h >> 32;                                                                                              \
            h *= MIX;                                                                                                  \
            h ^= h >> 29;                                                                                              \
            total += (h | 1) * words[i];                                                                               \
        }                                                                                                              \
        return total;                                                                                                  \
    }

PLAIN(plain1, uint8_t)
PLAIN(plain2, uint16_t)
PLAIN(plain4, uint32_t)

#ifdef HAVE_AVX2
/* AVX2 multiplies 32 x 32 bits: a product modulo 2^64 is put together from halves, and words have a low half only. */
#define VECTOR(name, type, plain, load)                                                                                \
    __attribute__((target("avx2"))) static uint64_t name(const type *words, int64_t num, uint64_t seed) {              \
        const __m256i step = _mm256_set1_epi64x((long long)(4 * STEP)), one = _mm256_set1_epi64x(1);                   \
        const __m256i low = _mm256_set1_epi64x((long long)(MIX & 0xFFFFFFFFull));                                      \
        const __m256i high = _mm256_set1_epi64x((long long)(MIX >> 32));                                               \
        __m256i x = _mm256_set_epi64x((long long)(seed + 3 * STEP), (long long)(seed + 2 * STEP),                      \
                                      (long long)(seed + STEP), (long long)seed);                                      \
        __m256i lows = _mm256_setzero_si256(), highs = lows;                                                           \
        int64_t i = 0;                                                                                                 \
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
        uint64_t a[4], b[4];                                                                                           \
        _mm256_storeu_si256((__m256i *)a, lows);                                                                       \
        _mm256_storeu_si256((__m256i *)b, highs);                                                                      \
        return a[0] + a[1] + a[2] + a[3] + ((b[0] + b[1] + b[2] + b[3]) << 32) + plain(words, i, num, seed);           \
    }

VECTOR(vector2, uint16_t, plain2, _mm256_cvtepu16_epi64(_mm_loadl_epi64((const __m128i *)(words + i))))
VECTOR(vector4, uint32_t, plain4, _mm256_cvtepu32_epi64(_mm_loadu_si128((const __m128i *)(words + i))))
#endif

static uint64_t sum(const unsigned char *data, int64_t num_words, int word, uint64_t seed) {
#ifdef HAVE_AVX2
    if (__builtin_cpu_supports("avx2") && word == 2) return vector2((const uint16_t *)data, num_words, seed);
    if (__builtin_cpu_supports("avx2") && word == 4) return vector4((const uint32_t *)data, num_words, seed);
#endif
    if (word == 1) return plain1(data, 0, num_words, seed);
    if (word == 2) return plain2((const uint16_t *)data, 0, num_words, seed);
    return plain4((const uint32_t *)data, 0, num_words, seed);
}

/* `table`: num_blocks x NUM_COLUMNS; addresses in bytes, the rest in elements of `width` bytes. `buffer`: blocks one
   after another, filled by GATHER, read by SCATTER, unused by SUM. Returns the checksum, 0 for SCATTER. */
uint64_t nereus_blocks(const int64_t *table, int64_t num_blocks, int width, int what, unsigned char *buffer) {
    const int word = width == 8 ? 4 : width;
    const int64_t scale = width / word;
    uint64_t total = 0;
    for (const int64_t *block = table; block < table + num_blocks * NUM_COLUMNS; block += NUM_COLUMNS) {
        int64_t rows = block[ROWS], cols = block[COLS];
        if (block[ROW_STRIDE] == cols && block[GLOBAL_STRIDE] == cols) {
            cols *= rows;
            rows = 1;
        }
        for (int64_t row = 0; row < rows; row++) {
            unsigned char *data = (unsigned char *)(intptr_t)block[ADDRESS] + row * block[ROW_STRIDE] * width;
            uint64_t index = (uint64_t)(block[GLOBAL_START] + row * block[GLOBAL_STRIDE]) * (uint64_t)scale;
            for (int64_t left = cols * width; left > 0;) {
                const int64_t take = left < CHUNK_BYTES ? left : CHUNK_BYTES;
                if (what == SCATTER) memcpy(data, buffer, (size_t)take);
                if (what == GATHER) memcpy(buffer, data, (size_t)take);
                if (what != SCATTER) total += sum(data, take / word, word, (uint64_t)block[KEY] + index * STEP);
                index += (uint64_t)(take / word);
                data += take;
                buffer += what == SUM ? 0 : take;
                left -= take;
            }
        }
    }
    return total;
}
