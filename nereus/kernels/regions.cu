/* Move, convert and sum strided regions of GPU memory in one launch: CUDA C++ and HIP alike, with no header but cells.h,
   so that nvcc, hipcc, NVRTC, hipRTC and a bare clang all take it. Built by source.py, equal to reference.py.
   With NEREUS_HOST it is C++ for a CPU that runs lane after lane, which is how tests run it without a GPU. */

#ifdef NEREUS_HOST
#define CELL static inline
#elif defined(__clang__) && !defined(__global__)
#define __global__ __attribute__((global))
#define __device__ __attribute__((device))
#define __launch_bounds__(threads) __attribute__((amdgpu_flat_work_group_size(1, threads)))
#define CELL static inline __device__ __attribute__((always_inline))
#else
#define CELL static __device__ __forceinline__
#endif

#include "cells.h"

/* Threads of a block, and of those that share a tile. */
#define THREADS 256
#ifdef __GFX9__
#define LANES 64
#else
#define LANES 32
#endif
/* Loads of a lane before its first store: a store may alias a load, so no compiler does that by itself. */
#define BATCH 4
#ifdef NEREUS_HOST
#define UNROLL
#else
#define UNROLL _Pragma("unroll")
#endif

/* The same pointer, known to the compiler to be one to device memory: from an address it could be any, and then both
   makers' compilers load and store by slower instructions. */
template <class Byte> CELL Byte *global(i64 address) {
#ifdef NEREUS_HOST
    return (Byte *)address;
#elif defined(__clang__)
    return (Byte *)(__attribute__((address_space(1))) Byte *)address;
#else
    Byte *pointer = (Byte *)address;
    __builtin_assume(__isGlobal(pointer));
    return pointer;
#endif
}

template <int BYTES> struct alignas(BYTES) Unit { u32 words[BYTES / 4]; };
template <> struct alignas(2) Unit<2> { u16 words[1]; };
template <> struct Unit<1> { u8 words[1]; };

/* A rectangle of a region, for LANES threads. Strides in bytes; `index`: of its first word in the tensor `key`. */
struct Tile {
    const u8 *src;
    u8 *dst;
    i64 src_stride, dst_stride;
    u32 rows, cols;
    u64 key, index, row_step;
    bool writes, sums;
};

/* number * magic >> 32 is number / by, for both up to 2^15. */
CELL u64 magic_of(u32 by) { return ((1ull << 32) + by - 1) / by; }

/* Words that are neighbours from `index` on, so of two blocks at most: only at the border are two factors needed. */
struct Neighbours {
    u64 index, here, next;
    u32 place;
};

CELL Neighbours words_from(u64 index) {
    Neighbours words = {index, 0, 0, (u32)index % BLOCK_WORDS};
    return words;
}

CELL void add(Neighbours &words, u32 word) {
    const u64 product = (u64)place_factor(words.place % BLOCK_WORDS) * word;
    if (words.place < BLOCK_WORDS)
        words.here += product;
    else
        words.next += product;
    words.place++;
}

CELL u64 sum_of(const Neighbours &words, u64 key) {
    const u64 block = words.index / BLOCK_WORDS, sum = words.here * block_factor(key, block);
    return words.place > BLOCK_WORDS ? sum + words.next * block_factor(key, block + 1) : sum;
}

/* Sum of BYTES bytes that are elements of WIDTH, the first of them word `index` of its tensor. */
template <int BYTES, int WIDTH> CELL u64 unit_sum(const Unit<BYTES> &unit, u64 key, u64 index) {
    Neighbours words = words_from(index);
    constexpr int parts = WIDTH < 4 && BYTES >= 4 ? 4 / WIDTH : 1;
    constexpr u32 mask = WIDTH == 1 ? 0xFFu : WIDTH == 2 ? 0xFFFFu : 0xFFFFFFFFu;
    UNROLL
    for (int i = 0; i < (BYTES >= 4 ? BYTES / 4 : 1); i++) {
        UNROLL
        for (int part = 0; part < parts; part++) {
            add(words, ((u32)unit.words[i] >> (part * 8 * (WIDTH < 4 ? WIDTH : 0))) & mask);
        }
    }
    return sum_of(words, key);
}

