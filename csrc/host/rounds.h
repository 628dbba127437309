/* A round's work in one call each, for a host: a device's answer, and what the server makes of all answers. A board
 * without an operating system calls fs_probe, fs_loss and fs_accumulate itself. */
#ifndef FORESEED_ROUNDS_H
#define FORESEED_ROUNDS_H

#include "foreseed.h"

/* How a device answers along `directions` (with a step of 1): the samples are cut into `spread` parts (a part a sample,
 * where there are fewer), direction k is probed on part k mod parts, at most `block` samples at a time. */
typedef struct {
    fs_directions directions;
    uint32_t spread;
    uint32_t central; /* 1: the loss on both sides, instead of on one side and in the middle */
    uint32_t block;
    void (*done)(void *context, uint32_t first, uint32_t count); /* samples that are used up; may be NULL */
    void *context;
} fs_order;

/* differences[k]: the mean loss along direction k minus that in the middle (or half of what the two sides differ by);
 * base: the mean loss in the middle. `work` has room for 3 numbers a direction of the first part. */
fs_status fs_answer(fs_engine *engine, const float *values, const float *stats, const fs_samples *samples,
                    const fs_order *order, double *work, float *differences, double *base);

/* Adds every part's directions times their coefficients (those of all parts, one after the other) to n numbers of the
 * gradient, which belong to coordinates from `start` on, in order. halves[part][0] and [1], `stride` numbers apart, get
 * what the first half of the part's directions and the others have added. */
void fs_rebuild(const fs_directions *parts, uint32_t count, const float *coefficients, uint32_t start, size_t n,
                float *gradient, float *halves, size_t stride);

/* Of parts that consist of two halves of n numbers each: the sums of all first and of all last halves (2 n numbers), and
 * every part's product with itself and with the sum of all parts (2 numbers a part). `work` has room for 2 n numbers. */
void fs_compare(const float *halves, uint32_t count, size_t n, double *sums, double *work, double *products);

#endif
