/* A convolution with its activation and pooling, row by row: the conv's own result never exists as a whole.
 *
 * The rows of one output channel are computed from its tap list: for every live weight, where in the
 * input its number lies. A tap list is made once per channel and used for all rows, images and
 * directions. Up to four results share their input in registers (run4): four directions where all read
 * the same image (the first layer) or a map that was made once for all, or four channels of a layer that
 * is nearly dense. Further channels follow row by row, so that the input rows of all of them stay in the
 * first cache. */
#include "conv.h"

#include <string.h>

/* Density from which four channels with zeros in the gaps beat one channel without: one alone runs at 0.75 of the rate
 * of four on an Intel with AVX-512, at 0.73 to 0.78 on Zen 4 with AVX2 or AVX-512. */
static const float NEARLY_DENSE = 0.75f;

enum { PART = 4 };

#ifdef FS_VECTORS
enum { TOGETHER = 16 }; /* most channels, or fours of them, that go down the rows together */
#else
enum { TOGETHER = 1 };
#endif

/* What goes down the rows together: tap lists, each of one result, or of PART that share their input. */
typedef struct {
    fs_run runs[TOGETHER]; /* side by side, since a kernel takes all of them in one call */
    uint32_t channels[TOGETHER][PART];
    uint32_t count;
    uint32_t results;          /* of each */
    uint32_t directions[PART]; /* of result m; the first of them has the input */
    uint32_t group;
} crew;

/* Of each tap list. Without vectors the compiler knows that it is one. */
static uint32_t results_of(const crew *c) {
#ifdef FS_VECTORS
    return c->results;
#else
    (void)c;
    return 1;
#endif
}

/* Division by a number that stays the same. */
typedef struct {
    uint32_t by;
#ifdef FS_VECTORS
    uint32_t factor, shift; /* n / by = n * factor >> shift, for n up to 2^28, the most weights of a layer */
#endif
} divisor;

static divisor divisor_of(uint32_t by) {
    divisor d = {.by = by};
#ifdef FS_VECTORS
    /* factor * by is 2^shift + e with e <= by, and n * e < 2^shift. */
    d.shift = 28 + (32 - (uint32_t)__builtin_clz(by));
    d.factor = (uint32_t)(((uint64_t)1 << d.shift) / by + 1);
#endif
    return d;
}

static uint32_t divided(uint32_t n, const divisor *d) {
#ifdef FS_VECTORS
    return (uint32_t)((uint64_t)n * d->factor >> d->shift); /* an Intel's division takes as long as 26 additions */
#else
    return n / d->by;
#endif
}

typedef struct {
    const fs_op *op;
    const fs_batch *batch;
    const fs_place *in, *out;
    fs_walk walk;
    int more;              /* the walk stands on a weight not yet used */
    uint32_t height, width; /* of the conv's result, before pooling */
    uint32_t row;          /* weights of a channel, were it dense */
    divisor kh, kw;        /* rows and columns of the kernel */
    uint32_t weights;      /* first value of the channel at hand */
    uint32_t bias;         /* first bias */
    size_t in_row, in_channel;
    int flat;              /* taps lie in memory as they do in the row: a linear layer */
    uint32_t step;         /* bytes from one result's window to the next; 0: no taps are joined */
    size_t origin;         /* from the tensor's start to the window of result (0, 0) */
} job;

static int is_streamed(const fs_engine *e, const job *j) { return e->streamed && j->in == e->places; }

const float *fs_parameters(fs_engine *e, uint32_t d, uint32_t first, uint32_t n) {
    if (!e->noise) return e->values + d * e->values_stride + first;
    const uint32_t start = e->noise->at, stop = start + e->noise->size;
    const uint32_t at = first > start ? first : start, end = first + n < stop ? first + n : stop;
    if (at >= end) return e->values + first;
    if (end - at < n) memcpy(e->row_values, e->values + first, 4 * (size_t)n);
    fs_perturb(e->noise, e->noise_k, at - start, end - at, e->values + at, e->row_values + (at - first));
    return e->row_values;
}

float *fs_tensor(const fs_engine *e, const fs_place *place, uint32_t d, uint32_t block) {
    if (place < e->own) d = 0;
    return e->activations + ((size_t)d * e->blocks + block) * e->block_floats + (size_t)place->offset * e->lanes;
}

