/* Convolutions in float64 and their gradients, of live weights alone, for pruning on a host; no part of the engine.
 *
 * A weight of zero is a pruned one: it is skipped, and its gradient is not computed. Tensors are as PyTorch has them:
 * images x channels x rows x columns, and weights out x in x kernel rows x kernel columns. */
#ifndef FORESEED_CONV64_H
#define FORESEED_CONV64_H

#include <stddef.h>
#include <stdint.h>

typedef struct {
    uint32_t images, in, out;      /* in and out: channels */
    uint32_t in_size[2];           /* rows and columns; so are all pairs below */
    uint32_t out_size[2];
    uint32_t kernel[2], stride[2], padding[2];
} fs_conv64;

/* Bytes that the functions below work in, aligned to 32; on x86-64 these need AVX2 and FMA. */
size_t fs_conv64_scratch(const fs_conv64 *conv);
void fs_conv64_forward(const fs_conv64 *conv, const double *images, const double *weights, double *out, void *scratch);
/* From the gradient of the result those of the images (unless it is NULL) and of the live weights (others: zero). */
void fs_conv64_backward(const fs_conv64 *conv, const double *images, const double *weights, const double *gradient,
                        double *images_gradient, double *weights_gradient, void *scratch);

#endif
