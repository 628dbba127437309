/* A convolution (or linear layer) with its activation and pooling: conv.c. */
#ifndef FORESEED_CONV_H
#define FORESEED_CONV_H

#include "engine.h"

/* The batch under way: directions and images in memory. */
typedef struct {
    uint32_t directions, images, blocks;
    const fs_samples *samples;
    uint32_t first; /* sample of the batch's first image */
} fs_batch;

/* Parameters [first, first + n) of direction d: from its perturbed copy, or perturbed now (by_row). */
const float *fs_parameters(fs_engine *e, uint32_t d, uint32_t first, uint32_t n);
float *fs_tensor(const fs_engine *e, const fs_place *place, uint32_t d, uint32_t block);
/* The first interior number of a row. */
float *fs_row(const fs_engine *e, const fs_place *place, float *tensor, uint32_t channel, uint32_t row);
/* Activations beyond Hardswish, in place on n numbers of a row that is made: their arithmetic then stands in one place. */
static inline void fs_activate(const fs_engine *e, const fs_op *op, float *row, size_t n) {
    if (op->act > FS_ACT_HARDSWISH) e->isa->act(row, n, op->act, op->number);
}
/* Maps that are pooled: row y begins (y % ring) * pitch numbers after the first. */
typedef struct {
    size_t pitch;
    uint32_t ring, height, width;
} fs_pool_source;

/* One row of pooled results of each of `count` maps. */
void fs_pool_row(const fs_engine *e, const fs_op *op, const fs_pool_source *from, const fs_pooled *maps, uint32_t count,
                 uint32_t out_row, uint32_t out_width);

void fs_load_block(fs_engine *e, const fs_batch *batch, uint32_t block);
/* Row y of channel c of the loaded block, normalised. */
void fs_load_row(const fs_engine *e, const fs_batch *batch, uint32_t block, uint32_t c, uint32_t y, float *out);
void fs_conv(fs_engine *e, uint32_t number, const fs_op *op, const fs_batch *batch);

#endif