float *fs_row(const fs_engine *e, const fs_place *place, float *tensor, uint32_t channel, uint32_t row) {
    return tensor + channel * fs_channel_floats(place, e->lanes) +
           (row + place->border_h) * fs_row_floats(place, e->lanes) + (size_t)place->border_w * e->lanes;
}

/* What window `i` of a pool covers of a map's rows (or columns). */
typedef struct {
    uint32_t first, end;
    uint32_t count; /* how many of them its mean divides by */
} span;

static span pool_span(const fs_op *op, uint32_t i, uint32_t size, uint32_t kernel, uint32_t stride, uint32_t padding) {
    if (fs_has(FS_LAYER_ADAPTIVE_POOL) && op->pool == FS_POOL_ADAPTIVE) { /* `kernel` windows share the map */
        const uint32_t first = i * size / kernel, end = ((i + 1) * size + kernel - 1) / kernel;
        const span s = {first, end, end - first};
        return s;
    }
    const int64_t start = (int64_t)i * stride - padding, end = start + kernel;
    span s = {start < 0 ? 0 : (uint32_t)start, end > size ? size : (uint32_t)end, kernel};
    if (op->pool != FS_POOL_AVERAGE) s.count = s.end - s.first;
    else if (fs_has(FS_LAYER_CEIL_MODE) && end > (int64_t)size + padding) s.count = (uint32_t)(size + padding - start); /* ceil_mode */
    return s;
}

void fs_pool_row(const fs_engine *e, const fs_op *op, const fs_pool_source *from, const fs_pooled *maps, uint32_t count,
                 uint32_t out_row, uint32_t out_width) {
    if (!fs_has(FS_LAYER_POOL)) return;
    const fs_window *w = &op->pooling;
    const span ys = pool_span(op, out_row, from->height, w->kh, w->sh, w->ph);
    size_t rows[255];
    for (uint32_t y = ys.first; y < ys.end; y++) rows[y - ys.first] = y % from->ring * from->pitch;
    for (uint32_t x = 0; x < out_width;) {
        const span xs = pool_span(op, x, from->width, w->kw, w->sw, w->pw);
        /* All windows that lie inside go in one call, those that stick out one by one. */
        uint32_t windows = 1;
        if (xs.end - xs.first == w->kw && w->sw) {
            windows = (from->width - xs.end) / w->sw + 1;
            if (windows > out_width - x) windows = out_width - x;
        }
        const fs_pooling pooling = {.rows = ys.end - ys.first, .columns = xs.end - xs.first, .stride = w->sw,
                                    .windows = windows, .lanes = e->lanes, .max = op->pool == FS_POOL_MAX,
                                    .factor = 1.0f / (float)(ys.count * xs.count),
                                    .in_at = (size_t)xs.first * e->lanes, .out_at = (size_t)x * e->lanes};
        e->isa->pool(maps, count, rows, &pooling);
        x += windows;
    }
}

/* ---- the image ---- */

static const uint8_t *image(const fs_batch *batch, uint32_t number) {
    const uint32_t at = number < batch->images ? number : batch->images - 1; /* lanes without an image repeat one */
    return batch->samples->images + (size_t)(batch->first + at) * batch->samples->stride;
}

static void interleave(uint8_t *to, const uint8_t *const *from, size_t n, uint32_t lanes) {
    for (size_t i = 0; i < n; i++, to += lanes)
        for (uint32_t l = 0; l < lanes; l++) to[l] = from[l][i];
}

/* Bytes of a block's images side by side: [pixel][lane]. */
void fs_load_block(fs_engine *e, const fs_batch *batch, uint32_t block) {
    const size_t n = (size_t)e->program.channels * e->program.height * e->program.width;
    e->window_filled = 0;
    if (e->lanes == 1) return;
    const uint8_t *from[FS_MAX_LANES];
    for (uint32_t l = 0; l < e->lanes; l++) from[l] = image(batch, block * e->lanes + l);
#ifdef FS_VECTORS
    if (e->lanes == 8) {
        interleave(e->pixels, from, n, 8);
        return;
    }
    if (e->lanes == 16) {
        interleave(e->pixels, from, n, 16);
        return;
    }
#endif
    interleave(e->pixels, from, n, e->lanes);
}

