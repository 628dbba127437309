/* Four images at a time, one in each lane of a vector: a live weight is then one multiply-add for each place of its
 * map, at any density, kernel and stride, and no sum depends on the machine. */
#include "conv64.h"

#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#define TARGET __attribute__((target("avx2,fma")))
#define WIDTH 4
#define v_fma _mm256_fmadd_pd
#else
#define TARGET
#define WIDTH 2
#if defined(__aarch64__)
#include <arm_neon.h>
#define v_fma(a, b, c) vfmaq_f64((c), (a), (b))
#else
#define v_fma(a, b, c) ((a) * (b) + (c))
#endif
#endif

enum {
    LANES = 4,
    PARTS = LANES / WIDTH,
    TILE = 8,      /* sums in registers: enough to hide the latency of a multiply-add */
    CHANNELS = 16, /* that sums go over at a time: what a tile reads of them, 15 KB with 3 x 3, is half a first cache */
    PLACES = 64    /* at least, for which a weight's gradient stays in a register */
};

#define INLINE static inline __attribute__((always_inline)) TARGET

typedef double quad __attribute__((vector_size(32))); /* a number of each of four images */
typedef double quad_anywhere __attribute__((vector_size(32), aligned(8), may_alias));
typedef double vec __attribute__((vector_size(8 * WIDTH), may_alias)); /* what a register holds of one */

typedef struct {
    double weight;
    int32_t offset; /* from the quad of a sum's first place to the one that the weight multiplies */
    uint32_t index; /* among all weights */
} tap;

/* Images or gradients of four images, channel after channel, with zeros around every map. */
typedef struct {
    quad *quads;
    uint32_t channels, size[2], border[2];
    ptrdiff_t row, channel;
} maps;

/* Lists of taps, one after the other: list n is taps[starts[n]] to taps[starts[n + 1]]. There is one for each block of
 * channels that sums go over and, within it, for each channel that has sums. */
typedef struct {
    tap *taps;
    uint32_t *starts, channels, blocks;
    quad *sums; /* of a tile of every channel */
} lists;

static size_t aligned(size_t bytes) { return (bytes + 63) & ~(size_t)63; }

static maps maps_of(uint32_t channels, const uint32_t size[2], const uint32_t border[2]) {
    maps m = {.channels = channels, .size = {size[0], size[1]}, .border = {border[0], border[1]}};
    m.row = size[1] + 2 * border[1];
    m.channel = (size[0] + 2 * border[0]) * m.row;
    return m;
}

static maps inputs_of(const fs_conv64 *c) { return maps_of(c->in, c->in_size, c->padding); }

/* A place of the input reaches outputs that lie less than a kernel outside their map. */
static maps outputs_of(const fs_conv64 *c) { return maps_of(c->out, c->out_size, c->kernel); }

static size_t bytes_of(const maps *m) { return aligned(sizeof(quad) * m->channels * (size_t)m->channel); }

static size_t weights_of(const fs_conv64 *c) { return (size_t)c->out * c->in * c->kernel[0] * c->kernel[1]; }

static size_t image_of(const maps *m) { return (size_t)m->channels * m->size[0] * m->size[1]; }

static uint32_t blocks_of(uint32_t channels) { return (channels + CHANNELS - 1) / CHANNELS; }

/* Of the sums of so many channels, over blocks of so many others, in so many phases. */
static size_t lists_bytes(const fs_conv64 *c, uint32_t to, uint32_t from, uint32_t phases) {
    return aligned((weights_of(c) + 1) * sizeof(tap)) +
           aligned(((size_t)to * blocks_of(from) * phases + 1) * sizeof(uint32_t)) + aligned(to * TILE * sizeof(quad));
}

size_t fs_conv64_scratch(const fs_conv64 *c) {
    const maps in = inputs_of(c), out = outputs_of(c);
    return bytes_of(&in) + bytes_of(&out) + lists_bytes(c, c->out, c->in, 1) +
           lists_bytes(c, c->in, c->out, c->stride[0] * c->stride[1]) + aligned(weights_of(c) * sizeof(quad));
}

