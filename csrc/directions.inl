/* The inner loops over vectors of values: directions and updates (docs/protocol.md). A part of kernels.inl. */

INLINE void philox_block(uint32_t words[4], uint64_t seed, const uint32_t counter[3], uint32_t block) {
    const uint32_t whole[4] = {block, counter[0], counter[1], counter[2]};
    fs_philox(whole, seed, words);
}

#ifdef VEC

enum { CHAINS = 2, BLOCKS = CHAINS * WIDTH };

/* BLOCKS blocks side by side, words[4 * i + j] being word j of block `first + i * blocks` of direction
 * `k + i * directions`; two chains of rounds, so that one's multiplications fill the other's waits. */
INLINE void philox_blocks(uint32_t *words, uint64_t seed, const uint32_t counter[3], uint32_t first, uint32_t blocks,
                          uint32_t directions) {
    uint32_t numbers[BLOCKS], ks[BLOCKS], out[4][BLOCKS];
    for (uint32_t i = 0; i < BLOCKS; i++) numbers[i] = first + i * blocks, ks[i] = counter[0] + i * directions;
    IVEC c0[CHAINS], c1[CHAINS], c2[CHAINS], c3[CHAINS];
#pragma GCC unroll 2
    for (int i = 0; i < CHAINS; i++) {
        c0[i] = i_load(numbers + i * WIDTH), c1[i] = i_load(ks + i * WIDTH);
        c2[i] = i_set1(counter[1]), c3[i] = i_set1(counter[2]);
    }
    const IVEC m0 = i_set1(0xD2511F53u), m1 = i_set1(0xCD9E8D57u);
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    for (int round = 0; round < 10; round++, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
#pragma GCC unroll 2
        for (int i = 0; i < CHAINS; i++) {
            const IVEC high0 = i_mulhi(c0[i], m0), low0 = i_mullo(c0[i], m0);
            const IVEC high1 = i_mulhi(c2[i], m1), low1 = i_mullo(c2[i], m1);
            c0[i] = i_xor(i_xor(high1, c1[i]), i_set1(k0));
            c1[i] = low1;
            c2[i] = i_xor(i_xor(high0, c3[i]), i_set1(k1));
            c3[i] = low0;
        }
    }
#pragma GCC unroll 2
    for (int i = 0; i < CHAINS; i++) {
        i_store(out[0] + i * WIDTH, c0[i]), i_store(out[1] + i * WIDTH, c1[i]);
        i_store(out[2] + i * WIDTH, c2[i]), i_store(out[3] + i * WIDTH, c3[i]);
    }
    for (int i = 0; i < BLOCKS; i++)
        for (int j = 0; j < 4; j++) words[4 * i + j] = out[j][i];
}

#endif

/* A normal is above / below, by one rational function in the middle and another in the tails. */
typedef struct {
    float above, below;
} quotient;

INLINE quotient middle(float q) {
    const float r = 0.180625f - q * q;
    const float above = ((59.109374720f * r + 159.29113202f) * r + 50.434271938f) * r + 3.3871327179f;
    const float below = ((67.187563600f * r + 78.757757664f) * r + 17.895169469f) * r + 1.0f;
    const quotient z = {q * above, below};
    return z;
}

INLINE quotient tail(int32_t s) {
    /* The distance to the nearer end, 2^31 - 1 - s or 2^31 + s: both are s with its bits flipped as needed. */
    const int32_t t = s ^ (s < 0 ? INT32_MIN : INT32_MAX);
    const float p = ((float)t + 0.5f) * 0x1p-32f;
    uint32_t bits;
    memcpy(&bits, &p, 4);
    const int32_t e = (int32_t)(bits - 0x3F3504F3u) >> 23;
    bits -= (uint32_t)e << 23;
    float m;
    memcpy(&m, &bits, 4);
    const float f = (m - 1.0f) / (m + 1.0f), g = f * f;
    const float ln = (float)e * 0.69314718056f +
                     f * ((((2.0f / 9 * g + 2.0f / 7) * g + 2.0f / 5) * g + 2.0f / 3) * g + 2.0f);
    const float r = fs_sqrt(-ln) - 1.6f;
    const float above = ((0.17023821103f * r + 1.3067284816f) * r + 2.7568153900f) * r + 1.4234372777f;
    const quotient z = {s < 0 ? -above : above, (0.12021132975f * r + 0.73700164250f) * r + 1.0f};
    return z;
}

INLINE float normal(uint32_t word) {
    int32_t s;
    memcpy(&s, &word, 4);
    const float q = ((float)s + 0.5f) * 0x1p-32f;
    const int is_middle = (q < 0 ? -q : q) <= 0.425f;
#ifdef VEC
    /* Both, then a choice, then one division: the loop becomes vectors. */
    const quotient a = middle(q), b = tail(s);
    return (is_middle ? a.above : b.above) / (is_middle ? a.below : b.below);
#else
    const quotient z = is_middle ? middle(q) : tail(s);
    return z.above / z.below;
#endif
}

TARGET static void gaussian(float *z, uint64_t seed, const uint32_t counter[3], uint32_t start, size_t n) {
    uint32_t block = start / 4;
#ifdef VEC
    for (uint32_t words[4 * BLOCKS]; n >= 4 * BLOCKS; n -= 4 * BLOCKS, z += 4 * BLOCKS, block += BLOCKS) {
        philox_blocks(words, seed, counter, block, 1, 0);
        for (int i = 0; i < 4 * BLOCKS; i++) z[i] = normal(words[i]);
    }
#endif
    for (uint32_t words[4]; n; block++) {
        const size_t here = n < 4 ? n : 4;
        philox_block(words, seed, counter, block);
        for (size_t i = 0; i < here; i++) z[i] = normal(words[i]);
        n -= here, z += here;
    }
}