/* Bits as they are, BYTES at one time. */
template <int BYTES, int WIDTH> CELL u64 move(const Tile &tile, u32 lane, u32 lanes) {
    constexpr u64 words = BYTES / (WIDTH < 4 ? WIDTH : 4);
    const u32 per_row = tile.cols * WIDTH / BYTES, num = per_row * tile.rows;
    const u64 magic = magic_of(per_row ? per_row : 1);
    u64 total = 0;
    for (u32 first = lane; first < num; first += lanes * BATCH) {
        Unit<BYTES> units[BATCH];
        u32 rows[BATCH], cols[BATCH];
        UNROLL
        for (u32 k = 0; k < BATCH; k++) {
            const u32 number = first + k * lanes;
            rows[k] = (u32)(number * magic >> 32);
            cols[k] = number - rows[k] * per_row;
            if (number < num) units[k] = *(const Unit<BYTES> *)(tile.src + rows[k] * tile.src_stride + cols[k] * BYTES);
        }
        UNROLL
        for (u32 k = 0; k < BATCH; k++) {
            if (first + k * lanes >= num) continue;
            if (tile.writes) *(Unit<BYTES> *)(tile.dst + rows[k] * tile.dst_stride + cols[k] * BYTES) = units[k];
            if (tile.sums)
                total += unit_sum<BYTES, WIDTH>(units[k], tile.key, tile.index + rows[k] * tile.row_step + cols[k] * words);
        }
    }
    return total;
}

/* The widest unit that all addresses and row lengths are multiples of; of a single row the end may be narrower. */
template <int WIDTH> CELL u64 move_bits(Tile tile, u32 lane, u32 lanes) {
    u64 ways = (u64)tile.src | (u64)tile.dst, total = 0;
    if (tile.rows > 1)
        ways |= (u64)tile.src_stride | (u64)tile.dst_stride | (tile.cols * WIDTH);
    else if (!(ways & 15) && tile.cols * WIDTH >= 16) {
        const u32 whole = tile.cols * WIDTH / 16 * 16, end = tile.cols - whole / WIDTH;
        tile.cols = whole / WIDTH;
        total = move<16, WIDTH>(tile, lane, lanes);
        tile.src += whole;
        tile.dst += whole;
        tile.index += whole / (WIDTH < 4 ? WIDTH : 4);
        tile.cols = end;
        return end ? total + move<WIDTH, WIDTH>(tile, lane, lanes) : total;
    } else
        ways |= tile.cols * WIDTH;
    if (!(ways & 15)) return move<16, WIDTH>(tile, lane, lanes);
    if (WIDTH < 4 && !(ways & 3)) return move<4, WIDTH>(tile, lane, lanes);
    return move<WIDTH, WIDTH>(tile, lane, lanes);
}

template <int WIDTH> struct Number { typedef u32 type; };
template <> struct Number<2> { typedef u16 type; };

/* Numbers converted, NUM neighbours at one time. */
template <int IN, int OUT, int NUM> CELL u64 convert(const Tile &tile, i64 from, i64 to, u32 lane, u32 lanes) {
    struct alignas(IN * NUM) Source { typename Number<IN>::type cells[NUM]; };
    struct alignas(OUT * NUM) Target { typename Number<OUT>::type cells[NUM]; };
    constexpr u32 FEW = 2;
    const u32 per_row = tile.cols / NUM, num = per_row * tile.rows;
    const u64 magic = magic_of(per_row);
    u64 total = 0;
    for (u32 first = lane; first < num; first += lanes * FEW) {
        Source sources[FEW];
        u32 rows[FEW], cols[FEW];
        UNROLL
        for (u32 k = 0; k < FEW; k++) {
            const u32 number = first + k * lanes;
            rows[k] = (u32)(number * magic >> 32);
            cols[k] = number - rows[k] * per_row;
            if (number < num) sources[k] = *(const Source *)(tile.src + rows[k] * tile.src_stride + cols[k] * (IN * NUM));
        }
        UNROLL
        for (u32 k = 0; k < FEW; k++) {
            if (first + k * lanes >= num) continue;
            Neighbours words = words_from(tile.index + rows[k] * tile.row_step + cols[k] * NUM);
            Target target;
            UNROLL
            for (u32 i = 0; i < NUM; i++) {
                const u32 bits = converted(from, to, sources[k].cells[i]);
                target.cells[i] = (typename Number<OUT>::type)bits;
                if (tile.sums) add(words, bits);
            }
            if (tile.sums) total += sum_of(words, tile.key);
            *(Target *)(tile.dst + rows[k] * tile.dst_stride + cols[k] * (OUT * NUM)) = target;
        }
    }
    return total;
}

template <int IN, int OUT> CELL u64 convert_cells(const Tile &tile, i64 from, i64 to, u32 lane, u32 lanes) {
    u64 src = (u64)tile.src, dst = (u64)tile.dst;
    if (tile.rows > 1) src |= (u64)tile.src_stride, dst |= (u64)tile.dst_stride;
    if (src % (4 * IN) || dst % (4 * OUT) || tile.cols % 4) return convert<IN, OUT, 1>(tile, from, to, lane, lanes);
    return convert<IN, OUT, 4>(tile, from, to, lane, lanes);
}

