/* The inner loops, written once and compiled for each instruction set by isa_*.c, which define
 *
 *     TARGET      the function attribute that switches the instruction set on
 *     VEC, WIDTH  a vector and how many floats it holds; v_load, v_store, v_set1, v_fma, v_max, v_min, v_mul, v_add
 *     IVEC        a vector of as many 32-bit integers; i_load, i_store, i_set1, i_xor, i_mullo, i_mulhi
 *     DVEC        half as many float64; d_set1, d_trunc, d_low and d_high (of a VEC); operators
 *     REGISTERS   results that stay in registers
 *     TILE1       the most of them that one row is cut into
 *     v_once      keeps a vector that was loaded in a register, where the compiler would load it for every use
 *     v_accumulate(sum, a, b): sum += a * b, fused, in the register that the sum is in
 *
 * Only v_fma fuses; everything else is compiled with contraction off, so that all instruction sets give
 * the same bits. */
#include "internal.h"

#include <string.h>

#define INLINE static inline __attribute__((always_inline)) TARGET

/* Whether it is this activation, and the build has it. */
INLINE int is(uint32_t act, uint32_t wanted) { return fs_has(1u << wanted) && act == wanted; }

INLINE const float *at_byte(const float *from, uint32_t bytes) {
    return (const float *)(const void *)((const char *)from + bytes);
}

#ifdef VEC

/* Keeps an address, or what it is made of, in a register of its own from here on, where the compiler would compute it
 * for every load (which an Intel then takes apart; 69 instructions for 20 sums instead of 45 on ARM), or put it off. */
#define v_address(p) __asm__("" : "+r"(p))

INLINE VEC activate(VEC x, uint32_t act) {
    const VEC zero = v_set1(0.0f);
    if (act == FS_ACT_RELU) return v_max(zero, x);
    if (act == FS_ACT_HARDSWISH)
        return v_mul(v_mul(x, v_min(v_set1(6.0f), v_max(zero, v_add(x, v_set1(3.0f))))), v_set1(1.0f / 6.0f));
    return x;
}

/* M results of ROWS x X vectors each, all in registers while the taps go by. With M = 4 every input vector
 * that is loaded serves four fused multiply-adds, so the multipliers, not the loads, are the limit; with
 * M = 1 two rows share the reading of the tap list. */
