/* The engine's inside: what plan.c lays out and run.c walks. */
#ifndef FORESEED_ENGINE_H
#define FORESEED_ENGINE_H

#include "internal.h"

#ifdef FS_TIMED /* the package's own build, for `foreseed bench engine --layers` */
#include "host/clock.h"
#else
#define fs_lap(what) ((void)0)
#endif

/* Where a tensor lies: `offset` is in positions from the start of a block's activations (times lanes =
 * floats). A tensor that a padded conv reads carries its own border of zeros, so that no kernel ever
 * asks whether it is inside. Layout: [channel][row][column][lane]. */
typedef struct {
    uint32_t offset;
    uint16_t c, h, w;
    uint16_t border_h, border_w;
    uint8_t fresh; /* 1: this op's own place; 0: it works in place on its input's */
    uint8_t start; /* 1: a run may begin at this op: what it and those behind it read of earlier ones is kept */
} fs_place;

/* Where an op's numbers begin. */
typedef struct {
    uint32_t values, stats, structure;
} fs_step;

struct fs_engine {
    fs_program program;
    const fs_isa *isa;
    uint32_t batch, directions, by_row; /* as in fs_config */
    uint32_t lanes, blocks;
    uint32_t streamed; /* 1: only op 0, a conv, reads the image: rows are made on the fly */
    uint32_t row_capacity, rows_in_flight;
    uint32_t window_height, window_row; /* rows held of the image, and floats of one */
    size_t block_floats;                /* activations of one block of one direction */
    size_t high_water, arena_bytes;
    fs_place *places; /* n_ops + 1 */
    fs_step *steps;   /* n_ops */
    uint32_t *offsets; /* tap lists */
    uint32_t taps_capacity;
    uint32_t *slots;
    float *weights, *row_values;
    float *perturbed, *rows, *window, *activations;
    uint8_t *pixels;
    /* of the call under way */
    const float *values, *stats;
    size_t values_stride;
    const fs_place *own; /* the first tensor that every direction has for itself: all share those before it */
    const fs_directions *noise; /* by_row: the directions and which values they perturb, else NULL */
    uint32_t noise_k;
    float *stats_out;
    uint32_t window_first, window_filled;
};

/* How many values an op uses, given the channels that it reads. */
static inline uint32_t fs_op_values(const fs_op *op, uint32_t channels) {
    const uint32_t parameters = op->flags & FS_FLAG_PARAMETERS;
    if (op->kind == FS_CONV) return op->n_weights + (parameters ? op->channels : 0);
    return op->kind == FS_NORM && parameters ? 2 * channels : 0;
}

/* Floats of a vector; 0 where there are none, which a build without vectors knows: it then drops all that is for them. */
static inline uint32_t fs_vector(const fs_isa *isa) {
#ifdef FS_VECTORS
    return isa->width;
#else
    (void)isa;
    return 0;
#endif
}

/* Wide: several results share their input in registers. */
static inline int fs_is_wide(const fs_engine *e) {
    const uint32_t vector = fs_vector(e->isa);
    return vector && e->lanes >= vector;
}

static inline size_t fs_row_floats(const fs_place *p, uint32_t lanes) {
    return ((size_t)p->w + 2 * p->border_w) * lanes;
}
static inline size_t fs_channel_floats(const fs_place *p, uint32_t lanes) {
    return ((size_t)p->h + 2 * p->border_h) * fs_row_floats(p, lanes);
}
static inline uint64_t fs_place_positions(const fs_place *p) {
    return (uint64_t)p->c * (p->h + 2u * p->border_h) * (p->w + 2u * p->border_w);
}

#endif
