/* Blocks of memory sent to a socket, received from one, or read out of another process, and summed while a core has them
   in its cache; built by native.py, driven by flow.py, equal to checksum.py. */

#define _GNU_SOURCE
#include <errno.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include "sums.h"

#ifndef MSG_NOSIGNAL
#define MSG_NOSIGNAL 0
#endif

/* Bytes on their way at one time: they are to stay in a core's second cache. Pieces of memory of one call: the system's
   IOV_MAX. */
#define CHUNK_BYTES (1 << 20)
#define MOST 1024

/* Columns of a table of blocks: rows of ROW_BYTES bytes, STRIDE bytes from one to the next; what follows is for the sum:
   bytes of a word, key of the tensor, number of the first word in it, words of it from one row to the next. */
enum { ADDRESS, ROWS, ROW_BYTES, STRIDE, NUM_PLACE, WORD = NUM_PLACE, WORD_KEY, FIRST, STEP_WORDS, NUM_FLOW };

typedef struct { i64 block, row, byte; } place;
typedef struct { place moved, summed; u64 sum; } cursor;

/* The next bytes of a table, CHUNK_BYTES and MOST pieces at most, as the system takes them. */
static i64 pieces(const i64 *table, i64 num, i64 width, place at, i64 most, struct iovec *out, int *count) {
    i64 size = 0;
    for (*count = 0; at.block < num && size < most && *count < MOST; ++*count) {
        const i64 *block = table + at.block * width;
        const int joined = block[STRIDE] == block[ROW_BYTES];
        const i64 begin = at.row * block[STRIDE] + at.byte, rows = joined ? block[ROWS] - at.row : 1;
        i64 take = rows * block[ROW_BYTES] - at.byte;
        if (take > most - size) take = most - size;
        out[*count].iov_base = (void *)(block[ADDRESS] + begin);
        out[*count].iov_len = (size_t)take;
        size += take;
        at.byte += take;
        at.row += at.byte / block[ROW_BYTES];
        at.byte %= block[ROW_BYTES];
        if (at.row == block[ROWS]) at = (place){at.block + 1, 0, 0};
    }
    return size;
}

static place after(const i64 *table, i64 width, place at, i64 num_bytes) {
    while (num_bytes > 0) {
        const i64 *block = table + at.block * width;
        const i64 done = at.row * block[ROW_BYTES] + at.byte, left = block[ROWS] * block[ROW_BYTES] - done;
        if (num_bytes >= left) {
            at = (place){at.block + 1, 0, 0};
            num_bytes -= left;
        } else {
            at.row = (done + num_bytes) / block[ROW_BYTES];
            at.byte = (done + num_bytes) % block[ROW_BYTES];
            num_bytes = 0;
        }
    }
    return at;
}

/* All whole words before `end` that are not summed yet. */
static void sum_until(const i64 *table, cursor *at, place end) {
    place *done = &at->summed;
    while (done->block < end.block || (done->block == end.block && (done->row < end.row || done->byte < end.byte))) {
        const i64 *block = table + done->block * NUM_FLOW, word = block[WORD];
        const int here = done->block == end.block;
        i64 stop = here && done->row == end.row ? end.byte / word * word : block[ROW_BYTES], rows = 1;
        if (stop <= done->byte) return; /* part of a word */
        if (!done->byte && block[STRIDE] == block[ROW_BYTES] && block[STEP_WORDS] * word == block[ROW_BYTES])
            rows = (here ? end.row : block[ROWS]) - done->row; /* one run in memory and in the tensor */
        if (rows < 1) rows = 1;
        at->sum += sum((const u8 *)(block[ADDRESS] + done->row * block[STRIDE] + done->byte),
                       ((rows - 1) * block[ROW_BYTES] + stop - done->byte) / word, (int)word, (u64)block[WORD_KEY],
                       (u64)(block[FIRST] + done->row * block[STEP_WORDS] + done->byte / word));
        done->row += rows - 1;
        done->byte = stop;
        if (done->byte == block[ROW_BYTES]) *done = (place){done->block, done->row + 1, 0};
        if (done->row == block[ROWS]) *done = (place){done->block + 1, 0, 0};
    }
}

/* Each goes on where `at` says, until the end (1), until the socket has no more (0), or with a negative errno. */

i64 nereus_send(i64 fd, const i64 *table, i64 num, cursor *at) {
    for (;;) {
        struct iovec out[MOST];
        int count;
        const i64 size = pieces(table, num, NUM_FLOW, at->moved, CHUNK_BYTES, out, &count);
        if (!size) return 1;
        sum_until(table, at, after(table, NUM_FLOW, at->moved, size));
        const struct msghdr message = {.msg_iov = out, .msg_iovlen = (size_t)count};
        const i64 sent = sendmsg((int)fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (sent < 0 && errno == EINTR) continue;
        if (sent < 0) return errno == EAGAIN || errno == EWOULDBLOCK ? 0 : -errno;
        at->moved = after(table, NUM_FLOW, at->moved, sent);
    }
}

i64 nereus_receive(i64 fd, const i64 *table, i64 num, cursor *at) {
    for (;;) {
        struct iovec into[MOST];
        int count;
        const i64 size = pieces(table, num, NUM_FLOW, at->moved, CHUNK_BYTES, into, &count);
        if (!size) return 1;
        struct msghdr message = {.msg_iov = into, .msg_iovlen = (size_t)count};
        const i64 came = recvmsg((int)fd, &message, MSG_DONTWAIT);
        if (came < 0 && errno == EINTR) continue;
        if (came < 0) return errno == EAGAIN || errno == EWOULDBLOCK ? 0 : -errno;
        if (!came) return -EPIPE;
        at->moved = after(table, NUM_FLOW, at->moved, came);
        sum_until(table, at, at->moved);
    }
}

/* `places`: NUM_PLACE columns, of the same number of bytes in the memory of process `pid`. */
i64 nereus_read(i64 pid, const i64 *places, i64 num_places, const i64 *table, i64 num, cursor *at) {
#ifdef __linux__
    place from = {0, 0, 0};
    for (;;) {
        struct iovec into[MOST], out_of[MOST];
        int num_into, num_out;
        i64 size = pieces(table, num, NUM_FLOW, at->moved, CHUNK_BYTES, into, &num_into);
        if (!size) return 1;
        const i64 there = pieces(places, num_places, NUM_PLACE, from, size, out_of, &num_out);
        if (there < size) size = pieces(table, num, NUM_FLOW, at->moved, there, into, &num_into);
        const i64 got = process_vm_readv((int)pid, into, (unsigned long)num_into, out_of, (unsigned long)num_out, 0);
        if (got < 0) return -errno;
        if (got != size || !size) return -EFAULT;
        at->moved = after(table, NUM_FLOW, at->moved, size);
        from = after(places, NUM_PLACE, from, size);
        sum_until(table, at, at->moved);
    }
#else
    return -ENOSYS;
#endif
}

/* The sum alone, of what lies there. */
void nereus_sum(const i64 *table, i64 num, cursor *at) { sum_until(table, at, (place){num, 0, 0}); }