void fs_load_row(const fs_engine *e, const fs_batch *batch, uint32_t block, uint32_t c, uint32_t y, float *out) {
    const fs_program *p = &e->program;
    const float scale = fs_read_float(p->bytes + 32 + 4 * c);
    const float shift = fs_read_float(p->bytes + 32 + 4 * (p->channels + c));
    const size_t at = ((size_t)c * p->height + y) * p->width;
    const uint8_t *from = e->lanes == 1 ? image(batch, block) + at : e->pixels + at * e->lanes;
    e->isa->pixels(out, from, (size_t)p->width * e->lanes, scale, shift);
}

/* Makes the window hold padded rows [first, first + n) of the block, keeping those that it has. */
static void slide_window(fs_engine *e, const job *j, uint32_t block, uint32_t first, uint32_t n) {
    const fs_window *w = &j->op->window;
    const fs_program *p = &e->program;
    if (e->window_filled && first >= e->window_first && first + n <= e->window_first + e->window_filled) return;
    fs_lap((uint32_t)(j->out - e->places) - 1);
    uint32_t kept = 0;
    if (e->window_filled && first >= e->window_first && first < e->window_first + e->window_filled) {
        kept = e->window_first + e->window_filled - first;
        for (uint32_t c = 0; c < p->channels; c++) {
            float *rows = e->window + (size_t)c * e->window_height * e->window_row;
            memmove(rows, rows + (size_t)(first - e->window_first) * e->window_row, 4 * (size_t)kept * e->window_row);
        }
    }
    const uint32_t padded = p->height + 2 * w->ph;
    const uint32_t until = padded - first < e->window_height ? padded - first : e->window_height;
    for (uint32_t c = 0; c < p->channels; c++)
        for (uint32_t i = kept; i < until; i++) {
            float *row = e->window + ((size_t)c * e->window_height + i) * e->window_row;
            memset(row, 0, 4 * (size_t)e->window_row);
            const uint32_t y = first + i;
            if (y >= w->ph && y < p->height + w->ph)
                fs_load_row(e, j->batch, block, c, y - w->ph, row + (size_t)w->pw * e->lanes);
        }
    e->window_first = first, e->window_filled = until;
    fs_lap(FS_TIME_IMAGES);
}

/* ---- taps ---- */

/* Bytes from the window of a result to what weight (c, ky, kx) multiplies. */
static uint32_t tap(const fs_engine *e, const job *j, uint32_t c, uint32_t ky, uint32_t kx) {
    return (uint32_t)(4 * (c * j->in_channel + ky * j->op->dh * j->in_row + (size_t)kx * j->op->dw * e->lanes));
}

/* The taps of one channel: offsets[i] (or, for four channels together, slots[i] = 4 x its place in the
 * dense row + part). Returns how many. */
static uint32_t list_taps(fs_engine *e, job *j, uint32_t channel, uint32_t *offsets, uint32_t *slots, uint32_t part) {
    const int64_t start = (int64_t)channel * j->row;
    fs_walk walk = j->walk; /* in registers */
    uint32_t n = 0;
    int more = j->more, free = 0; /* free: the tap before is not the second of a pair */
    for (; more && walk.index < start + j->row; more = fs_walk_next(&walk), n++) {
        const uint32_t index = (uint32_t)(walk.index - start);
        if (slots) {
            slots[n] = PART * index + part;
            continue;
        }
        if (j->flat) {
            offsets[n] = 4 * index * e->lanes;
            continue;
        }
        /* Two divisions take less than counting up to the next weight. */
        const uint32_t row = divided(index, &j->kw), c = divided(row, &j->kh);
        offsets[n] = tap(e, j, c, row - c * j->kh.by, index - row * j->kw.by);
        free = !(j->step && free && offsets[n] - offsets[n - 1] == j->step);
        if (!free) offsets[n - 1] |= FS_WITH_NEXT;
    }
    j->walk = walk, j->more = more;
    return n;
}

/* The offsets of a whole dense row. */
static void list_all(fs_engine *e, const job *j) {
    const fs_window *w = &j->op->window;
    uint32_t *offset = e->offsets;
    for (uint32_t c = 0; c * w->kh * w->kw < j->row; c++)
        for (uint32_t ky = 0; ky < w->kh; ky++)
            for (uint32_t kx = 0; kx < w->kw; kx++)
                *offset++ = tap(e, j, c, ky, kx);
}

/* ---- rows ---- */

/* A row goes straight to its tensor unless it is pooled, or vectors would write beyond it. */
static int is_direct(const fs_engine *e, const job *j) {
    const uint32_t vector = fs_vector(e->isa);
    return !j->op->pool && ((vector && e->lanes % vector == 0) || (size_t)j->width * e->lanes % FS_MAX_LANES == 0);
}

