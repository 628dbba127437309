/* Planning: where every tensor lies, by liveness, and how many bytes that takes. */
#include "engine.h"

#include <string.h>

/* Sizes of the arena's parts, in bytes, and what the engine must know to find them. */
typedef struct {
    fs_place places[FS_MAX_OPS + 1];
    fs_step steps[FS_MAX_OPS];
    const fs_isa *isa;
    uint16_t root[FS_MAX_OPS + 1], born[FS_MAX_OPS + 1], dies[FS_MAX_OPS + 1];
    uint32_t lanes, blocks, streamed, wide;
    uint32_t row_capacity, rows_in_flight, window_height, window_row, taps_capacity;
    uint64_t block_floats;
    uint64_t taps, slots, weights, row_values, perturbed, rows, window, pixels, activations;
} draft;

enum { TAPS = 2048 }; /* with their weights they leave room in a first cache of 32 KB */

static uint64_t align(uint64_t bytes) { return (bytes + FS_ALIGN - 1) / FS_ALIGN * FS_ALIGN; }
static uint32_t larger(uint32_t a, uint32_t b) { return a > b ? a : b; }

/* The image is streamed when only op 0 reads it, and that is a conv. */
static uint32_t is_streamed(const fs_program *program) {
    fs_op op;
    for (uint32_t i = 0; i < program->n_ops; i++) {
        fs_read_op(program, i, &op);
        if (i ? op.a == 0 || (fs_reads_two(&op) && op.b == 0) : op.kind != FS_CONV) return 0;
    }
    return 1;
}

/* Where op i may work in place: the tensor that it reads for the last time, if it makes one of that size; n if nowhere. */
static uint32_t find_host(const draft *d, const fs_op *op, uint32_t i, uint32_t n) {
    const fs_place *a = &d->places[op->a], *b = &d->places[op->b];
    if (op->pool || op->kind == FS_CONV || op->kind >= FS_CAT) return n;
    if (d->dies[op->a] == i) return op->a;
    return fs_reads_two(op) && d->dies[op->b] == i && a->h == b->h && a->w == b->w ? op->b : n;
}

static uint32_t structure_bytes(const fs_program *program, const fs_op *op, uint32_t at) {
    const uint8_t *bytes = fs_structure(program) + at;
    if (op->rice == FS_DENSE) return 0;
    fs_walk walk = fs_walk_start(bytes, (size_t)(fs_structure_end(program) - bytes), op->rice, op->n_weights);
    while (fs_walk_next(&walk)) {}
    return (uint32_t)(walk.next - bytes) - walk.have / 8;
}

/* When tensors are made, and read for the last time. */
static void draft_lives(const fs_program *program, draft *d) {
    const uint32_t n = program->n_ops;
    fs_op op;
    for (uint32_t t = 0; t <= n; t++) d->dies[t] = d->born[t] = (uint16_t)(t ? t - 1 : 0);
    d->dies[n] = (uint16_t)n;
    for (uint32_t i = 0; i < n; i++) {
        fs_read_op(program, i, &op);
        if (op.a < n) d->dies[op.a] = (uint16_t)i;
        if (fs_reads_two(&op) && op.b < n) d->dies[op.b] = (uint16_t)i;
    }
}

/* Whether a range begins among these values. Nothing comes before value 0 that would be worth keeping. */
static int is_start(const fs_config *config, uint32_t at, uint32_t values) {
    for (uint32_t k = 0; at && k < config->n_keep; k++)
        if (at <= config->keep[k] && config->keep[k] < at + values) return 1;
    return 0;
}

/* What op i and those behind it read of what was made before lives to the end of n ops: nobody then works in place on
 * it, or takes its place. */
static void keep_tensors(draft *d, uint32_t i, uint32_t n) {
    d->places[i + 1].start = 1;
    for (uint32_t t = 0; t <= i; t++)
        if (d->dies[t] >= i) d->dies[t] = (uint16_t)n;
}

