/* A round's work in one call each: what is summed, and in which order, stands in docs/protocol.md. */
#include "rounds.h"

#include <string.h>

/* Adds the losses of a block of samples along `directions`, and (unless NULL) in the middle. */
static fs_status add(fs_engine *engine, const float *values, const float *stats, const fs_samples *samples,
                     const fs_directions *directions, double *found, double *sums, double *middle) {
    double base = 0;
    const fs_status status = fs_probe(engine, values, stats, samples, directions, found, middle ? &base : NULL);
    for (uint32_t i = 0; !status && i < directions->count; i++) sums[i] += found[i];
    if (middle) *middle += base;
    return status;
}

fs_status fs_answer(fs_engine *engine, const float *values, const float *stats, const fs_samples *samples,
                    const fs_order *order, double *work, float *differences, double *base) {
    const uint32_t k = order->directions.count, parts = order->spread < samples->count ? order->spread : samples->count;
    double total = 0;
    for (uint32_t part = 0; part < parts; part++) {
        const uint32_t first = (uint32_t)((uint64_t)part * samples->count / parts);
        const uint32_t end = (uint32_t)((uint64_t)(part + 1) * samples->count / parts);
        fs_directions forward = order->directions, backward;
        forward.first += part, forward.step = parts, forward.count = (k - part + parts - 1) / parts;
        backward = forward, backward.sigma = -forward.sigma;
        double *losses = work, *opposite = losses + forward.count, *found = opposite + forward.count, middle = 0;
        memset(work, 0, 2 * forward.count * sizeof *work);
        for (uint32_t at = first, size; at < end; at += size) {
            size = end - at < order->block ? end - at : order->block;
            const size_t skipped = (size_t)at * samples->stride;
            const fs_samples here = {samples->images + skipped, samples->labels + skipped, samples->stride, size};
            double *at_middle = order->central ? NULL : &middle;
            fs_status status = add(engine, values, stats, &here, &forward, found, losses, at_middle);
            if (!status && order->central) status = add(engine, values, stats, &here, &backward, found, opposite, NULL);
            if (status) return status;
            if (order->done) order->done(order->context, at, size);
        }
        if (order->central) {
            double both = 0;
            for (uint32_t i = 0; i < forward.count; i++) both += losses[i] + opposite[i];
            middle = both / (2 * (double)forward.count);
        }
        for (uint32_t i = 0; i < forward.count; i++) {
            const double change = order->central ? (losses[i] - opposite[i]) / 2 : losses[i] - middle;
            differences[part + i * parts] = (float)(change / (end - first));
        }
        total += middle;
    }
    *base = total / samples->count;
    return FS_OK;
}

void fs_rebuild(const fs_directions *parts, uint32_t count, const float *coefficients, uint32_t start, size_t n,
                float *gradient, float *halves, size_t stride) {
    for (uint32_t part = 0; part < count; part++) {
        const uint32_t k = parts[part].count, edges[] = {0, k / 2, k};
        for (int half = 0; half < 2; half++, halves += stride) {
            fs_directions d = parts[part];
            d.first += edges[half], d.count = edges[half + 1] - edges[half];
            memcpy(halves, gradient, n * sizeof *gradient);
            fs_accumulate(&d, coefficients + edges[half], start, n, gradient);
            for (size_t i = 0; i < n; i++) halves[i] = gradient[i] - halves[i];
        }
        coefficients += k;
    }
}

/* The sum of a's products with b, float64: coordinate j in chain j mod 8, then the chains in order. */
static double dot(const double *a, const double *b, size_t n) {
    double chains[8] = {0}, sum = 0;
    size_t j = 0;
    for (; j + 8 <= n; j += 8)
        for (int chain = 0; chain < 8; chain++) chains[chain] += a[j + chain] * b[j + chain];
    for (; j < n; j++) chains[j % 8] += a[j] * b[j];
    for (int chain = 0; chain < 8; chain++) sum += chains[chain];
    return sum;
}

void fs_compare(const float *halves, uint32_t count, size_t n, double *sums, double *work, double *products) {
    for (size_t j = 0; j < 2 * n; j++) sums[j] = halves[j];
    for (uint32_t i = 1; i < count; i++)
        for (size_t j = 0; j < 2 * n; j++) sums[j] += halves[2 * n * i + j];
    double *part = work, *whole = work + n;
    for (size_t j = 0; j < n; j++) whole[j] = sums[j] + sums[n + j];
    for (uint32_t i = 0; i < count; i++, halves += 2 * n) {
        for (size_t j = 0; j < n; j++) part[j] = (double)halves[j] + halves[n + j];
        products[2 * i] = dot(part, part, n);
        products[2 * i + 1] = dot(part, whole, n);
    }
}
