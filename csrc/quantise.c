/* Loss differences as a few bits each, to the bit (docs/protocol.md). */
#include "foreseed.h"

/* No direction has this number, less that of a block: a reply holds 65,536 differences, so numbers end there. */
#define ROUNDING_WORDS 0xFFFFFFFFu

static float magnitude(float x) { return x < 0 ? -x : x; }

/* bits = 1: the mean size, whatever the signs. Otherwise the largest one, which the outermost levels stand for. */
static float scale_of(const float *differences, size_t n, uint32_t bits) {
    double sum = 0;
    float largest = 0;
    for (size_t i = 0; i < n; i++) {
        const float size = magnitude(differences[i]);
        sum += (double)size;
        if (size > largest) largest = size;
    }
    return bits == 1 ? (float)(sum / (double)n) : largest;
}

/* The level below or above, the nearer the likelier, so that the mean over roundings is the difference itself. */
static uint32_t rounded(float difference, float scale, uint32_t levels, uint32_t word) {
    if (scale == 0) return 0;
    const double level = ((double)difference / (double)scale + 1) / 2 * levels;
    const uint32_t below = (uint32_t)level;
    const uint32_t code = below + ((double)word / 4294967296.0 < level - below);
    return code < levels ? code : levels;
}

float fs_quantise(float *differences, size_t n, const fs_quantiser *q) {
    const float scale = scale_of(differences, n, q->bits);
    uint8_t *packed = (uint8_t *)differences; /* a code is no longer than the difference that it replaces */
    uint32_t words[4] = {0}, byte = 0;
    for (size_t i = 0; i < n; i++) {
        const float difference = differences[i];
        const uint32_t at = (uint32_t)(i * q->bits % 8);
        uint32_t code = difference < 0;
        if (q->bits > 1) {
            const uint32_t counter[4] = {(uint32_t)(i / 4), ROUNDING_WORDS - q->block, q->device, q->round};
            if (i % 4 == 0) fs_philox(counter, q->seed, words);
            code = rounded(difference, scale, (1u << q->bits) - 1, words[i % 4]);
        }
        byte |= code << at;
        if (at + q->bits == 8 || i + 1 == n) {
            packed[i * q->bits / 8] = (uint8_t)byte;
            byte = 0;
        }
    }
    return scale;
}