/* `width` positions of a row (or of two) of all runs; `s` says where the first vector of them stands. */
static void compute_row(const fs_engine *e, const job *j, const crew *c, fs_rows *s, uint32_t width) {
    const fs_isa *isa = e->isa;
    const uint32_t lanes = e->lanes, vector = fs_vector(isa), stride = j->op->window.sw;
    void (*run)(const fs_rows *, const fs_run *, uint32_t) = results_of(c) == PART ? isa->run4 : isa->run1;
    if (vector && lanes % vector == 0) {
        s->in_step = (ptrdiff_t)(stride * lanes), s->out_step = lanes, s->n = width;
        for (uint32_t l = 0; l < lanes; l += vector, s->in += vector, s->out_at += vector) run(s, c->runs, c->count);
    } else if (vector && stride == 1) {
        /* Neighbouring positions are neighbours in memory: one long row. */
        s->n = ((size_t)width * lanes + vector - 1) / vector;
        s->in_step = s->out_step = vector;
        run(s, c->runs, c->count);
    } else {
        const int joined = lanes == 1 || stride == 1;
        s->n = joined ? (size_t)width * lanes : lanes;
        s->in_step = lanes == 1 ? (ptrdiff_t)stride : 1, s->out_step = 1;
        for (uint32_t x = 0; x < (joined ? 1 : width); x++, s->in += stride * lanes, s->out_at += lanes)
            isa->scalar(s, c->runs);
    }
}

static float *row_in_flight(const fs_engine *e, uint32_t result) {
    return e->rows + (size_t)result * e->rows_in_flight * e->row_capacity;
}

/* Row y of result m of run i, in its tensor. */
static float *result_row(const fs_engine *e, const job *j, const crew *c, uint32_t block, uint32_t i, uint32_t m,
                         uint32_t y) {
    return fs_row(e, j->out, fs_tensor(e, j->out, c->directions[m], block), c->channels[i][m], y);
}

/* Pools every window whose last row has been computed; returns how many rows of windows are done. */
static uint32_t pool_ready(const fs_engine *e, const job *j, const crew *c, uint32_t block, uint32_t done,
                           uint32_t computed) {
    const fs_window *w = &j->op->pooling;
    const fs_pool_source from = {e->row_capacity, e->rows_in_flight, j->height, j->width};
    for (; done < j->out->h; done++) {
        if (pool_span(j->op, done, j->height, w->kh, w->sh, w->ph).end > computed) break;
        fs_lap((uint32_t)(j->out - e->places) - 1);
        fs_pooled maps[PART]; /* most_runs */
        for (uint32_t i = 0; i < c->count * results_of(c); i++) {
            const uint32_t at = i / results_of(c), m = i % results_of(c);
            maps[i].in = c->runs[at].out[m], maps[i].out = result_row(e, j, c, block, at, m, done);
        }
        fs_pool_row(e, j->op, &from, maps, c->count * results_of(c), done, j->out->w);
        fs_lap(FS_TIME_POOL);
    }
    return done;
}

/* Rows y .. y + rows of all runs, columns [first, first + width). */
static void compute_runs(const fs_engine *e, const job *j, const crew *c, uint32_t block, const float *in, uint32_t y,
                         uint32_t rows, uint32_t first, uint32_t width) {
    const int direct = is_direct(e, j);
    fs_rows s = {.in = in, .in_row = (ptrdiff_t)(j->op->window.sh * j->in_row), .rows = rows, .act = j->op->act};
    if (direct) {
        s.out_row = (ptrdiff_t)fs_row_floats(j->out, e->lanes);
        s.out_at = (ptrdiff_t)y * s.out_row + (ptrdiff_t)(first * e->lanes);
    } else {
        const ptrdiff_t row = (ptrdiff_t)e->row_capacity;
        s.out_at = (ptrdiff_t)(y % e->rows_in_flight) * row;
        s.out_row = (ptrdiff_t)((y + 1) % e->rows_in_flight) * row - s.out_at;
    }
    const ptrdiff_t out_at = s.out_at;
    compute_row(e, j, c, &s, width);
    if ((direct || j->op->pool) && j->op->act <= FS_ACT_HARDSWISH) return;
    for (uint32_t i = 0; i < c->count * results_of(c) * rows; i++) {
        const uint32_t at = i / rows / results_of(c), m = i / rows % results_of(c), row = i % rows;
        float *made = c->runs[at].out[m] + out_at + (ptrdiff_t)row * s.out_row;
        fs_activate(e, j->op, made, (size_t)width * e->lanes);
        if (!direct && !j->op->pool)
            memcpy(result_row(e, j, c, block, at, m, y + row), made, 4 * (size_t)width * e->lanes);
    }
}