INLINE void tile(const fs_rows *s, const fs_run *r, const int M, const int ROWS, const int X, uint32_t top, size_t first,
                 const ptrdiff_t in_step, const ptrdiff_t out_step) {
    VEC acc[4][2][14];
    const float *in = s->in + top * s->in_row + (ptrdiff_t)first * in_step;
#pragma GCC unroll 4
    for (int m = 0; m < M; m++)
#pragma GCC unroll 2
        for (int y = 0; y < ROWS; y++)
#pragma GCC unroll 16
            for (int x = 0; x < X; x++) acc[m][y][x] = v_set1(r->bias[m]);
    const uint32_t *offset = r->offsets, *end = offset + r->taps;
    const float *weight = r->weights;
    const ptrdiff_t in_row = s->in_row;
    /* A single result takes a load for every sum; if their address had to be loaded just before, they would fill the
     * processor's queue while they wait (an Intel: 9.1 cycles for 12 sums instead of 7.4). So it is loaded a tap ahead;
     * behind the last one lies other memory of the arena. */
    uint32_t ahead = M == 1 ? *offset : 0;
    for (; offset < end; weight += M) {
        const uint32_t at = M == 1 ? ahead : *offset;
        if (M == 1 && at & FS_WITH_NEXT) {
            offset += 2, ahead = *offset;
            v_address(ahead);
            /* A vector serves two taps: half the loads, which limit a result alone. */
            const VEC w = v_set1(weight[0]), next = v_set1(weight[1]);
            const float *first = at_byte(in, at - FS_WITH_NEXT), *rows[2] = {first, first + in_row};
            v_address(rows[0]);
            v_address(rows[1]);
#pragma GCC unroll 16
            for (int x = 0; x <= X; x++)
#pragma GCC unroll 2
                for (int y = 0; y < ROWS; y++) {
                    VEC v = v_load(rows[y] + x * in_step);
                    v_once(v);
                    if (x < X) v_accumulate(acc[0][y][x], w, v);
                    if (x) v_accumulate(acc[0][y][x - 1], next, v);
                }
            weight++;
            continue;
        }
        offset++;
        if (M == 1) {
            ahead = *offset;
            v_address(ahead);
        }
        const float *p = at_byte(in, at);
        if (X < M) {
            /* The fewer of inputs and weights wait in registers: with 12 results, 3 inputs and a weight fill AVX2's
             * 16, where 4 weights and an input would push out a result, whose way through memory halves the rate. */
            VEC v[14];
#pragma GCC unroll 4
            for (int x = 0; x < X; x++) v[x] = v_load(p + x * in_step);
#pragma GCC unroll 4
            for (int m = 0; m < M; m++) {
                const VEC w = v_set1(weight[m]);
#pragma GCC unroll 4
                for (int x = 0; x < X; x++) acc[m][0][x] = v_fma(w, v[x], acc[m][0][x]);
            }
            continue;
        }
        VEC w[4];
#pragma GCC unroll 4
        for (int m = 0; m < M; m++) w[m] = v_set1(weight[m]);
#pragma GCC unroll 2
        for (int y = 0; y < ROWS; y++) {
            const float *row = p + y * in_row;
            if (M == 1) v_address(row);
#pragma GCC unroll 16
            for (int x = 0; x < X; x++) {
                const VEC v = v_load(row + x * in_step);
#pragma GCC unroll 4
                for (int m = 0; m < M; m++) acc[m][y][x] = v_fma(w[m], v, acc[m][y][x]);
            }
        }
    }
    const uint32_t act = s->act;
#pragma GCC unroll 4
    for (int m = 0; m < M; m++) {
        float *out = r->out[m] + s->out_at + top * s->out_row + (ptrdiff_t)first * out_step;
#pragma GCC unroll 2
        for (int y = 0; y < ROWS; y++)
#pragma GCC unroll 16
            for (int x = 0; x < X; x++)
                v_store(out + y * s->out_row + x * out_step, activate(acc[m][y][x], act));
    }
}

/* The size of a tile must be known when it is compiled: one copy for each, in which all runs follow one another. */
INLINE void sized_tiles(const fs_rows *s, const fs_run *runs, uint32_t count, const int M, const int ROWS, uint32_t top,
                        size_t n, size_t first, const ptrdiff_t in_step, const ptrdiff_t out_step) {
#define OF(X)                                                                                 \
    case X:                                                                                   \
        if (M * ROWS * X <= REGISTERS || X <= 3)                                              \
            for (const fs_run *r = runs; r < runs + count; r++)                               \
                tile(s, r, M, ROWS, X, top, first, in_step, out_step);                        \
        break
    switch (n) {
        OF(1); OF(2); OF(3); OF(4); OF(5); OF(6); OF(7); OF(8); OF(9); OF(10); OF(11); OF(12); OF(13); OF(14);
    }
#undef OF
}

/* Row `top`, or two from it on, cut into tiles of nearly equal length, of one result of even length (28 vectors make
 * 14 + 14, 10 make 6 + 4); steps known when it is compiled save address arithmetic. */
INLINE void tiles(const fs_rows *s, const fs_run *runs, uint32_t count, const int M, const int ROWS, uint32_t top,
                  const size_t most) {
    const size_t all = s->n, n = all <= most ? 1 : (all + most - 1) / most;
    const ptrdiff_t in_step = s->in_step, out_step = s->out_step;
    for (size_t t = 0, first = 0, end; t < n; t++, first = end) {
        end = n == 1 ? all : M == 1 ? fs_even_cut(all, n, t + 1) : all * (t + 1) / n;
        const size_t size = end - first;
        if (in_step == WIDTH && out_step == WIDTH) sized_tiles(s, runs, count, M, ROWS, top, size, first, WIDTH, WIDTH);
        else if (in_step == FS_MAX_LANES) sized_tiles(s, runs, count, M, ROWS, top, size, first, FS_MAX_LANES, out_step);
        else sized_tiles(s, runs, count, M, ROWS, top, size, first, in_step, out_step);
    }
}

