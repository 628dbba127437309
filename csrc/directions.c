/* Directions and updates, to the bit (docs/protocol.md), and the choice of instruction set. */
#include "internal.h"

#include <string.h>

enum { CHUNK = 512 }; /* coordinates on the stack at a time; a multiple of 128, so that blocks stay whole */

const fs_isa *fs_find_isa(uint32_t isa) {
#if defined(__x86_64__)
    const int has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const int has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (has_avx512 && (isa == FS_BEST || isa == FS_AVX512)) return &fs_avx512;
    if (has_avx2 && (isa == FS_BEST || isa == FS_AVX2)) return &fs_avx2;
#elif defined(__aarch64__)
    if (isa == FS_BEST || isa == FS_NEON) return &fs_neon;
#endif
    return isa == FS_BEST || isa == FS_PLAIN ? &fs_plain : NULL;
}

const char *fs_isa_name(uint32_t isa) {
    const fs_isa *found = fs_find_isa(isa);
    return found ? found->name : NULL;
}

static const fs_isa *chosen(uint32_t isa) {
    const fs_isa *found = fs_find_isa(isa);
    return found ? found : fs_find_isa(FS_BEST);
}

void fs_philox(const uint32_t counter[4], uint64_t seed, uint32_t words[4]) {
    uint32_t c[4] = {counter[0], counter[1], counter[2], counter[3]};
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    for (int round = 0; round < 10; round++, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
        const uint64_t p0 = (uint64_t)0xD2511F53u * c[0], p1 = (uint64_t)0xCD9E8D57u * c[2];
        c[0] = (uint32_t)(p1 >> 32) ^ c[1] ^ k0;
        c[1] = (uint32_t)p1;
        c[2] = (uint32_t)(p0 >> 32) ^ c[3] ^ k1;
        c[3] = (uint32_t)p0;
    }
    for (int i = 0; i < 4; i++) words[i] = c[i];
}

/* z[0 .. n) for coordinates start .. start + n of direction k, made in whole blocks into `block`
 * (CHUNK numbers); returns where in it they begin. */
static const float *make(const fs_isa *isa, const fs_directions *d, uint32_t k, uint32_t start, size_t n,
                         float *block) {
    const uint32_t counter[3] = {k, d->device, d->round};
    const uint32_t head = start % (d->kind == FS_RADEMACHER ? 128 : 4);
    isa->direction(block, d->seed, counter, d->kind, start - head, n + head);
    return block + head;
}

/* How many coordinates from `start` on fit the chunk whose blocks are aligned. */
static size_t piece(uint32_t start, size_t n) {
    const size_t room = CHUNK - start % 128;
    return n < room ? n : room;
}

void fs_direction(const fs_directions *d, uint32_t k, uint32_t start, size_t n, float *out) {
    const fs_isa *isa = chosen(d->isa);
    float block[CHUNK];
    for (size_t here; n; n -= here, start += (uint32_t)here) {
        here = piece(start, n);
        const float *z = make(isa, d, k, start, here, block);
        for (size_t i = 0; i < here; i++) *out++ = z[i];
    }
}

void fs_perturb(const fs_directions *d, uint32_t k, uint32_t start, size_t n, const float *values, float *out) {
    const fs_isa *isa = chosen(d->isa);
    float block[CHUNK];
    for (size_t here; n; n -= here, start += (uint32_t)here, values += here, out += here) {
        here = piece(start, n);
        isa->axpy(out, values, make(isa, d, k, start, here, block), here, d->sigma);
    }
}

#ifdef FS_VECTORS

enum { TOGETHER = 16 }; /* directions whose signs are made at a time */

/* Signs need no numbers of their own: a block's 128 coordinates stay where they are while directions pass over them. */
static void accumulate_signs(const fs_isa *isa, const fs_directions *d, const float *coefficients, uint32_t start,
                             size_t n, float *gradient) {
    uint32_t words[4 * TOGETHER];
    for (size_t here; n; n -= here, start += (uint32_t)here, gradient += here) {
        here = n < 128 ? n : 128;
        for (uint32_t i = 0; i < d->count; i += TOGETHER) {
            const uint32_t counter[3] = {d->first + i * d->step, d->device, d->round};
            const uint32_t count = d->count - i < TOGETHER ? d->count - i : TOGETHER;
            isa->sign_words(words, d->seed, counter, start / 128, d->step, count);
            isa->add_signs(gradient, words, coefficients + i, count, here);
        }
    }
}