/* Shapes, borders, what is kept, and who works in place on whom. */
static void draft_tensors(const fs_program *program, const fs_config *config, draft *d) {
    const uint32_t n = program->n_ops;
    fs_step at = {0, 0, 0};
    fs_op op;
    d->places[0].c = (uint16_t)program->channels;
    d->places[0].h = (uint16_t)program->height, d->places[0].w = (uint16_t)program->width;
    d->places[0].fresh = 1, d->root[0] = 0;
    for (uint32_t i = 0; i < n; i++) {
        fs_read_op(program, i, &op);
        fs_size s = {d->places[op.a].c, d->places[op.a].h, d->places[op.a].w};
        const int own = !fs_has(FS_LAYER_SHARED) || op.owner == i;
        const uint32_t values = own ? fs_op_values(&op, s.c) : 0;
        d->steps[i] = own ? at : d->steps[op.owner];
        if (is_start(config, at.values, values)) keep_tensors(d, i, n);
        at.values += values;
        d->root[i + 1] = (uint16_t)(i + 1);
        if (op.kind == FS_CONV) {
            if (own) at.structure += structure_bytes(program, &op, at.structure);
            fs_place *in = &d->places[d->root[op.a]];
            in->border_h = (uint16_t)larger(in->border_h, op.window.ph);
            in->border_w = (uint16_t)larger(in->border_w, op.window.pw);
            fs_conv_size(&op, &s);
        } else if (op.kind == FS_NORM && own) {
            at.stats += op.groups ? 0 : 2 * s.c;
        } else if (fs_has(FS_LAYER_CAT) && op.kind == FS_CAT) {
            s.c += d->places[op.b].c;
        } else if (fs_has(FS_LAYER_PAD) && op.kind == FS_PAD) {
            s.h += op.window.kh + op.window.sh, s.w += op.window.kw + op.window.sw;
        }
        if (fs_has(FS_LAYER_POOL) && op.pool) fs_pool_size(&op, &s);
        const uint32_t host = find_host(d, &op, i, n);
        if (host < n && (host || !d->streamed)) d->root[i + 1] = d->root[host];
        fs_place *p = &d->places[i + 1];
        p->c = (uint16_t)s.c, p->h = (uint16_t)s.h, p->w = (uint16_t)s.w;
        p->fresh = d->root[i + 1] == i + 1;
    }
    /* A root lives as long as anyone who works in its place. */
    for (uint32_t t = 0; t <= n; t++)
        if (d->dies[t] > d->dies[d->root[t]]) d->dies[d->root[t]] = d->dies[t];
}

/* First fit, in order of birth: the lowest offset where no tensor that lives at the same time lies. */
static int place_tensors(const fs_program *program, draft *d) {
    uint64_t top = 0;
    for (uint32_t t = d->streamed; t <= program->n_ops; t++) {
        fs_place *p = &d->places[t];
        if (d->root[t] != t) {
            const fs_place *host = &d->places[d->root[t]];
            p->offset = host->offset, p->border_h = host->border_h, p->border_w = host->border_w;
            continue;
        }
        const uint64_t size = fs_place_positions(p);
        uint64_t offset = 0;
        for (uint32_t other = d->streamed; other < t; other++) {
            const fs_place *q = &d->places[other];
            if (d->root[other] != other || d->dies[other] < d->born[t] || d->dies[t] < d->born[other]) continue;
            if (offset < q->offset + fs_place_positions(q) && q->offset < offset + size) {
                offset = q->offset + fs_place_positions(q);
                other = d->streamed - 1; /* it may now meet one that was passed: look at all again */
            }
        }
        if (offset + size > UINT32_MAX / (4 * FS_MAX_LANES)) return 0; /* offsets of taps are 32 bits */
        p->offset = (uint32_t)offset;
        if (offset + size > top) top = offset + size;
    }
    d->block_floats = align(4 * top * d->lanes) / 4;
    return 1;
}

