/* Prints the sums of convolutions and gradients of several shapes, to the bit; memory is exactly what is asked for. */
#include "host/conv64.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

static uint64_t state = 1;

static double drawn(void) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (double)(int32_t)(state >> 32) / 1e9;
}

/* Numbers of which about one in `zeros` is zero; 0: none. */
static double *numbers(size_t n, unsigned zeros) {
    double *all = malloc(n * sizeof *all);
    for (size_t i = 0; i < n; i++) {
        const double number = drawn();
        all[i] = zeros && (state >> 40) % zeros == 0 ? 0 : number;
    }
    return all;
}

static void print(const double *all, size_t n) {
    uint64_t hash = 14695981039346656037u;
    for (size_t i = 0; i < n * sizeof *all; i++) hash = (hash ^ ((const unsigned char *)all)[i]) * 1099511628211u;
    printf("%016" PRIx64 "\n", hash);
}

static void convolve(const uint32_t s[8]) {
    fs_conv64 c = {.images = s[0], .in = s[1], .out = s[2], .in_size = {s[3], s[4]}, .kernel = {s[5], s[5]},
                   .stride = {s[6], s[6]}, .padding = {s[7], s[7]}};
    for (int i = 0; i < 2; i++) c.out_size[i] = (c.in_size[i] + 2 * s[7] - s[5]) / s[6] + 1;
    const size_t in = (size_t)s[0] * s[1] * s[3] * s[4], out = (size_t)s[0] * s[2] * c.out_size[0] * c.out_size[1];
    const size_t weights = (size_t)s[1] * s[2] * s[5] * s[5];
    double *images = numbers(in, 0), *w = numbers(weights, 2), *gradient = numbers(out, 0);
    double *result = malloc(out * 8), *of_images = malloc(in * 8), *of_weights = malloc(weights * 8);
    char *memory = malloc(fs_conv64_scratch(&c) + 32), *scratch = memory + 32 - (uintptr_t)memory % 32;
    fs_conv64_forward(&c, images, w, result, scratch);
    fs_conv64_backward(&c, images, w, gradient, of_images, of_weights, scratch);
    print(result, out);
    print(of_images, in);
    print(of_weights, weights);
    fs_conv64_backward(&c, images, w, gradient, NULL, of_weights, scratch);
    print(of_weights, weights);
    free(images), free(w), free(gradient), free(result), free(of_images), free(of_weights), free(memory);
}

int main(void) {
    /* images, channels in and out, rows, columns, kernel, stride, padding */
    static const uint32_t shapes[][8] = {
        {4, 3, 6, 32, 32, 5, 1, 0}, {5, 6, 16, 14, 14, 5, 1, 0}, {7, 20, 18, 9, 11, 3, 1, 1}, {4, 33, 17, 8, 8, 3, 2, 1},
        {6, 4, 8, 16, 16, 1, 2, 0}, {1, 2, 3, 7, 13, 4, 3, 2},   {4, 2, 2, 1, 1, 1, 1, 0},   {9, 1, 1, 3, 30, 2, 3, 4},
    };
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) convolve(shapes[i]);
    return 0;
}