/* All rows of one block, columns [first, first + width), of all runs. */
static void compute_columns(fs_engine *e, const job *j, const crew *c, uint32_t block, const float *in, uint32_t first,
                            uint32_t width) {
    const fs_op *op = j->op;
    const uint32_t vector = fs_vector(e->isa);
    const int pairs = vector && (e->lanes % vector == 0 || op->window.sw == 1);
    uint32_t pooled = 0;
    for (uint32_t y = 0, rows; y < j->height; y += rows) {
        uint32_t top = y * op->window.sh;
        rows = pairs && y + 2 <= j->height ? 2 : 1;
        if (is_streamed(e, j)) {
            slide_window(e, j, block, top, fs_reach(op->window.kh, op->dh) + (rows - 1) * op->window.sh);
            top -= e->window_first;
        }
        const float *from = in + top * j->in_row + (size_t)first * op->window.sw * e->lanes;
        compute_runs(e, j, c, block, from, y, rows, first, width);
        if (fs_has(FS_LAYER_POOL) && op->pool) pooled = pool_ready(e, j, c, block, pooled, y + rows);
    }
}

/* Columns that go down the rows before the next do: as many as registers hold (an even number), but at least FEWEST, so
 * few that what they read for two rows stays in the first cache. */
static uint32_t band(const fs_engine *e, const job *j) {
    enum { FEWEST = 4, FIRST_CACHE = 26 * 1024 };
    const fs_op *op = j->op;
    const size_t rows = fs_reach(op->window.kh, op->dh) + op->window.sh, beside = fs_reach(op->window.kw, op->dw) - 1;
    const size_t column = j->in->c / op->groups * rows * e->lanes * sizeof(float);
    uint32_t most = e->isa->band;
    while (most > FEWEST && column * (most * op->window.sw + beside) > FIRST_CACHE) most -= 2;
    return most;
}

/* All rows. Where they go straight to their tensor, a band of columns is computed from top to bottom before the next:
 * its input rows then stay in the first cache from pair to pair. */
static void compute_rows(fs_engine *e, const job *j, const crew *c, uint32_t block, const float *in) {
    const int banded = is_direct(e, j) && !is_streamed(e, j) && fs_is_wide(e);
    const uint32_t most = banded ? band(e, j) : j->width, bands = (j->width + most - 1) / most;
    for (uint32_t b = 0, first = 0, end; b < bands; b++, first = end) {
        end = (uint32_t)fs_even_cut(j->width, bands, b + 1);
        compute_columns(e, j, c, block, in, first, end - first);
    }
}

/* A result of a single position (a linear layer): the blocks of the batch are its row. */
static void compute_blocks(const fs_engine *e, const job *j, const crew *c, const float *in) {
    const fs_isa *isa = e->isa;
    const uint32_t lanes = e->lanes, vector = fs_vector(isa), blocks = j->batch->blocks;
    const ptrdiff_t step = (ptrdiff_t)e->block_floats;
    fs_rows s = {.in = in, .rows = 1, .act = j->op->act, .in_step = step, .out_step = step, .n = blocks};
    if (vector && lanes % vector == 0)
        for (uint32_t l = 0; l < lanes; l += vector, s.in += vector, s.out_at += vector)
            (results_of(c) == PART ? isa->run4 : isa->run1)(&s, c->runs, c->count);
    else if (lanes == 1) isa->scalar(&s, c->runs);
    else {
        s.in_step = s.out_step = 1, s.n = lanes;
        for (uint32_t b = 0; b < blocks; b++, s.in += step, s.out_at += step) isa->scalar(&s, c->runs);
    }
    for (uint32_t i = 0; i < c->count * results_of(c); i++)
        for (uint32_t b = 0; b < blocks; b++)
            fs_activate(e, j->op, c->runs[i / results_of(c)].out[i % results_of(c)] + b * e->block_floats, lanes);
}