/* Functions of their own, not inlined: together they would be too much for the compiler's choice of registers. Aligned, so
 * that their loops lie the same whatever is linked before them, which makes a tenth on an Intel: it decodes anew what
 * lies around a jump that crosses 32 bytes. */
#define KERNEL __attribute__((noinline, aligned(64))) TARGET static

KERNEL void two_rows(const fs_rows *s, const fs_run *runs, uint32_t count) {
    tiles(s, runs, count, 1, 2, 0, REGISTERS / 2);
}

KERNEL void one_by_one(const fs_rows *s, const fs_run *runs, uint32_t count) {
    for (uint32_t y = 0; y < s->rows; y++) tiles(s, runs, count, 1, 1, y, TILE1);
}

/* A row that fills the registers alone beats two that are cut: LeNet-5's second layer, rows of 10 on AVX2, takes 0.93 of
 * the time of 2 x 6 and 2 x 4. */
TARGET static void run1(const fs_rows *s, const fs_run *runs, uint32_t count) {
    if (s->rows == 2 && (s->n <= REGISTERS / 2 || s->n > TILE1)) two_rows(s, runs, count);
    else one_by_one(s, runs, count);
}

KERNEL void run4(const fs_rows *s, const fs_run *runs, uint32_t count) {
    for (uint32_t y = 0; y < s->rows; y++) tiles(s, runs, count, 4, 1, y, REGISTERS / 4);
}

#endif

