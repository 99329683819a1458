/* Move, convert and sum strided regions of CPU memory in one pass over it; built by native.py, equal to reference.py. */

#include "sums.h"

/* Bytes moved and summed at one time, so that the sum reads a core's nearest cache. */
#define CHUNK_BYTES 16384

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
            u64 index = (u64)(region[GLOBAL_START] + row * region[GLOBAL_STRIDE]) * (u64)scale;
            for (i64 left = cols; left > 0;) {
                const i64 take = left < most ? left : most;
                if (target && from == to) memcpy(target, source, (size_t)(take * out));
                if (target && from != to) convert(from, to, source, target, take);
                if (sums_it)
                    total += sum(target ? target : source, take * scale, word, (u64)region[KEY], index);
                index += (u64)(take * scale);
                source += take * in;
                target += target ? take * out : 0;
                left -= take;
            }
        }
        if (sums_it) sums[region[SLOT]] += total;
    }
}
