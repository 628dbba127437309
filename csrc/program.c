/* Reading and validating a program (docs/format.md). After fs_open has said FS_OK nothing in the program
 * can make the interpreter read or write outside its buffers; everything else may trust it. */
#include "internal.h"

#include <string.h>

enum { HEADER = 32, OP = 40 };
static const uint64_t MOST = (uint64_t)1 << 28; /* weights of a layer, numbers of a tensor */

static uint32_t u16(const uint8_t *p) { return (uint32_t)p[0] | (uint32_t)p[1] << 8; }
static uint32_t u32(const uint8_t *p) { return u16(p) | u16(p + 2) << 16; }
float fs_read_float(const uint8_t *p) {
    const uint32_t bits = u32(p);
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
static int finite32(float x) { return x - x == 0; }

static fs_window window16(const uint8_t *p) {
    fs_window w = {u16(p), u16(p + 2), u16(p + 4), u16(p + 6), u16(p + 8), u16(p + 10)};
    return w;
}
static fs_window window8(const uint8_t *p) {
    fs_window w = {p[0], p[1], p[2], p[3], p[4], p[5]};
    return w;
}

void fs_read_op(const fs_program *program, uint32_t number, fs_op *op) {
    const uint8_t *p = program->bytes + HEADER + 8 * program->channels + OP * number;
    op->kind = p[0], op->act = p[1], op->flags = p[2], op->rice = p[3];
    op->owner = number;
    /* One that shares values has the number of their op where that one has its Rice parameter. */
    if (fs_has(FS_LAYER_SHARED) && op->flags & FS_FLAG_SHARED && op->rice < number) {
        op->owner = op->rice;
        op->rice = (p - OP * (number - op->owner))[3];
    }
    op->a = u16(p + 4), op->b = u16(p + 6);
    op->dh = op->dw = 1;
    if (op->kind == FS_CONV) op->dh += p[6], op->dw += p[7], op->b = 0;
    op->channels = u16(p + 8), op->groups = u16(p + 10);
    op->window = window16(p + 12);
    op->pool = p[24];
    op->pooling = window8(p + 25);
    op->n_weights = u32(p + 32);
    op->number = fs_read_float(p + 36);
}

const uint8_t *fs_structure(const fs_program *program) {
    return program->bytes + HEADER + 8 * program->channels + OP * program->n_ops;
}

#ifndef FS_VECTORS
#define FS_WALK
#include "walk.inl"
#endif

/* How often a window fits; with `ceil` once more, if that one begins before the end of what is not padding. */
static int slide(uint32_t *size, uint32_t kernel, uint32_t stride, uint32_t padding, int ceil) {
    const uint32_t padded = *size + 2 * padding;
    if (!kernel || !stride || padded < kernel) return 0;
    uint32_t out = (padded - kernel) / stride + 1;
    if (ceil && (padded - kernel) % stride && out * stride < *size + padding) out++;
    *size = out;
    return out <= UINT16_MAX; /* a map has at most 65,535 rows and columns */
}

int fs_conv_size(const fs_op *op, fs_size *s) {
    const fs_window *w = &op->window;
    s->c = op->channels;
    return w->kh && w->kw && slide(&s->h, fs_reach(w->kh, op->dh), w->sh, w->ph, 0) &&
           slide(&s->w, fs_reach(w->kw, op->dw), w->sw, w->pw, 0);
}

int fs_pool_size(const fs_op *op, fs_size *s) {
    const fs_window *w = &op->pooling;
    if (fs_has(FS_LAYER_ADAPTIVE_POOL) && op->pool == FS_POOL_ADAPTIVE) {
        /* A window is at most this high, and 255 rows are what pooling takes at a time. */
        const int fits = w->kh && w->kw && s->h / w->kh + 2 <= UINT8_MAX;
        s->h = w->kh, s->w = w->kw;
        return fits;
    }
    const int ceil = fs_has(FS_LAYER_CEIL_MODE) && op->flags & FS_FLAG_CEIL;
    return slide(&s->h, w->kh, w->sh, w->ph, ceil) && slide(&s->w, w->kw, w->sw, w->pw, ceil);
}

static int zero(const uint8_t *p, size_t n) {
    for (size_t i = 0; i < n; i++)
        if (p[i]) return 0;
    return 1;
}

/* The structure of one conv: ascending, inside the layer, ending on its byte. Also the fullest row. */
static int check_structure(fs_program *program, const fs_op *op, uint64_t row, uint64_t total, size_t *at, size_t size) {
    const uint8_t *bytes = fs_structure(program) + *at;
    if (op->rice == FS_DENSE) {
        if (row > program->max_taps) program->max_taps = (uint32_t)row;
        return 1;
    }
    fs_walk walk = fs_walk_start(bytes, size - *at, op->rice, op->n_weights);
    uint64_t row_end = row;
    uint32_t taps = 0;
    while (fs_walk_next(&walk)) {
        if ((uint64_t)walk.index >= total) return 0;
        if ((uint64_t)walk.index >= row_end) {
            row_end = ((uint64_t)walk.index / row + 1) * row;
            taps = 0;
        }
        if (++taps > program->max_taps) program->max_taps = taps;
    }
    if (walk.left) return 0;
    /* Whole bytes that were taken but not needed go back; what is left of the last must be zeros. */
    const size_t unused = walk.have / 8;
    if (walk.bits & ((1u << walk.have % 8) - 1)) return 0;
    *at += (size_t)(walk.next - bytes) - unused;
    return 1;
}

static int fits(const fs_size *s, const fs_window *padding) {
    return (uint64_t)s->c * (s->h + 2 * padding->ph) <= MOST &&
           (uint64_t)s->c * (s->h + 2 * padding->ph) * (s->w + 2 * padding->pw) <= MOST;
}

static int check_pool(const fs_op *op, fs_size *s) {
    const fs_window *w = &op->pooling;
    const int adaptive = op->pool == FS_POOL_ADAPTIVE;
    if (op->pool > FS_POOL_ADAPTIVE || 2 * w->ph > w->kh || 2 * w->pw > w->kw) return 0;
    if ((adaptive || !op->pool) && (op->flags & FS_FLAG_CEIL || w->sh | w->sw | w->ph | w->pw)) return 0;
    if (op->pool == FS_POOL_NONE) return !(w->kh | w->kw);
    const fs_window none = {0};
    return fs_pool_size(op, s) && fits(s, &none);
}

/* Values that an earlier op has: of the same kind and shape, and its own. */
static int check_owner(const fs_program *program, const fs_op *op, uint32_t number, const fs_size *sizes) {
    if (!(op->flags & FS_FLAG_SHARED)) return 1;
    if (op->owner == number) return 0;
    fs_op owner;
    fs_read_op(program, op->owner, &owner);
    return owner.kind == op->kind && (owner.flags & 3) == (op->flags & FS_FLAG_PARAMETERS) && owner.channels == op->channels &&
           owner.groups == op->groups && owner.n_weights == op->n_weights && owner.window.kh == op->window.kh &&
           owner.window.kw == op->window.kw && sizes[owner.a].c == sizes[op->a].c;
}

static fs_status check_conv(fs_program *program, const fs_op *op, fs_size *s, size_t *at, size_t size, uint64_t *live) {
    const fs_window *w = &op->window;
    if (!op->channels || !op->groups) return FS_BAD_OP;
    if (op->rice > 15 && op->rice != FS_DENSE) return FS_BAD_OP;
    if (s->c % op->groups || op->channels % op->groups || !fits(s, w)) return FS_BAD_OP;
    uint64_t row = (uint64_t)(s->c / op->groups) * w->kh;
    if (row > MOST || (row *= w->kw) > MOST || row * op->channels > MOST) return FS_BAD_OP;
    if (!fs_conv_size(op, s)) return FS_BAD_OP;
    uint64_t total = row * op->channels;
    if (op->n_weights > total || (op->rice == FS_DENSE && op->n_weights != total)) return FS_BAD_OP;
    program->macs += (uint64_t)op->n_weights * s->h * s->w;
    if (!(op->flags & FS_FLAG_SHARED)) {
        if (!check_structure(program, op, row, total, at, size)) return FS_BAD_STRUCTURE;
        if (row > program->max_row) program->max_row = (uint32_t)row;
        *live += op->n_weights + (op->flags & FS_FLAG_PARAMETERS ? op->channels : 0);
    }
    const fs_window none = {0};
    return fits(s, &none) && check_pool(op, s) ? FS_OK : FS_BAD_OP;
}

/* The fields that an op does not use are zero, and version 1 knows fewer ops. */
static int check_fields(const fs_program *program, const fs_op *op, const uint8_t *record) {
    static const uint8_t flags[] = {[FS_CONV] = 7, [FS_POOL] = FS_FLAG_CEIL, [FS_NORM] = 3, [FS_PAD] = 0};
    if (!op->kind || op->kind > FS_PAD || op->act > FS_ACT_GELU_TANH) return 0;
    if (op->flags & ~flags[op->kind] || record[31]) return 0;
    if (u16(program->bytes + 4) == 1) {
        const int dilated = op->kind == FS_CONV && u16(record + 6);
        if (op->kind > FS_ACT || op->act > FS_ACT_HARDSWISH || op->pool > FS_POOL_INSIDE || op->flags > 1 || dilated)
            return 0;
    }
    if (op->act == FS_ACT_LEAKY_RELU ? op->kind == FS_NORM || !finite32(op->number)
                                     : op->kind != FS_NORM && !zero(record + 36, 4))
        return 0;
    if (op->kind == FS_CONV) return 1;
    if (op->rice || op->channels || op->n_weights || (op->b && !fs_reads_two(op))) return 0;
    if (!zero(record + 12, op->kind == FS_PAD ? 0 : 8) || !zero(record + 20, 4)) return 0;
    if (op->kind == FS_POOL ? !op->pool : !zero(record + 24, 7)) return 0;
    if (op->kind != FS_NORM && op->groups) return 0;
    return !op->act || (op->kind != FS_POOL && op->kind < FS_CAT);
}

/* Whether an op needs a layer that this build lacks; a build with all of them has no code for the question. */
static int is_left_out(const fs_op *op) {
    const uint32_t acts = (1u << (FS_ACT_GELU_TANH + 1)) - 1;
    return (!fs_has(acts) && !fs_has(1u << op->act)) || (!fs_has(FS_LAYER_ADD) && op->kind == FS_ADD) ||
           (!fs_has(FS_LAYER_MUL) && op->kind == FS_MUL) || (!fs_has(FS_LAYER_CAT) && op->kind == FS_CAT) ||
           (!fs_has(FS_LAYER_PAD) && op->kind == FS_PAD) || (!fs_has(FS_LAYER_POOL) && op->pool) ||
           (!fs_has(FS_LAYER_CEIL_MODE) && op->flags & FS_FLAG_CEIL) ||
           (!fs_has(FS_LAYER_ADAPTIVE_POOL) && op->pool == FS_POOL_ADAPTIVE) ||
           (!fs_has(FS_LAYER_BATCH_NORM) && op->kind == FS_NORM && !op->groups) ||
           (!fs_has(FS_LAYER_GROUP_NORM) && op->kind == FS_NORM && op->groups) ||
           (!fs_has(FS_LAYER_SHARED) && op->flags & FS_FLAG_SHARED);
}

static fs_status check_op(fs_program *program, uint32_t number, fs_size *sizes, size_t *at, size_t size, uint64_t *live,
                          uint64_t *stats) {
    fs_op op;
    fs_read_op(program, number, &op);
    const uint8_t *record = program->bytes + HEADER + 8 * program->channels + OP * number;
    if (op.a > number || op.b > number || !check_fields(program, &op, record)) return FS_BAD_OP;
    if (is_left_out(&op)) return FS_LEFT_OUT;
    if (fs_has(FS_LAYER_SHARED) && !check_owner(program, &op, number, sizes)) return FS_BAD_OP;
    fs_size s = sizes[op.a];
    const fs_size *second = &sizes[op.b];
    const fs_window *w = &op.window, none = {0};
    int holds = 1;
    switch (op.kind) {
    case FS_CONV: {
        const fs_status status = check_conv(program, &op, &s, at, size, live);
        if (status) return status;
        break;
    }
    case FS_POOL:
        holds = check_pool(&op, &s);
        break;
    case FS_NORM:
        holds = op.number > 0 && finite32(op.number) && !(op.groups && s.c % op.groups);
        if (!(op.flags & FS_FLAG_SHARED)) *live += op.flags & FS_FLAG_PARAMETERS ? 2 * (uint64_t)s.c : 0;
        else if (!op.groups || !(op.flags & FS_FLAG_PARAMETERS)) return FS_BAD_OP;
        *stats += op.groups ? 0 : 2 * (uint64_t)s.c;
        break;
    case FS_ADD:
    case FS_MUL:
        holds = second->c == s.c && ((second->h == s.h && second->w == s.w) ||
                                     (op.kind == FS_MUL && second->h == 1 && second->w == 1));
        break;
    case FS_CAT:
        holds = second->h == s.h && second->w == s.w;
        s.c += second->c;
        break;
    case FS_PAD:
        s.h += w->kh + w->sh, s.w += w->kw + w->sw;
        break;
    }
    sizes[number + 1] = s;
    return holds && s.c <= UINT16_MAX && s.h <= UINT16_MAX && s.w <= UINT16_MAX && fits(&s, &none) ? FS_OK : FS_BAD_OP;
}

static fs_status check_header(fs_program *program, size_t *structure) {
    const uint8_t *p = program->bytes;
    if (program->size < HEADER) return FS_BAD_SIZE;
    if (memcmp(p, "FSPP", 4)) return FS_BAD_MAGIC;
    if (u16(p + 4) > 2) return FS_BAD_VERSION;
    program->n_ops = u16(p + 6);
    program->channels = u16(p + 8), program->height = u16(p + 10), program->width = u16(p + 12);
    program->classes = u16(p + 14);
    program->n_live = u32(p + 16), program->n_stats = u32(p + 20);
    *structure = u32(p + 24);
    if (!u16(p + 4) || !zero(p + 28, 4) || !program->n_ops || program->n_ops > FS_MAX_OPS) return FS_BAD_HEADER;
    if (!program->channels || program->channels > 64 || !program->height || !program->width) return FS_BAD_HEADER;
    if (!program->classes || program->classes > 256) return FS_BAD_HEADER;
    if ((uint64_t)HEADER + 8 * program->channels + OP * program->n_ops + *structure != program->size) return FS_BAD_SIZE;
    for (uint32_t i = 0; i < 2 * program->channels; i++)
        if (!finite32(fs_read_float(p + HEADER + 4 * i))) return FS_BAD_HEADER;
    const fs_size image = {program->channels, program->height, program->width};
    const fs_window none = {0};
    return fits(&image, &none) ? FS_OK : FS_BAD_HEADER;
}

fs_status fs_open(fs_program *program, const void *bytes, size_t size) {
    memset(program, 0, sizeof *program);
    program->bytes = bytes, program->size = size;
    size_t structure, at = 0;
    fs_status status = check_header(program, &structure);
    if (status) return status;
    fs_size sizes[FS_MAX_OPS + 1] = {{program->channels, program->height, program->width}};
    uint64_t live = 0, stats = 0;
    for (uint32_t i = 0; i < program->n_ops; i++) {
        program->where = i;
        if ((status = check_op(program, i, sizes, &at, structure, &live, &stats))) return status;
    }
    const fs_size *last = &sizes[program->n_ops];
    if (last->c != program->classes || last->h != 1 || last->w != 1) return FS_BAD_OP;
    if (at != structure) return FS_BAD_STRUCTURE;
    if (live != program->n_live || stats != program->n_stats) return FS_BAD_HEADER;
    return FS_OK;
}