/* Rows in flight, the window on the image, tap lists. */
static void draft_buffers(const fs_program *program, const fs_config *config, draft *d) {
    uint32_t in_flight = 2, widest = 0, weights = 0;
    fs_op op;
    for (uint32_t i = 0; i < program->n_ops; i++) {
        fs_read_op(program, i, &op);
        if (op.kind != FS_CONV) continue;
        fs_size made = {0, d->places[op.a].h, d->places[op.a].w};
        fs_conv_size(&op, &made);
        widest = larger(widest, made.w);
        weights = larger(weights, op.n_weights);
        const int adaptive = fs_has(FS_LAYER_ADAPTIVE_POOL) && op.pool == FS_POOL_ADAPTIVE;
        const uint32_t high = adaptive ? made.h / op.pooling.kh + 2 : op.pooling.kh;
        if (op.pool) in_flight = larger(in_flight, high + 1); /* rows come in pairs */
        if (i == 0 && d->streamed) {
            const uint32_t height = program->height + 2 * op.window.ph;
            /* A few rows more than the kernel (two results at least), so that they seldom move. */
            const uint32_t lean = fs_reach(op.window.kh, op.dh) + larger(op.window.sh, 3);
            d->window_height = d->lanes > 1 || height < lean ? height : lean;
            d->window_row = (program->width + 2 * op.window.pw) * d->lanes;
        }
    }
    const uint64_t results = d->wide ? 4 : 1;
    d->row_capacity = (widest * d->lanes + FS_MAX_LANES - 1) / FS_MAX_LANES * FS_MAX_LANES;
    d->rows_in_flight = in_flight;
    d->rows = align(4 * results * in_flight * (uint64_t)d->row_capacity);
    d->window = align(4ull * program->channels * d->window_height * d->window_row);
    d->pixels = d->lanes > 1 ? align((uint64_t)program->channels * program->height * program->width * d->lanes) : 0;
    /* One list, or those of several channels that go down the rows together. */
    d->taps_capacity = d->wide ? larger(program->max_row, weights < TAPS ? weights : TAPS) : program->max_taps;
    d->taps = align(4ull * d->taps_capacity);
    d->slots = d->weights = d->wide ? align(16ull * d->taps_capacity) : 0;
    d->row_values = config->by_row ? align(4ull * results * larger(program->max_taps, 1)) : 0;
    d->perturbed = config->by_row ? 0 : config->directions * align(4ull * program->n_live);
    /* Vectors may read, never use, up to a vector beyond the last row. */
    d->activations = 4 * d->block_floats * d->blocks * config->directions + 4 * FS_MAX_LANES;
}

static const fs_isa *choose_isa(const fs_config *config) {
    const fs_isa *best = fs_find_isa(config->isa);
#if defined(__x86_64__)
    /* Eight images fill AVX2's vectors. AVX-512 would take them one by one: four times as long for a ResNet-20. */
    const uint32_t together = config->lanes ? config->lanes : config->batch;
    if (config->isa == FS_BEST && best == &fs_avx512 && together >= fs_avx2.width && together < best->width)
        return &fs_avx2;
#endif
    return best;
}

static fs_status make_draft(const fs_program *program, const fs_config *config, draft *d) {
    if (!config->batch || config->batch > 1u << 20 || !config->directions || config->directions > 1u << 12)
        return FS_BAD_CONFIG;
    const fs_isa *isa = choose_isa(config);
    if (!isa) return FS_BAD_CONFIG;
    /* As many as a vector has: maps are then as small as they can be, and stay in the caches. */
    const uint32_t vector = fs_vector(isa), wide = vector ? vector : FS_MAX_LANES;
    const uint32_t lanes = config->lanes ? config->lanes : config->batch < wide ? 1 : wide;
    if (lanes > FS_MAX_LANES || lanes & (lanes - 1)) return FS_BAD_CONFIG;
    if (config->by_row > 1 || (config->by_row && config->directions != 1)) return FS_BAD_CONFIG;
    memset(d, 0, sizeof *d);
    d->isa = isa, d->lanes = lanes;
    d->blocks = (config->batch + lanes - 1) / lanes;
    d->wide = vector && lanes >= vector;
    d->streamed = is_streamed(program);
    draft_lives(program, d);
    draft_tensors(program, config, d);
    if (!place_tensors(program, d)) return FS_BAD_CONFIG;
    draft_buffers(program, config, d);
    if (d->window > INT32_MAX) return FS_BAD_CONFIG; /* likewise */
    return FS_OK;
}