/* Everything that the crew's tap lists give: all blocks, or the one that is streamed. */
static void compute(fs_engine *e, const job *j, crew *c, uint32_t block) {
    const size_t in_group = j->origin + (size_t)c->group * (j->in->c / j->op->groups) * j->in_channel;
    const int streamed = is_streamed(e, j), single = !streamed && j->height == 1 && j->width == 1 && !j->op->pool;
    const uint32_t end = streamed || single ? block + 1 : j->batch->blocks;
    for (uint32_t b = block; b < end; b++) {
        const float *in = (streamed ? e->window : fs_tensor(e, j->in, c->directions[0], b)) + in_group;
        for (uint32_t i = 0; i < c->count * results_of(c); i++) {
            const uint32_t at = i / results_of(c), m = i % results_of(c);
            c->runs[at].out[m] = single || is_direct(e, j) ? result_row(e, j, c, b, at, m, 0) : row_in_flight(e, i);
        }
        if (single) compute_blocks(e, j, c, in);
        else compute_rows(e, j, c, b, in);
    }
}

/* What run i computes with, but for its weights. */
static void set_run(fs_engine *e, const job *j, crew *c, uint32_t i, const uint32_t *offsets, uint32_t taps) {
    const fs_run run = {.offsets = offsets, .taps = taps};
    c->runs[i] = run;
    for (uint32_t m = 0; m < results_of(c) && j->op->flags & 1; m++)
        c->runs[i].bias[m] = *fs_parameters(e, c->directions[m], j->bias + c->channels[i][m], 1);
}

/* Most runs that go together: their rows must be in flight together where they are pooled, and their weights in
 * memory. */
static uint32_t most_runs(const fs_engine *e, const job *j, uint32_t results) {
    if (!fs_is_wide(e) || e->noise || is_streamed(e, j)) return 1;
    return j->op->pool ? PART / results : TOGETHER;
}

/* Channels from `channel` on, before `end`, a tap list each; directions four by four where they share the input.
 * Returns how many. */
static uint32_t single_channels(fs_engine *e, job *j, uint32_t group, uint32_t channel, uint32_t end, uint32_t block) {
    const int shared = fs_is_wide(e) && (is_streamed(e, j) || j->in < e->own);
    const uint32_t all = j->batch->directions, most = most_runs(e, j, shared && all >= PART ? PART : 1);
    crew c = {.group = group};
    uint32_t total = 0;
    j->step = fs_is_wide(e) && j->width > 1 && !(shared && all >= PART) ? 4 * j->op->window.sw * e->lanes : 0;
    do {
        fs_run *r = &c.runs[c.count];
        r->taps = list_taps(e, j, channel + c.count++, e->offsets + total, NULL, 0);
        total += r->taps;
    } while (c.count < most && channel + c.count < end && total + j->row <= e->taps_capacity);
    for (uint32_t d = 0; d < all; d += c.results) {
        c.results = shared && d + PART <= all ? PART : 1;
        uint32_t at = 0;
        for (uint32_t m = 0; m < c.results; m++) c.directions[m] = d + m;
        for (uint32_t i = 0; i < c.count; at += c.runs[i++].taps) {
            const uint32_t taps = c.runs[i].taps;
            for (uint32_t m = 0; m < c.results; m++) c.channels[i][m] = channel + i;
            set_run(e, j, &c, i, e->offsets + at, taps);
            c.runs[i].weights =
                c.results == PART ? e->weights + (size_t)PART * at : fs_parameters(e, d, j->weights + at, taps);
        }
        for (uint32_t m = 0; c.results == PART && m < PART; m++) {
            const float *from = fs_parameters(e, d + m, j->weights, total);
            for (uint32_t i = 0; i < total; i++) e->weights[PART * i + m] = from[i];
        }
        compute(e, j, &c, block);
    }
    j->weights += total;
    return c.count;
}

/* Passes over `n` weights of a layer in which all live. */
static void skip_taps(job *j, uint32_t n) {
    j->more = n <= j->walk.left;
    if (j->more) j->walk.index += n, j->walk.left -= n;
}

/* Four rows of weights side by side: the lists of a layer in which all live, which take no slots. */
static void interleave_rows(float *to, const float *from, uint32_t row) {
    for (uint32_t i = 0; i < row; i++)
        for (uint32_t m = 0; m < PART; m++) to[PART * i + m] = from[m * row + i];
}