static void *take(char **scratch, size_t bytes) {
    void *taken = *scratch;
    *scratch += aligned(bytes);
    return taken;
}

static void clear(maps *m, char **scratch) {
    m->quads = take(scratch, bytes_of(m));
    memset(m->quads, 0, bytes_of(m));
}

static lists new_lists(const fs_conv64 *c, uint32_t to, uint32_t from, uint32_t phases, char **scratch) {
    lists l = {.channels = to, .blocks = blocks_of(from)};
    l.taps = take(scratch, (weights_of(c) + 1) * sizeof(tap));
    l.starts = take(scratch, ((size_t)to * l.blocks * phases + 1) * sizeof(uint32_t));
    l.sums = take(scratch, to * TILE * sizeof(quad));
    return l;
}

static quad *place(const maps *m, uint32_t channel, ptrdiff_t y, ptrdiff_t x) {
    return m->quads + (ptrdiff_t)channel * m->channel + (y + m->border[0]) * m->row + x + m->border[1];
}

INLINE void transpose(quad v[4]) {
    const quad a = v[0], b = v[1], c = v[2], d = v[3];
#pragma GCC unroll 4
    for (int l = 0; l < LANES; l++) v[l] = (quad){a[l], b[l], c[l], d[l]};
}

/* Four images into the lanes of maps; of fewer, the other lanes are zero. */
TARGET static void pack(const maps *m, const double *images, uint32_t count) {
    const size_t plane = (size_t)m->size[0] * m->size[1], image = m->channels * plane;
    const uint32_t columns = m->size[1];
    for (uint32_t channel = 0; channel < m->channels; channel++)
        for (uint32_t y = 0; y < m->size[0]; y++) {
            const double *from = images + channel * plane + (size_t)y * columns;
            quad *to = place(m, channel, y, 0);
            uint32_t x = 0;
            for (; count == LANES && x + 4 <= columns; x += 4) {
                quad v[4];
                for (int l = 0; l < LANES; l++) v[l] = *(const quad_anywhere *)(from + l * image + x);
                transpose(v);
                for (int l = 0; l < LANES; l++) to[x + l] = v[l];
            }
            for (; x < columns; x++)
                for (uint32_t l = 0; l < LANES; l++) ((double *)(to + x))[l] = l < count ? from[l * image + x] : 0;
        }
}

/* Where sums of a channel go: the first place of the first image, and the steps from there. */
typedef struct {
    double *first;
    size_t image, step;
    uint32_t count; /* of images */
} target;

TARGET static void store(const quad *sums, uint32_t n, const target *to) {
    uint32_t x = 0;
    for (; to->step == 1 && to->count == LANES && x + 4 <= n; x += 4) {
        quad v[4] = {sums[x], sums[x + 1], sums[x + 2], sums[x + 3]};
        transpose(v);
        for (int l = 0; l < LANES; l++) *(quad_anywhere *)(to->first + l * to->image + x) = v[l];
    }
    for (; x < n; x++)
        for (uint32_t l = 0; l < to->count; l++) to->first[l * to->image + x * to->step] = sums[x][l];
}

/* N neighbouring sums over a list of taps. */
INLINE void sum(const tap *t, const tap *end, const quad *in, ptrdiff_t step, const int N, quad *sums) {
    vec held[TILE][PARTS];
#pragma GCC unroll 8
    for (int x = 0; x < N; x++)
        for (int part = 0; part < PARTS; part++) held[x][part] = ((const vec *)(sums + x))[part];
    for (; t < end; t++) {
        const vec weight = t->weight - (vec){0}, *p = (const vec *)(in + t->offset);
#pragma GCC unroll 8
        for (int x = 0; x < N; x++)
            for (int part = 0; part < PARTS; part++)
                held[x][part] = v_fma(weight, p[x * step * PARTS + part], held[x][part]);
    }
#pragma GCC unroll 8
    for (int x = 0; x < N; x++)
        for (int part = 0; part < PARTS; part++) ((vec *)(sums + x))[part] = held[x][part];
}

