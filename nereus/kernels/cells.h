/* What every compiled kernel shares: columns of the descriptor table, the checksum's weights, conversions of numbers.
   Plain C, also for CUDA and HIP, with no header of its own; equal to regions.py, checksum.py and reference.py. */

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#ifndef CELL
#define CELL static inline
#endif

#define STEP 0x9E3779B97F4A7C15ull
#define MIX 0xD6E8FEB86659FD93ull

enum {
    SRC, SRC_OFFSET, SRC_STRIDE, DST, DST_OFFSET, DST_STRIDE, NUM_ROWS, NUM_COLS, FROM, TO,
    SLOT, KEY, GLOBAL_START, GLOBAL_STRIDE, TILE_ROWS, TILE_COLS, NUM_COLUMNS
};
enum { BITS8, BITS16, BITS32, BITS64, F16, BF16, F32 };

/* Bytes of an element. */
CELL int width_of(i64 type) {
    return type == BITS8 ? 1 : type == BITS64 ? 8 : type == BITS32 || type == F32 ? 4 : 2;
}

/* A word's weight in the checksum is the product of two odd numbers: of its place in its block of BLOCK_WORDS words, and
   of the block. The first is 32 bits wide, so that a block is a sum of products of 32 bits; the second is taken once. */
#define BLOCK_WORDS 256

CELL u32 place_factor(u32 place) {
    u32 x = (place + 1) * 0x9E3779B1u;
    x ^= x >> 15;
    x *= 0x85EBCA77u;
    x ^= x >> 13;
    return x | 1;
}

CELL u64 block_factor(u64 key, u64 block) {
    u64 x = key + block * STEP;
    x ^= x >> 32;
    x *= MIX;
    x ^= x >> 29;
    return x | 1;
}

/* Numbers are converted by way of the bits of a float, in integers: no setting of a compiler or a device (subnormals,
   rounding mode, NaN payloads) changes a bit of the result. Round to nearest even; every NaN becomes one. */

CELL u32 f32_of_f16(u32 bits) {
    const u32 sign = (bits & 0x8000u) << 16, rest = bits & 0x7FFFu;
    if (rest > 0x7C00u) return 0x7FC00000u;
    if (rest == 0x7C00u) return sign | 0x7F800000u;
    if (rest >= 0x0400u) return sign | ((rest << 13) + 0x38000000u);
    union { float number; u32 bits; } small;
    small.number = (float)rest * 5.9604644775390625e-8f; /* 2^-24: exact, never a subnormal float */
    return sign | small.bits;
}

CELL u32 f16_of_f32(u32 bits) {
    const u32 sign = (bits >> 16) & 0x8000u, rest = bits & 0x7FFFFFFFu;
    if (rest > 0x7F800000u) return 0x7E00u;
    if (rest >= 0x477FF000u) return sign | 0x7C00u; /* 65520 and more */
    if (rest >= 0x38800000u) return sign | ((rest - 0x38000000u + 0xFFFu + ((rest >> 13) & 1u)) >> 13);
    if (rest < 0x33000000u) return sign; /* less than 2^-25 */
    const u32 shift = 126u - (rest >> 23), all = (rest & 0x7FFFFFu) | 0x800000u;
    const u32 lost = all & ((1u << shift) - 1u), half = 1u << (shift - 1u), kept = all >> shift;
    return sign | (kept + (lost > half || (lost == half && (kept & 1u))));
}

CELL u32 f32_of_bf16(u32 bits) { return (bits & 0x7FFFu) > 0x7F80u ? 0x7FC00000u : bits << 16; }

CELL u32 bf16_of_f32(u32 bits) {
    const u32 rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
    return (bits & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FC0u : rounded;
}

/* Of the types F16, BF16 and F32. */
CELL u32 converted(i64 from, i64 to, u32 bits) {
    const u32 wide = from == F16 ? f32_of_f16(bits) : from == BF16 ? f32_of_bf16(bits) : bits;
    return to == F16 ? f16_of_f32(wide) : to == BF16 ? bf16_of_f32(wide) : wide;
}