INLINE float fused(float a, float b, float c) {
#if defined(VEC) || defined(__FP_FAST_FMAF)
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

INLINE float activate1(float x, uint32_t act) {
    if (act == FS_ACT_RELU) return x < 0.0f ? 0.0f : x;
    if (is(act, FS_ACT_HARDSWISH)) {
        float t = x + 3.0f;
        t = t < 0.0f ? 0.0f : t;
        t = t > 6.0f ? 6.0f : t;
        return x * t * (1.0f / 6.0f);
    }
    return x;
}

/* ---- activations that a conv does not make itself: in place, once a row is there ---- */

/* e^t and e^t - 1 of t <= 0 (below -87 that of -87), each to a few units in its last place: t = n ln 2 + r with
 * |r| <= ln 2 / 2, and e^r - 1 by a polynomial. Adding 1.5 * 2^23 rounds to a whole number, which the lowest bits hold. */
typedef struct {
    float power, less_one;
} exponential;

INLINE exponential exponential_of(float t) {
    t = t < -87.0f ? -87.0f : t;
    const float shifted = t * 1.44269504f + 12582912.0f;
    const float n = shifted - 12582912.0f;
    const float r = (t - n * 0.693359375f) - n * -2.12194440e-4f;
    const float above = (((0.0013950603f * r + 0.0083689534f) * r + 0.041666204f) * r + 0.16666518f) * r + 0.5f;
    const float q = r + r * r * above;
    uint32_t bits;
    memcpy(&bits, &shifted, 4);
    bits = (bits << 23) + 0x3F800000u;
    float scale;
    memcpy(&scale, &bits, 4);
    const exponential e = {scale * q + scale, scale * q + (scale - 1.0f)};
    return e;
}

enum { SMOOTH = FS_LAYER_SIGMOID | FS_LAYER_SILU | FS_LAYER_TANH | FS_LAYER_GELU | FS_LAYER_GELU_TANH };

/* All of these are one exponential and one division; the normal distribution in GELU is e^(-x^2 / 2) times t times a
 * polynomial in t = 1 / (1 + 0.2316419 |x|), to 1.1e-7 of itself. */
INLINE float smooth(float x, uint32_t act) {
    const float size = x < 0.0f ? -x : x;
    float inside = x;
    if (is(act, FS_ACT_GELU_TANH)) inside = (x + 0.044715f * x * x * x) * 1.59576912f;
    float t = inside < 0.0f ? inside : -inside;
    if (is(act, FS_ACT_TANH)) t = -2.0f * size;
    if (is(act, FS_ACT_GELU)) t = -0.5f * x * x;
    const exponential e = exponential_of(t);
    float above = inside < 0.0f ? e.power : 1.0f, below = 1.0f + e.power;
    if (is(act, FS_ACT_TANH)) above = x < 0.0f ? e.less_one : -e.less_one, below = 2.0f + e.less_one;
    if (is(act, FS_ACT_GELU)) above = 1.0f, below = 1.0f + 0.231641888f * size;
    const float quotient = above / below;
    if (is(act, FS_ACT_SILU) || is(act, FS_ACT_GELU_TANH)) return x * quotient;
    if (is(act, FS_ACT_GELU)) {
        const float p = ((((((-0.0708308485f * quotient + 0.24943752f) * quotient - 0.204797129f) * quotient +
                            0.228278309f) * quotient + 0.0118596251f) * quotient + 0.103198459f) * quotient +
                         0.0903250837f) * quotient + 0.0925290358f;
        const float tail = e.power * (quotient * p);
        return x * (x < 0.0f ? tail : 1.0f - tail);
    }
    return quotient;
}

INLINE float hard(float x, uint32_t act) {
    const float shifted = is(act, FS_ACT_RELU6) ? x : x + 3.0f;
    const float rising = shifted < 0.0f ? 0.0f : shifted;
    const float gate = rising > 6.0f ? 6.0f : rising;
    if (is(act, FS_ACT_RELU6)) return gate;
    return (is(act, FS_ACT_HARDSWISH) ? x * gate : gate) * (1.0f / 6.0f);
}

INLINE void activate_all(float *data, size_t n, const uint32_t act, float slope) {
    for (size_t i = 0; i < n; i++) {
        const float x = data[i];
        if (is(act, FS_ACT_LEAKY_RELU)) data[i] = x < 0.0f ? slope * x : x;
        else if (is(act, FS_ACT_HARDSWISH) || is(act, FS_ACT_RELU6) || is(act, FS_ACT_HARDSIGMOID))
            data[i] = hard(x, act);
        else if ((~(uint32_t)(FS_WITHOUT) & SMOOTH) && act != FS_ACT_RELU) data[i] = smooth(x, act);
        else data[i] = x < 0.0f ? 0.0f : x;
    }
}

TARGET static void act_row(float *data, size_t n, uint32_t act, float slope) {
#ifdef VEC
    switch (act) { /* a loop for each becomes vectors */
    case FS_ACT_RELU: activate_all(data, n, FS_ACT_RELU, slope); return;
    case FS_ACT_HARDSWISH: activate_all(data, n, FS_ACT_HARDSWISH, slope); return;
    case FS_ACT_RELU6: activate_all(data, n, FS_ACT_RELU6, slope); return;
    case FS_ACT_LEAKY_RELU: activate_all(data, n, FS_ACT_LEAKY_RELU, slope); return;
    case FS_ACT_HARDSIGMOID: activate_all(data, n, FS_ACT_HARDSIGMOID, slope); return;
    case FS_ACT_SIGMOID: activate_all(data, n, FS_ACT_SIGMOID, slope); return;
    case FS_ACT_SILU: activate_all(data, n, FS_ACT_SILU, slope); return;
    case FS_ACT_TANH: activate_all(data, n, FS_ACT_TANH, slope); return;
    case FS_ACT_GELU: activate_all(data, n, FS_ACT_GELU, slope); return;
    case FS_ACT_GELU_TANH: activate_all(data, n, FS_ACT_GELU_TANH, slope); return;
    }
#else
    activate_all(data, n, act, slope);
#endif
}

INLINE void some(const fs_rows *s, const fs_run *r, const int X, size_t first, const ptrdiff_t in_step) {
    float acc[8];
    const float *in = s->in + (ptrdiff_t)first * in_step;
    float *out = r->out[0] + s->out_at + (ptrdiff_t)first * s->out_step;
    for (int x = 0; x < X; x++) acc[x] = r->bias[0];
    const float *weight = r->weights;
    for (const uint32_t *offset = r->offsets, *end = offset + r->taps; offset < end; offset++) {
        const float *p = at_byte(in, *offset);
        const float w = *weight++;
#pragma GCC unroll 8
        for (int x = 0; x < X; x++) acc[x] = fused(w, p[x * in_step], acc[x]);
    }
    for (int x = 0; x < X; x++) out[x * s->out_step] = activate1(acc[x], s->act);
}

/* Eight numbers at a time in registers; this is the kernel of a microcontroller. */
TARGET static void scalar(const fs_rows *s, const fs_run *r) {
    size_t i = 0;
    if (s->in_step == 1)
        for (; i + 8 <= s->n; i += 8) some(s, r, 8, i, 1);
    for (; i + 8 <= s->n; i += 8) some(s, r, 8, i, s->in_step);
    for (; i < s->n; i++) some(s, r, 1, i, s->in_step);
}

TARGET static void pixels(float *out, const uint8_t *in, size_t n, float scale, float shift) {
    for (size_t i = 0; i < n; i++) out[i] = (float)in[i] * scale + shift;
}

#ifdef VEC

/* Windows of WIDTH lanes; `part` is the first lane. */
INLINE void pool_vectors(float *out, const float *in, const size_t *rows, const fs_pooling *p, const uint32_t n_rows,
                         const uint32_t columns, const int max) {
    const size_t lanes = p->lanes, step = p->stride * lanes, size = p->windows * lanes;
    const VEC factor = v_set1(p->factor);
    for (uint32_t part = 0; part < lanes; part += WIDTH) {
        const float *from = in + part;
        for (size_t at = part; at < size; at += lanes, from += step) {
            VEC best = max ? v_load(from + rows[0]) : v_set1(0.0f);
            for (uint32_t y = 0; y < n_rows; y++)
                for (uint32_t x = max && !y; x < columns; x++) {
                    const VEC v = v_load(from + rows[y] + x * lanes);
                    best = max ? v_max(v, best) : v_add(best, v);
                }
            v_store(out + at, max ? best : v_mul(best, factor));
        }
    }
}

#endif

INLINE void pool_numbers(float *out, const float *in, const size_t *rows, const fs_pooling *p, const uint32_t lanes) {
    for (uint32_t i = 0; i < p->windows; i++)
        for (uint32_t l = 0; l < lanes; l++) {
            const size_t at = (size_t)i * p->stride * lanes + l;
            float best = p->max ? in[rows[0] + at] : 0.0f;
            for (uint32_t y = 0; y < p->rows; y++)
                for (uint32_t x = 0; x < p->columns; x++) {
                    const float v = in[rows[y] + at + x * lanes];
                    best = !p->max ? best + v : v > best ? v : best;
                }
            *out++ = p->max ? best : best * p->factor;
        }
}

INLINE void pool_map(float *out, const float *in, const size_t *rows, const fs_pooling *p) {
#ifdef VEC
    if (p->lanes % WIDTH == 0) {
        if (p->max && p->rows == 2 && p->columns == 2) {
            const size_t both[2] = {rows[0], rows[1]}; /* which no result overwrites */
            pool_vectors(out, in, both, p, 2, 2, 1);
        }
        else pool_vectors(out, in, rows, p, p->rows, p->columns, p->max);
        return;
    }
#endif
    if (p->lanes == 1) pool_numbers(out, in, rows, p, 1);
    else pool_numbers(out, in, rows, p, p->lanes);
}

TARGET static void pool(const fs_pooled *maps, uint32_t count, const size_t *rows, const fs_pooling *p) {
    if (!fs_has(FS_LAYER_POOL)) return;
    for (const fs_pooled *m = maps; m < maps + count; m++) pool_map(m->out + p->out_at, m->in + p->in_at, rows, p);
}

/* Rows are added up sixteen numbers at a time in float32, in four sums so that additions need not wait for one another. */
enum { PIECE = 16, CHAINS_OF_PIECE = 4 };

#ifdef VEC

INLINE VEC sum_of_four(const VEC v[CHAINS_OF_PIECE]) { return v_add(v_add(v[0], v[1]), v_add(v[2], v[3])); }

/* Of n numbers + shift: the sum, and that of the squares. */
INLINE void piece_vectors(const float *in, size_t n, const size_t step, VEC shift, VEC *sum, VEC *square) {
    VEC sums[CHAINS_OF_PIECE], squares[CHAINS_OF_PIECE];
#pragma GCC unroll 4
    for (int c = 0; c < CHAINS_OF_PIECE; c++) sums[c] = squares[c] = v_set1(0.0f);
#pragma GCC unroll 16
    for (size_t x = 0; x < PIECE; x++) {
        if (x >= n) break;
        const VEC apart = v_add(v_load(in + x * step), shift);
        sums[x % CHAINS_OF_PIECE] = v_add(sums[x % CHAINS_OF_PIECE], apart);
        squares[x % CHAINS_OF_PIECE] = v_fma(apart, apart, squares[x % CHAINS_OF_PIECE]);
    }
    *sum = sum_of_four(sums);
    *square = sum_of_four(squares);
}

/* Of a row + shift, added to float64. */
INLINE void row_vectors(const float *in, size_t n, const size_t step, VEC shift, DVEC sums[2], DVEC squares[2]) {
    for (; n; in += PIECE * step) {
        VEC sum, square;
        if (n >= PIECE) piece_vectors(in, PIECE, step, shift, &sum, &square), n -= PIECE;
        else piece_vectors(in, n, step, shift, &sum, &square), n = 0;
        sums[0] += d_low(sum), sums[1] += d_high(sum);
        squares[0] += d_low(square), squares[1] += d_high(square);
    }
}

/* WIDTH lanes, of which `in` is the first. */
INLINE void moments_vectors(const float *in, const fs_map *map, const size_t step, double *sum, double *square) {
    const DVEC zero = d_set1(0.0), count = d_set1((double)(map->rows * map->n));
    DVEC sums[2] = {zero, zero}, squares[2] = {zero, zero}, both[2];
    float shifts[WIDTH];
    row_vectors(in + map->rows / 2 * map->pitch, map->n, step, v_set1(0.0f), sums, squares);
    memcpy(both, sums, sizeof both);
    for (int l = 0; l < WIDTH; l++) shifts[l] = (float)both[2 * l / WIDTH][l % (WIDTH / 2)] * (-1.0f / (float)map->n);
    const VEC shift = v_load(shifts);
    sums[0] = sums[1] = squares[0] = squares[1] = zero;
    for (uint32_t y = 0; y < map->rows; y++) row_vectors(in + y * map->pitch, map->n, step, shift, sums, squares);
    const DVEC back[2] = {d_low(shift), d_high(shift)};
    DVEC before[2];
    memcpy(before, sum, sizeof before);
    for (int h = 0; h < 2; h++) before[h] += sums[h] - back[h] * count;
    memcpy(sum, before, sizeof before);
    memcpy(before, square, sizeof before);
    for (int h = 0; h < 2; h++) before[h] += squares[h] + back[h] * (back[h] * count - (sums[h] + sums[h]));
    memcpy(square, before, sizeof before);
}

#endif

typedef struct {
    double sum, square;
} row_moments;

/* Of a row + shift. */
TARGET static void row_numbers(const float *in, size_t n, size_t step, float shift, row_moments *to) {
    while (n) {
        struct {
            float sum, square;
        } part[CHAINS_OF_PIECE] = {{0, 0}}, *p;
        for (uint32_t x = 0; x < PIECE && n; x++, n--, in += step) {
            const float apart = *in + shift;
            p = part + x % CHAINS_OF_PIECE;
            p->sum += apart, p->square = fused(apart, apart, p->square);
        }
        p = part;
        to->sum += (double)((p[0].sum + p[1].sum) + (p[2].sum + p[3].sum));
        to->square += (double)((p[0].square + p[1].square) + (p[2].square + p[3].square));
    }
}

INLINE void moments_numbers(const float *in, const fs_map *map, double *sum, double *square) {
    row_moments all = {0, 0};
    row_numbers(in + map->rows / 2 * map->pitch, map->n, map->lanes, 0.0f, &all);
    const float shift = (float)all.sum * (-1.0f / (float)map->n);
    all.sum = all.square = 0;
    for (uint32_t y = 0; y < map->rows; y++, in += map->pitch) row_numbers(in, map->n, map->lanes, shift, &all);
    const double back = (double)shift, whole = back * (double)(map->rows * map->n);
    *sum += all.sum - whole;
    *square += all.square + back * (whole - (all.sum + all.sum));
}

/* Sixteen numbers at a time in float32, by what they differ from the mean of the map's middle row; the rest in float64, for
 * which a microcontroller takes a hundred cycles an operation. The error of a variance is at most 10 units in the last
 * place of float32 times 1 + (how far that mean is from the map's, in deviations)^2, beside that of float64. */
TARGET static void moments(const float *in, const fs_map *map, fs_moments *to) {
    if (!fs_has(FS_LAYER_BATCH_NORM) && !fs_has(FS_LAYER_GROUP_NORM)) return;
    uint32_t lane = 0;
#ifdef VEC
    for (; lane + WIDTH <= map->lanes; lane += WIDTH)
        moments_vectors(in + lane, map, map->lanes, to->sum + lane, to->square + lane);
#endif
    for (; lane < map->lanes; lane++) moments_numbers(in + lane, map, to->sum + lane, to->square + lane);
}

#ifdef VEC

INLINE void affine_vectors(float *data, const fs_map *map, const fs_affine *f, const int plus, const uint32_t act) {
    const size_t lanes = map->lanes, n = map->n * lanes;
    for (uint32_t part = 0; part < lanes; part += WIDTH) {
        const VEC factor = v_load(f->a + part), shift = v_load(f->b + part);
        for (uint32_t y = 0; y < map->rows; y++) {
            float *x = data + y * map->pitch + part;
            const float *other = plus ? f->plus + y * f->plus_pitch + part : x;
#pragma GCC unroll 4 /* 0.26 ns a vector instead of 0.45, rows of 32 on Zen 5 */
            for (size_t i = 0; i < n; i += lanes) {
                const VEC v = v_add(v_mul(v_load(x + i), factor), shift);
                v_store(x + i, activate(plus ? v_add(v, v_load(other + i)) : v, act));
            }
        }
    }
}

INLINE void affine_act(float *data, const fs_map *map, const fs_affine *f, const int plus) {
    if (f->act == FS_ACT_RELU) affine_vectors(data, map, f, plus, FS_ACT_RELU);
    else if (f->act == FS_ACT_NONE) affine_vectors(data, map, f, plus, FS_ACT_NONE);
    else affine_vectors(data, map, f, plus, f->act);
}

#endif

TARGET static void affine(float *data, const fs_map *map, const fs_affine *f) {
    if (!fs_has(FS_LAYER_BATCH_NORM) && !fs_has(FS_LAYER_GROUP_NORM)) return;
#ifdef VEC
    if (map->lanes % WIDTH == 0) {
        if (f->plus) affine_act(data, map, f, 1);
        else affine_act(data, map, f, 0);
        return;
    }
#endif
    for (uint32_t y = 0; y < map->rows; y++) {
        float *x = data + y * map->pitch;
        for (uint32_t i = 0; i < map->n; i++, x += map->lanes)
            for (uint32_t l = 0; l < map->lanes; l++) x[l] = activate1(x[l] * f->a[l] + f->b[l], f->act);
    }
}

TARGET static void add(float *out, const float *a, const float *b, size_t n, uint32_t act) {
    if (!fs_has(FS_LAYER_ADD)) return;
    if (act == FS_ACT_RELU)
        for (size_t i = 0; i < n; i++) out[i] = activate1(a[i] + b[i], FS_ACT_RELU);
    else
        for (size_t i = 0; i < n; i++) out[i] = activate1(a[i] + b[i], act);
}

/* With a period of `lanes` b is one number for each of them. */
TARGET static void mul(float *out, const float *a, const float *b, size_t n, size_t period, uint32_t act) {
    if (!fs_has(FS_LAYER_MUL)) return;
    for (size_t first = 0; first < n; first += period)
        for (size_t i = 0; i < period; i++) out[first + i] = activate1(a[first + i] * b[i], act);
}

/* ---- the loss ---- */

#ifdef VEC

typedef int64_t LVEC __attribute__((vector_size(4 * WIDTH)));

/* As fs_exp does. */
INLINE DVEC exponentials(DVEC given) {
    static const double terms[FS_EXP_TERMS] = FS_INVERSE_FACTORIALS;
    const LVEC inside = given > d_set1(-700.0), unknown = given != given;
    const DVEC x = (DVEC)((LVEC)given & inside);
    const DVEC n = d_trunc(x * d_set1(1.4426950408889634) - d_set1(0.5));
    const DVEC r = (x - n * d_set1(6.93147180369123816490e-01)) - n * d_set1(1.90821492927058770002e-10);
    DVEC sum = d_set1(0.0);
#pragma GCC unroll 14
    for (int i = 0; i < FS_EXP_TERMS; i++) sum = sum * r + d_set1(terms[i]);
    const DVEC scale = (DVEC)((LVEC)(n + d_set1(0x1p52 + 1023)) << 52); /* the lowest bits hold the whole number */
    return (DVEC)(((LVEC)(sum * scale) & inside) | ((LVEC)given & unknown));
}

TARGET static void softmax(const float *logits, size_t step, uint32_t classes, fs_softmax *out) {
    float largest[WIDTH];
    uint32_t best[WIDTH];
    for (int l = 0; l < WIDTH; l++) largest[l] = logits[l], best[l] = 0;
    for (uint32_t c = 1; c < classes; c++)
        for (int l = 0; l < WIDTH; l++) {
            const float logit = logits[c * step + l];
            best[l] = logit > largest[l] ? c : best[l];
            largest[l] = logit > largest[l] ? logit : largest[l];
        }
    const VEC top = v_load(largest);
    DVEC sum[2] = {d_set1(0.0), d_set1(0.0)};
    for (uint32_t c = 0; c < classes; c++) {
        const VEC logit = v_load(logits + c * step);
        sum[0] += exponentials(d_low(logit) - d_low(top));
        sum[1] += exponentials(d_high(logit) - d_high(top));
    }
    for (int l = 0; l < WIDTH; l++) {
        const fs_softmax one = {sum[2 * l / WIDTH][l % (WIDTH / 2)], largest[l], best[l]};
        out[l] = one;
    }
}

#endif

#include "directions.inl"

#ifdef VEC
#define WITH_VECTORS                                                                                              \
    .width = WIDTH, .band = REGISTERS / 2, .run1 = run1, .run4 = run4, .softmax = softmax,                        \
    .sign_words = sign_words, .add_signs = add_signs, .dot_signs = dot_signs,
#else
#define WITH_VECTORS
#endif
/* The table of an instruction set. */
#define LOOPS(NAME)                                                                                               \
    {                                                                                                             \
        .name = NAME, WITH_VECTORS                                                                                \
        .scalar = scalar, .pixels = pixels, .pool = pool, .moments = moments, .affine = affine, .add = add,       \
        .mul = mul, .act = act_row, .direction = direction, .axpy = axpy, .dot = dot, .sgd = sgd, .adam = adam    \
    }