/* Fours of channels of a nearly dense layer, with zeros where one has no weight. Returns how many channels. */
static uint32_t fours_of_channels(fs_engine *e, job *j, uint32_t group, uint32_t channel, uint32_t end) {
    const uint32_t left = (end - channel) / PART, room = e->taps_capacity / j->row, most = most_runs(e, j, PART);
    const uint32_t n = left < most && left < room ? left : most < room ? most : room;
    const int whole = j->op->rice == FS_DENSE;
    crew c = {.count = n, .results = PART, .group = group};
    uint32_t taps = whole ? PART * n * j->row : 0;
    for (uint32_t i = 0; i < PART * n; i++) {
        const uint32_t four = i / PART;
        c.channels[four][i % PART] = channel + i;
        if (!whole) taps += list_taps(e, j, channel + i, NULL, e->slots + taps, four * PART * j->row + i % PART);
    }
    if (whole) skip_taps(j, taps);
    else memset(e->weights, 0, 4 * (size_t)PART * n * j->row);
    for (uint32_t d = 0; d < j->batch->directions; d++) {
        for (uint32_t m = 0; m < PART; m++) c.directions[m] = d;
        for (uint32_t i = 0; i < n; i++) {
            set_run(e, j, &c, i, e->offsets, j->row);
            c.runs[i].weights = e->weights + (size_t)i * PART * j->row;
        }
        const float *from = fs_parameters(e, d, j->weights, taps);
        for (uint32_t i = 0; whole && i < n; i++)
            interleave_rows(e->weights + (size_t)i * PART * j->row, from + (size_t)i * PART * j->row, j->row);
        for (uint32_t t = 0; !whole && t < taps; t++) e->weights[e->slots[t]] = from[t];
        compute(e, j, &c, 0);
    }
    j->weights += taps;
    return PART * n;
}

static void all_channels(fs_engine *e, job *j, uint32_t block) {
    const uint32_t number = (uint32_t)(j->out - e->places) - 1;
    const fs_op *op = j->op;
    const uint32_t per_group = op->channels / op->groups;
    const float density = (float)op->n_weights / ((float)op->channels * (float)j->row);
    const int dense = fs_is_wide(e) && !is_streamed(e, j) && density >= NEARLY_DENSE;
    const uint8_t *structure = fs_structure(&e->program) + e->steps[number].structure;
    j->walk = fs_walk_start(structure, (size_t)(fs_structure_end(&e->program) - structure), op->rice, op->n_weights);
    j->more = fs_walk_next(&j->walk);
    j->weights = e->steps[number].values;
    j->bias = j->weights + op->n_weights;
    if (dense) list_all(e, j);
    for (uint32_t group = 0; group < op->groups; group++) {
        const uint32_t end = (group + 1) * per_group;
        for (uint32_t channel = group * per_group; channel < end;)
            channel += dense && channel + PART <= end ? fours_of_channels(e, j, group, channel, end)
                                                      : single_channels(e, j, group, channel, end, block);
        if (dense && per_group % PART && group + 1 < op->groups) list_all(e, j);
    }
}

void fs_conv(fs_engine *e, uint32_t number, const fs_op *op, const fs_batch *batch) {
    job j = {.op = op, .batch = batch, .in = &e->places[op->a], .out = &e->places[number + 1]};
    const fs_window *w = &op->window;
    fs_size made = {0, j.in->h, j.in->w};
    fs_conv_size(op, &made);
    j.height = made.h, j.width = made.w;
    j.row = j.in->c / op->groups * w->kh * w->kw;
    j.kh = divisor_of(w->kh), j.kw = divisor_of(w->kw);
    if (e->streamed && op->a == 0) {
        j.in_row = e->window_row, j.in_channel = (size_t)e->window_height * e->window_row;
        for (uint32_t b = 0; b < batch->blocks; b++) {
            fs_load_block(e, batch, b);
            fs_lap(FS_TIME_IMAGES);
            all_channels(e, &j, b);
            fs_lap(number);
        }
        return;
    }
    j.in_row = fs_row_floats(j.in, e->lanes), j.in_channel = fs_channel_floats(j.in, e->lanes);
    j.origin = (j.in->border_h - w->ph) * j.in_row + (size_t)(j.in->border_w - w->pw) * e->lanes;
    j.flat = j.in_row == (size_t)w->kw * e->lanes && j.in_channel == w->kh * j.in_row;
    all_channels(e, &j, 0);
}