INLINE void sum_some(const tap *t, const tap *end, const quad *in, ptrdiff_t step, uint32_t n, quad *sums) {
    switch (n) {
    case 1: sum(t, end, in, step, 1, sums); break;
    case 2: sum(t, end, in, step, 2, sums); break;
    case 3: sum(t, end, in, step, 3, sums); break;
    case 4: sum(t, end, in, step, 4, sums); break;
    case 5: sum(t, end, in, step, 5, sums); break;
    case 6: sum(t, end, in, step, 6, sums); break;
    case 7: sum(t, end, in, step, 7, sums); break;
    default: sum(t, end, in, step, 8, sums);
    }
}

/* The sums of every channel along a row. Channels take turns while what they read is in cache. */
TARGET static void sum_row(const lists *l, const quad *in, ptrdiff_t step, uint32_t columns, target to, size_t plane) {
    const uint32_t tiles = (columns + TILE - 1) / TILE;
    double *row = to.first;
    for (uint32_t tile = 0; tile < tiles; tile++) {
        const uint32_t x = columns * tile / tiles, n = columns * (tile + 1) / tiles - x;
        const uint32_t *start = l->starts;
        memset(l->sums, 0, l->channels * TILE * sizeof(quad));
        for (uint32_t block = 0; block < l->blocks; block++)
            for (uint32_t channel = 0; channel < l->channels; channel++, start++) {
                const tap *t = l->taps + start[0], *end = l->taps + start[1];
                quad *sums = l->sums + channel * TILE;
                /* A step that the compiler knows costs no arithmetic of addresses. */
                if (step == 1) sum_some(t, end, in + x, 1, n, sums);
                else if (step == 2) sum_some(t, end, in + x * 2, 2, n, sums);
                else sum_some(t, end, in + x * step, step, n, sums);
            }
        for (uint32_t channel = 0; channel < l->channels; channel++) {
            to.first = row + channel * plane + x * to.step;
            store(l->sums + channel * TILE, n, &to);
        }
    }
}

/* Where live weights find the input of an output's place. */
static void list_inputs(const fs_conv64 *c, const maps *in, const double *weights, lists *l) {
    uint32_t n = 0, list = 0;
    for (uint32_t block = 0; block < c->in; block += CHANNELS)
        for (uint32_t o = 0; o < c->out; o++) {
            l->starts[list++] = n;
            for (uint32_t i = block; i < c->in && i < block + CHANNELS; i++)
                for (uint32_t ky = 0; ky < c->kernel[0]; ky++)
                    for (uint32_t kx = 0; kx < c->kernel[1]; kx++) {
                        const uint32_t index = ((o * c->in + i) * c->kernel[0] + ky) * c->kernel[1] + kx;
                        l->taps[n] = (tap){weights[index], (int32_t)(i * in->channel + ky * in->row + kx), index};
                        n += weights[index] != 0; /* no branch, which nothing could foretell */
                    }
        }
    l->starts[list] = n;
}

/* The outputs that places of an input row (or column) lead to by a weight k, or -1 where they lead to none. Places lie
 * `phase` after multiples of the stride; the output is that of the first of them, counted from a border outside. */
static int32_t leads_to(const fs_conv64 *c, int axis, uint32_t phase, uint32_t k) {
    const int32_t at = (int32_t)(phase + c->padding[axis]) - (int32_t)k, stride = (int32_t)c->stride[axis];
    return at % stride ? -1 : at / stride + (int32_t)c->kernel[axis];
}