static uint64_t bookkeeping(const fs_program *program, const draft *d) {
    return align(sizeof(fs_engine)) + align(sizeof(fs_place) * (program->n_ops + 1)) +
           align(sizeof(fs_step) * program->n_ops) + d->taps + d->slots + d->weights + d->row_values;
}

static fs_status fill_plan(const fs_program *program, const draft *d, fs_plan *plan) {
    const uint64_t activations = d->rows + d->activations, input = d->window + d->pixels;
    const uint64_t total = bookkeeping(program, d) + d->perturbed + activations + input;
    if (total > SIZE_MAX / 2) return FS_BAD_CONFIG;
    plan->bookkeeping = (size_t)bookkeeping(program, d);
    plan->perturbed = (size_t)d->perturbed;
    plan->activations = (size_t)activations;
    plan->input = (size_t)input;
    plan->arena = (size_t)total;
    plan->lanes = d->lanes;
    return FS_OK;
}

fs_status fs_make_plan(const fs_program *program, const fs_config *config, fs_plan *plan) {
    draft d;
    const fs_status status = make_draft(program, config, &d);
    return status ? status : fill_plan(program, &d, plan);
}

static void *take(uint8_t **at, uint64_t bytes) {
    void *here = *at;
    *at += align(bytes);
    return here;
}

fs_status fs_start(fs_engine **engine, const fs_program *program, const fs_config *config, void *arena, size_t bytes) {
    draft d;
    fs_plan plan;
    fs_status status = make_draft(program, config, &d);
    if (status || (status = fill_plan(program, &d, &plan))) return status;
    if (bytes < plan.arena || (uintptr_t)arena % FS_ALIGN) return FS_SMALL_ARENA;
    uint8_t *at = arena;
    fs_engine *e = take(&at, sizeof *e);
    memset(e, 0, sizeof *e);
    e->program = *program, e->isa = d.isa;
    e->batch = config->batch, e->directions = config->directions, e->by_row = config->by_row;
    e->lanes = d.lanes, e->blocks = d.blocks, e->streamed = d.streamed;
    e->row_capacity = d.row_capacity, e->rows_in_flight = d.rows_in_flight;
    e->window_height = d.window_height, e->window_row = d.window_row;
    e->block_floats = (size_t)d.block_floats;
    e->places = take(&at, sizeof(fs_place) * (program->n_ops + 1));
    e->steps = take(&at, sizeof(fs_step) * program->n_ops);
    memcpy(e->places, d.places, sizeof(fs_place) * (program->n_ops + 1));
    memcpy(e->steps, d.steps, sizeof(fs_step) * program->n_ops);
    e->offsets = take(&at, d.taps), e->taps_capacity = d.taps_capacity;
    e->slots = take(&at, d.slots);
    e->weights = take(&at, d.weights);
    e->row_values = take(&at, d.row_values);
    e->perturbed = take(&at, d.perturbed);
    e->rows = take(&at, d.rows);
    e->window = take(&at, d.window);
    e->pixels = take(&at, d.pixels);
    e->activations = (float *)at;
    e->arena_bytes = plan.arena;
    e->high_water = (size_t)(at - (uint8_t *)arena);
    *engine = e;
    return FS_OK;
}

size_t fs_high_water(const fs_engine *engine) { return engine->high_water; }