static void project_signs(const fs_isa *isa, const fs_directions *d, const float *vector, size_t n, double *out) {
    uint32_t words[4 * TOGETHER];
    for (uint32_t i = 0; i < d->count; i += TOGETHER) {
        const uint32_t counter[3] = {d->first + i * d->step, d->device, d->round};
        const uint32_t count = d->count - i < TOGETHER ? d->count - i : TOGETHER;
        double sums[TOGETHER][8] = {{0}};
        for (size_t start = 0; start < n; start += 128) {
            isa->sign_words(words, d->seed, counter, (uint32_t)start / 128, d->step, count);
            for (uint32_t j = 0; j < count; j++)
                isa->dot_signs(sums[j], words + 4 * j, vector + start, n - start < 128 ? n - start : 128);
        }
        for (uint32_t j = 0; j < count; j++) {
            out[i + j] = 0;
            for (int chain = 0; chain < 8; chain++) out[i + j] += sums[j][chain];
        }
    }
}

#endif

void fs_accumulate(const fs_directions *d, const float *coefficients, uint32_t start, size_t n, float *gradient) {
    const fs_isa *isa = chosen(d->isa);
#ifdef FS_VECTORS
    if (isa->add_signs && d->kind == FS_RADEMACHER && start % 128 == 0) {
        accumulate_signs(isa, d, coefficients, start, n, gradient);
        return;
    }
#endif
    float block[CHUNK];
    /* A chunk of the gradient stays in the cache while all directions pass over it. */
    for (size_t here; n; n -= here, start += (uint32_t)here, gradient += here) {
        here = piece(start, n);
        for (uint32_t i = 0; i < d->count; i++) {
            const float *z = make(isa, d, d->first + i * d->step, start, here, block);
            isa->axpy(gradient, gradient, z, here, coefficients[i]);
        }
    }
}

void fs_project(const fs_directions *d, const float *vector, size_t n, double *out) {
    const fs_isa *isa = chosen(d->isa);
#ifdef FS_VECTORS
    if (isa->dot_signs && d->kind == FS_RADEMACHER) {
        project_signs(isa, d, vector, n, out);
        return;
    }
#endif
    float block[CHUNK];
    for (uint32_t i = 0; i < d->count; i++) {
        double sums[8] = {0};
        for (size_t start = 0; start < n; start += CHUNK) {
            const size_t here = n - start < CHUNK ? n - start : CHUNK;
            isa->dot(sums, make(isa, d, d->first + i * d->step, (uint32_t)start, here, block), vector + start, here);
        }
        out[i] = 0;
        for (int j = 0; j < 8; j++) out[i] += sums[j];
    }
}

void fs_sgd(float *values, float *momentum, const float *gradient, size_t n, float lr, float mu, float decay,
            uint32_t isa) {
    chosen(isa)->sgd(values, momentum, gradient, n, lr, mu, decay);
}

void fs_adam(float *values, float *m, float *v, const float *gradient, size_t n, float lr, float beta1, float beta2,
             float eps, float decay, float k1, float k2, uint32_t isa) {
    const float constants[] = {lr, beta1, beta2, eps, decay, k1, k2};
    chosen(isa)->adam(values, m, v, gradient, n, constants);
}

static int is_finite(const float *number) {
    uint32_t bits;
    memcpy(&bits, number, 4);
    return (bits & 0x7F800000u) != 0x7F800000u;
}

size_t fs_first_not_finite(const float *numbers, size_t n) {
    for (size_t at = 0; at < n; at += CHUNK) {
        const size_t end = n - at < CHUNK ? n : at + CHUNK;
        int all = 1; /* without an exit inside, the loop becomes vectors */
        for (size_t i = at; i < end; i++) all &= is_finite(numbers + i);
        for (size_t i = at; !all; i++)
            if (!is_finite(numbers + i)) return i;
    }
    return n;
}