/* For every phase, where live weights find the outputs that an input's place leads to. */
static void list_outputs(const fs_conv64 *c, const maps *out, const double *weights, lists *l) {
    uint32_t n = 0, list = 0;
    for (uint32_t phase = 0; phase < c->stride[0] * c->stride[1]; phase++)
        for (uint32_t block = 0; block < c->out; block += CHANNELS)
            for (uint32_t i = 0; i < c->in; i++) {
                l->starts[list++] = n;
                for (uint32_t o = block; o < c->out && o < block + CHANNELS; o++)
                    for (uint32_t ky = 0; ky < c->kernel[0]; ky++) {
                        const int32_t y = leads_to(c, 0, phase / c->stride[1], ky);
                        for (uint32_t kx = 0; y >= 0 && kx < c->kernel[1]; kx++) {
                            const int32_t x = leads_to(c, 1, phase % c->stride[1], kx);
                            const uint32_t index = ((o * c->in + i) * c->kernel[0] + ky) * c->kernel[1] + kx;
                            l->taps[n] = (tap){weights[index], (int32_t)(o * out->channel + y * out->row + x), index};
                            n += x >= 0 && weights[index] != 0;
                        }
                    }
            }
    l->starts[list] = n;
}

static uint32_t lanes_from(const fs_conv64 *c, uint32_t image) {
    return c->images - image < LANES ? c->images - image : LANES;
}

void fs_conv64_forward(const fs_conv64 *c, const double *images, const double *weights, double *out, void *scratch) {
    char *rest = scratch;
    maps in = inputs_of(c);
    clear(&in, &rest);
    lists l = new_lists(c, c->out, c->in, 1, &rest);
    list_inputs(c, &in, weights, &l);
    const size_t plane = (size_t)c->out_size[0] * c->out_size[1];
    for (uint32_t image = 0; image < c->images; image += LANES) {
        target to = {.image = c->out * plane, .step = 1, .count = lanes_from(c, image)};
        pack(&in, images + image * image_of(&in), to.count);
        for (uint32_t y = 0; y < c->out_size[0]; y++) {
            to.first = out + image * to.image + (size_t)y * c->out_size[1];
            sum_row(&l, in.quads + y * c->stride[0] * in.row, c->stride[1], c->out_size[1], to, plane);
        }
    }
}

/* The gradient of four images: every phase of the stride has lists of its own. */
static void images_backward(const fs_conv64 *c, const maps *out, const lists *l, double *gradient, uint32_t count) {
    const size_t plane = (size_t)c->in_size[0] * c->in_size[1];
    for (uint32_t y = 0; y < c->in_size[0]; y++)
        for (uint32_t px = 0; px < c->stride[1]; px++) {
            const uint32_t phase = y % c->stride[0] * c->stride[1] + px;
            lists own = *l;
            own.starts += phase * c->in * l->blocks;
            const uint32_t columns = (c->in_size[1] + c->stride[1] - 1 - px) / c->stride[1];
            const target to = {gradient + (size_t)y * c->in_size[1] + px, c->in * plane, c->stride[1], count};
            sum_row(&own, out->quads + y / c->stride[0] * out->row, 1, columns, to, plane);
        }
}

/* Some rows of a channel's gradient, and the input that their first place reads by an offset of 0. */
typedef struct {
    const quad *gradient, *in;
    ptrdiff_t gradient_row, in_row, step;
    uint32_t count, columns;
} rows;

/* Adds what some rows give to the gradients of N weights. */
INLINE void correlate(const tap *t, quad *totals, const rows *b, ptrdiff_t step, const int N) {
    vec held[TILE][PARTS];
    const vec *in[TILE];
#pragma GCC unroll 8
    for (int n = 0; n < N; n++) {
        in[n] = (const vec *)(b->in + t[n].offset);
        for (int part = 0; part < PARTS; part++) held[n][part] = ((const vec *)(totals + n))[part];
    }
    for (uint32_t y = 0; y < b->count; y++) {
        const vec *gradient = (const vec *)(b->gradient + y * b->gradient_row);
        for (uint32_t x = 0; x < b->columns; x++)
            for (int part = 0; part < PARTS; part++) {
                const vec g = gradient[x * PARTS + part];
#pragma GCC unroll 8
                for (int n = 0; n < N; n++) held[n][part] = v_fma(g, in[n][x * step * PARTS + part], held[n][part]);
            }
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) in[n] += b->in_row * PARTS;
    }