INLINE void signs(float *z, uint32_t word, size_t n) {
    float all[32];
    for (uint32_t j = 0; j < 32; j++) all[j] = 1.0f - 2.0f * (float)(int32_t)(word >> j & 1);
    memcpy(z, all, n * sizeof *z);
}

TARGET static void rademacher(float *z, uint64_t seed, const uint32_t counter[3], uint32_t start, size_t n) {
    uint32_t block = start / 128;
    for (uint32_t words[4]; n; block++) {
        philox_block(words, seed, counter, block);
        for (int i = 0; i < 4 && n; i++) {
            const size_t here = n < 32 ? n : 32;
            signs(z, words[i], here);
            n -= here, z += here;
        }
    }
}

TARGET static void direction(float *z, uint64_t seed, const uint32_t counter[3], uint32_t kind, uint32_t start,
                             size_t n) {
    if (kind == FS_RADEMACHER) rademacher(z, seed, counter, start, n);
    else gaussian(z, seed, counter, start, n);
}

#ifdef VEC

/* words[4 * i + j]: word j of a block of the directions counter[0] + i * step, for `count` of them. */
TARGET static void sign_words(uint32_t *words, uint64_t seed, const uint32_t counter[3], uint32_t block, uint32_t step,
                              uint32_t count) {
    uint32_t i = 0;
    for (; i + BLOCKS <= count; i += BLOCKS) {
        const uint32_t here[3] = {counter[0] + i * step, counter[1], counter[2]};
        philox_blocks(words + 4 * i, seed, here, block, 0, step);
    }
    for (; i < count; i++) {
        const uint32_t here[3] = {counter[0] + i * step, counter[1], counter[2]};
        philox_block(words + 4 * i, seed, here, block);
    }
}

/* number[i], its sign changed where bit i of the word is set, for 32 of them */
INLINE void flip(float *out, uint32_t word, const float *numbers) {
    uint32_t bits[32];
    memcpy(bits, numbers, sizeof bits);
    for (uint32_t j = 0; j < 32; j++) bits[j] ^= word << (31 - j) & 0x80000000u;
    memcpy(out, bits, sizeof bits);
}

/* out[i] += factors[j] times sign i of direction j, for n up to 128 coordinates */
TARGET static void add_signs(float *out, const uint32_t *words, const float *factors, uint32_t count, size_t n) {
    for (; n; words++) {
        const size_t here = n < 32 ? n : 32;
        float sums[32] = {0}, all[32], terms[32];
        memcpy(sums, out, here * sizeof *out);
        for (uint32_t j = 0; j < count; j++) {
            for (int i = 0; i < 32; i++) all[i] = factors[j];
            flip(terms, words[4 * j], all);
            for (int i = 0; i < 32; i++) sums[i] += terms[i];
        }
        memcpy(out, sums, here * sizeof *out);
        n -= here, out += here;
    }
}

TARGET static void dot_signs(double sums[8], const uint32_t words[4], const float *vector, size_t n) {
    double chains[8];
    float terms[32];
    memcpy(chains, sums, sizeof chains);
    for (; n >= 32; n -= 32, vector += 32, words++) {
        flip(terms, *words, vector);
        for (int i = 0; i < 32; i += 8)
            for (int j = 0; j < 8; j++) chains[j] += (double)terms[i + j];
    }
    if (n) {
        float rest[32] = {0};
        memcpy(rest, vector, n * sizeof *rest);
        flip(terms, *words, rest);
    }
    for (size_t j = 0; j < n; j++) chains[j % 8] += (double)terms[j];
    memcpy(sums, chains, sizeof chains);
}

#endif

TARGET static void axpy(float *out, const float *values, const float *z, size_t n, float factor) {
    for (size_t i = 0; i < n; i++) out[i] = values[i] + factor * z[i];
}

/* Eight chains: additions need not wait for each other, and become vectors. */
TARGET static void dot(double sums[8], const float *z, const float *vector, size_t n) {
    size_t i = 0;
    double chains[8];
    memcpy(chains, sums, sizeof chains);
    for (; i + 8 <= n; i += 8)
        for (int j = 0; j < 8; j++) chains[j] += (double)z[i + j] * vector[i + j];
    for (; i < n; i++) chains[i % 8] += (double)z[i] * vector[i];
    memcpy(sums, chains, sizeof chains);
}

TARGET static void sgd(float *values, float *momentum, const float *gradient, size_t n, float lr, float mu,
                       float decay) {
    if (!momentum) {
        for (size_t i = 0; i < n; i++) values[i] = values[i] - lr * (gradient[i] + decay * values[i]);
        return;
    }
    for (size_t i = 0; i < n; i++) {
        const float d = gradient[i] + decay * values[i];
        momentum[i] = mu * momentum[i] + d;
        values[i] = values[i] - lr * momentum[i];
    }
}

/* constants: lr, beta1, beta2, eps, decay, k1, k2 */
TARGET static void adam(float *values, float *m, float *v, const float *gradient, size_t n, const float *constants) {
    const float lr = constants[0], beta1 = constants[1], beta2 = constants[2], eps = constants[3];
    const float decay = constants[4], k1 = constants[5], k2 = constants[6];
    for (size_t i = 0; i < n; i++) {
        const float d = gradient[i] + decay * values[i];
        m[i] = beta1 * m[i] + (1.0f - beta1) * d;
        v[i] = beta2 * v[i] + (1.0f - beta2) * d * d;
        values[i] = values[i] - lr * (m[i] * k1) / (fs_sqrt(v[i] * k2) + eps);
    }
}