/* What one lane of `lanes` adds to the region's checksum, while they do tile `number` of the region. */
CELL u64 run_tile(const i64 *region, i64 number, const i64 *bases, u32 lane, u32 lanes) {
    const i64 from = region[FROM], to = region[TO], row_tiles = (region[NUM_COLS] - 1) / region[TILE_COLS] + 1;
    const i64 row = number / row_tiles * region[TILE_ROWS], col = number % row_tiles * region[TILE_COLS];
    const i64 rows = region[NUM_ROWS] - row, cols = region[NUM_COLS] - col;
    const i64 in = width_of(from), out = width_of(to), scale = out == 8 ? 2 : 1;
    Tile tile;
    tile.rows = (u32)(rows < region[TILE_ROWS] ? rows : region[TILE_ROWS]);
    tile.cols = (u32)(cols < region[TILE_COLS] ? cols : region[TILE_COLS]);
    tile.src_stride = region[SRC_STRIDE] * in;
    tile.dst_stride = region[DST_STRIDE] * out;
    tile.src = global<const u8>(bases[region[SRC]]) + (region[SRC_OFFSET] + col) * in + row * tile.src_stride;
    tile.writes = region[DST] >= 0;
    if (!tile.writes) tile.dst_stride = tile.src_stride; /* an address that it could write to, but does not */
    tile.dst = global<u8>(bases[region[tile.writes ? DST : SRC]]) + row * tile.dst_stride;
    tile.dst += (region[tile.writes ? DST_OFFSET : SRC_OFFSET] + col) * out;
    tile.row_step = (u64)(region[GLOBAL_STRIDE] * scale);
    tile.key = (u64)region[KEY];
    tile.index = (u64)((region[GLOBAL_START] + col) * scale) + (u64)row * tile.row_step;
    tile.sums = region[SLOT] >= 0;
    if (from == to) {
        if (out == 2) return move_bits<2>(tile, lane, lanes);
        if (out == 4) return move_bits<4>(tile, lane, lanes);
        if (out == 1) return move_bits<1>(tile, lane, lanes);
        return move_bits<8>(tile, lane, lanes);
    }
    if (in == 4) return convert_cells<4, 2>(tile, from, to, lane, lanes);
    if (out == 4) return convert_cells<2, 4>(tile, from, to, lane, lanes);
    return convert_cells<2, 2>(tile, from, to, lane, lanes);
}

#ifdef NEREUS_HOST

extern "C" void nereus_regions(const i64 *table, const i64 *region_of, const i64 *number_of, i64 num_tiles,
                               const i64 *bases, u64 *sums) {
    for (i64 i = 0; i < num_tiles; i++) {
        const i64 *region = table + region_of[i] * NUM_COLUMNS;
        for (u32 lane = 0; lane < LANES; lane++) {
            const u64 total = run_tile(region, number_of[i], bases, lane, LANES);
            if (region[SLOT] >= 0) sums[region[SLOT]] += total;
        }
    }
}

#else

/* The sum over the lanes of a tile, in its first lane. */
CELL u64 over_lanes(u64 value, u32 lane) {
    for (u32 other = LANES / 2; other; other /= 2) {
#ifdef __AMDGCN__
        const int from = (int)((lane ^ other) << 2);
        const u32 low = (u32)__builtin_amdgcn_ds_bpermute(from, (int)(u32)value);
        const u32 high = (u32)__builtin_amdgcn_ds_bpermute(from, (int)(u32)(value >> 32));
        value += (u64)high << 32 | low;
#else
        value += __shfl_xor_sync(0xFFFFFFFFu, value, (int)other);
#endif
    }
    return value;
}

/* THREADS / LANES tiles for each block. */
extern "C" __global__ void __launch_bounds__(THREADS)
    nereus_regions(const i64 *table, const i64 *region_of, const i64 *number_of, i64 num_tiles, const i64 *bases,
                   u64 *sums) {
#ifdef __AMDGCN__
    const u32 thread = __builtin_amdgcn_workitem_id_x(), block = __builtin_amdgcn_workgroup_id_x();
#else
    const u32 thread = threadIdx.x, block = blockIdx.x;
#endif
    const u32 lane = thread % LANES;
    const i64 i = (i64)block * (THREADS / LANES) + thread / LANES;
    if (i >= num_tiles) return;
    const i64 *region = table + region_of[i] * NUM_COLUMNS;
    const u64 total = over_lanes(run_tile(region, number_of[i], bases, lane, LANES), lane);
    if (lane || region[SLOT] < 0) return;
#ifdef __AMDGCN__
    __hip_atomic_fetch_add(sums + region[SLOT], total, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
#else
    atomicAdd(sums + region[SLOT], total);
#endif
}

#endif