#pragma GCC unroll 8
    for (int n = 0; n < N; n++)
        for (int part = 0; part < PARTS; part++) ((vec *)(totals + n))[part] = held[n][part];
}

INLINE void correlate_some(const tap *t, uint32_t n, quad *totals, const rows *b, ptrdiff_t step) {
    switch (n) {
    case 1: correlate(t, totals, b, step, 1); break;
    case 2: correlate(t, totals, b, step, 2); break;
    case 3: correlate(t, totals, b, step, 3); break;
    case 4: correlate(t, totals, b, step, 4); break;
    case 5: correlate(t, totals, b, step, 5); break;
    case 6: correlate(t, totals, b, step, 6); break;
    case 7: correlate(t, totals, b, step, 7); break;
    default: correlate(t, totals, b, step, 8);
    }
}

TARGET static void correlate_all(const tap *t, const tap *end, quad *totals, const rows *b) {
    for (; t < end; t += TILE, totals += TILE) {
        const uint32_t n = end - t < TILE ? (uint32_t)(end - t) : TILE;
        if (b->step == 1) correlate_some(t, n, totals, b, 1);
        else correlate_some(t, n, totals, b, b->step);
    }
}

/* Adds what four images give to the gradients of live weights, lane by lane. */
static void weights_backward(const fs_conv64 *c, const maps *in, const maps *out, const lists *l, quad *totals) {
    const uint32_t at_a_time = (PLACES + c->out_size[1] - 1) / c->out_size[1];
    rows b = {.gradient_row = out->row, .in_row = c->stride[0] * in->row, .step = c->stride[1]};
    b.columns = c->out_size[1];
    for (uint32_t y = 0; y < c->out_size[0]; y += at_a_time) {
        b.count = c->out_size[0] - y < at_a_time ? c->out_size[0] - y : at_a_time;
        b.in = in->quads + y * b.in_row;
        for (uint32_t n = 0; n < l->blocks * c->out; n++) {
            b.gradient = place(out, n % c->out, y, 0);
            correlate_all(l->taps + l->starts[n], l->taps + l->starts[n + 1], totals + l->starts[n], &b);
        }
    }
}

static void add_lanes(const lists *l, const quad *totals, double *gradient) {
    for (uint32_t n = 0; n < l->starts[l->blocks * l->channels]; n++)
        gradient[l->taps[n].index] = (totals[n][0] + totals[n][1]) + (totals[n][2] + totals[n][3]);
}

void fs_conv64_backward(const fs_conv64 *c, const double *images, const double *weights, const double *gradient,
                        double *images_gradient, double *weights_gradient, void *scratch) {
    char *rest = scratch;
    maps in = inputs_of(c), out = outputs_of(c);
    clear(&in, &rest);
    clear(&out, &rest);
    lists inputs = new_lists(c, c->out, c->in, 1, &rest);
    lists outputs = new_lists(c, c->in, c->out, c->stride[0] * c->stride[1], &rest);
    list_inputs(c, &in, weights, &inputs);
    if (images_gradient) list_outputs(c, &out, weights, &outputs);
    quad *totals = take(&rest, weights_of(c) * sizeof(quad));
    memset(totals, 0, weights_of(c) * sizeof(quad));
    memset(weights_gradient, 0, weights_of(c) * sizeof(double));
    const size_t in_image = image_of(&in), out_image = image_of(&out);
    for (uint32_t image = 0; image < c->images; image += LANES) {
        const uint32_t count = lanes_from(c, image);
        pack(&in, images + image * in_image, count);
        pack(&out, gradient + image * out_image, count);
        if (images_gradient) images_backward(c, &out, &outputs, images_gradient + image * in_image, count);
        weights_backward(c, &in, &out, &inputs, totals);
    }
    add_lanes(&inputs, totals, weights_gradient);
}
