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
    op->a = u16(p + 4), op->b = u16(p + 6);
    op->channels = u16(p + 8), op->groups = u16(p + 10);
    op->window = window16(p + 12);
    op->pool = p[24];
    op->pooling = window8(p + 25);
    op->n_weights = u32(p + 32);
    op->eps = fs_read_float(p + 36);
}

const uint8_t *fs_structure(const fs_program *program) {
    return program->bytes + HEADER + 8 * program->channels + OP * program->n_ops;
}

int fs_slide(uint32_t size, uint32_t kernel, uint32_t stride, uint32_t padding, uint32_t *out) {
    if (!kernel || !stride || size + 2 * padding < kernel) return 0;
    *out = (size + 2 * padding - kernel) / stride + 1;
    return 1;
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

/* A map after a window has slid over it; a map has at most 65,535 rows and columns. */
static int slide(fs_size *s, const fs_window *w) {
    return fs_slide(s->h, w->kh, w->sh, w->ph, &s->h) && fs_slide(s->w, w->kw, w->sw, w->pw, &s->w) &&
           s->h <= UINT16_MAX && s->w <= UINT16_MAX;
}

static int fits(const fs_size *s, const fs_window *padding) {
    return (uint64_t)s->c * (s->h + 2 * padding->ph) <= MOST &&
           (uint64_t)s->c * (s->h + 2 * padding->ph) * (s->w + 2 * padding->pw) <= MOST;
}

static int check_pool(const fs_op *op, fs_size *s) {
    const fs_window *w = &op->pooling;
    if (op->pool > FS_POOL_INSIDE || 2 * w->ph > w->kh || 2 * w->pw > w->kw) return 0;
    if (op->pool == FS_POOL_NONE) return !(w->kh | w->kw | w->sh | w->sw | w->ph | w->pw);
    const fs_window none = {0};
    return slide(s, w) && fits(s, &none);
}

static fs_status check_conv(fs_program *program, const fs_op *op, fs_size *s, size_t *at, size_t size, uint64_t *live) {
    const fs_window *w = &op->window;
    if (op->b || !op->channels || !op->groups) return FS_BAD_OP;
    if (op->rice > 15 && op->rice != FS_DENSE) return FS_BAD_OP;
    if (s->c % op->groups || op->channels % op->groups || !fits(s, w)) return FS_BAD_OP;
    uint64_t row = (uint64_t)(s->c / op->groups) * w->kh;
    if (row > MOST || (row *= w->kw) > MOST || row * op->channels > MOST) return FS_BAD_OP;
    if (!slide(s, w)) return FS_BAD_OP;
    uint64_t total = row * op->channels;
    if (op->n_weights > total || (op->rice == FS_DENSE && op->n_weights != total)) return FS_BAD_OP;
    if (!check_structure(program, op, row, total, at, size)) return FS_BAD_STRUCTURE;
    if (row > program->max_row) program->max_row = (uint32_t)row;
    program->macs += (uint64_t)op->n_weights * s->h * s->w;
    *live += op->n_weights + (op->flags & 1 ? op->channels : 0);
    s->c = op->channels;
    const fs_window none = {0};
    return fits(s, &none) && check_pool(op, s) ? FS_OK : FS_BAD_OP;
}

static fs_status check_op(fs_program *program, uint32_t number, fs_size *sizes, size_t *at, size_t size, uint64_t *live,
                          uint64_t *stats) {
    fs_op op;
    fs_read_op(program, number, &op);
    const uint8_t *record = program->bytes + HEADER + 8 * program->channels + OP * number;
    if (op.a > number || op.b > number || op.act > FS_ACT_HARDSWISH || op.flags > 1 || record[31]) return FS_BAD_OP;
    if (op.kind != FS_NORM && !zero(record + 36, 4)) return FS_BAD_OP;
    fs_size s = sizes[op.a];
    if (op.kind == FS_CONV) {
        fs_status status = check_conv(program, &op, &s, at, size, live);
        sizes[number + 1] = s;
        return status;
    }
    if (op.rice || op.channels || !zero(record + 12, 12) || op.n_weights) return FS_BAD_OP;
    if (op.kind != FS_POOL && !zero(record + 24, 7)) return FS_BAD_OP;
    if (op.kind != FS_NORM && (op.groups || op.flags)) return FS_BAD_OP;
    if (op.kind != FS_ADD && op.b) return FS_BAD_OP;
    switch (op.kind) {
    case FS_POOL:
        if (op.act || op.pool == FS_POOL_NONE || !check_pool(&op, &s)) return FS_BAD_OP;
        break;
    case FS_NORM:
        if (!(op.eps > 0) || !finite32(op.eps) || (op.groups && s.c % op.groups)) return FS_BAD_OP;
        *live += op.flags & 1 ? 2 * (uint64_t)s.c : 0;
        *stats += op.groups ? 0 : 2 * (uint64_t)s.c;
        break;
    case FS_ADD:
        if (sizes[op.b].c != s.c || sizes[op.b].h != s.h || sizes[op.b].w != s.w) return FS_BAD_OP;
        break;
    case FS_ACT:
        break;
    default:
        return FS_BAD_OP;
    }
    sizes[number + 1] = s;
    return FS_OK;
}

static fs_status check_header(fs_program *program, size_t *structure) {
    const uint8_t *p = program->bytes;
    if (program->size < HEADER) return FS_BAD_SIZE;
    if (memcmp(p, "FSPP", 4)) return FS_BAD_MAGIC;
    if (u16(p + 4) > 1) return FS_BAD_VERSION;
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
