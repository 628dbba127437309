/* What the engine's own files share. */
#ifndef FORESEED_INTERNAL_H
#define FORESEED_INTERNAL_H

#include "foreseed.h"

#include <float.h>

#if FLT_EVAL_METHOD != 0 || defined(__FAST_MATH__)
#error "foreseed needs IEEE arithmetic, every operation rounded by itself: no x87, no -ffast-math"
#endif

#define FS_MAX_OPS 256
#define FS_MAX_LANES 16
#define FS_DENSE 255
#define FS_ALIGN 64

#if defined(__x86_64__) || defined(__aarch64__)
#define FS_VECTORS /* there are inner loops in vectors */
#endif

enum { FS_CONV = 1, FS_POOL, FS_NORM, FS_ADD, FS_ACT, FS_MUL, FS_CAT, FS_PAD };
/* FS_LAYER_* of an activation is the bit of its number. */
enum {
    FS_ACT_NONE,
    FS_ACT_RELU,
    FS_ACT_HARDSWISH,
    FS_ACT_RELU6,
    FS_ACT_LEAKY_RELU,
    FS_ACT_HARDSIGMOID,
    FS_ACT_SIGMOID,
    FS_ACT_SILU,
    FS_ACT_TANH,
    FS_ACT_GELU,
    FS_ACT_GELU_TANH
};
enum { FS_POOL_NONE, FS_POOL_MAX, FS_POOL_AVERAGE, FS_POOL_INSIDE, FS_POOL_ADAPTIVE };
enum { FS_FLAG_PARAMETERS = 1, FS_FLAG_SHARED = 2, FS_FLAG_CEIL = 4 };

#ifndef FS_WITHOUT
#define FS_WITHOUT 0
#endif
/* Whether this build has all of these layers; known to the compiler, which then drops what is not needed. */
static inline int fs_has(uint32_t layers) { return !((uint32_t)(FS_WITHOUT) & layers); }

typedef struct {
    uint32_t kh, kw, sh, sw, ph, pw;
} fs_window;

typedef struct {
    uint32_t c, h, w;
} fs_size;

/* An op as it stands in the program. */
typedef struct {
    uint8_t kind, act, flags, rice, pool;
    uint32_t owner; /* the op whose values and structure it uses: its own number unless it shares them */
    uint32_t a, b, channels, groups, n_weights;
    uint32_t dh, dw;   /* dilation of a conv */
    fs_window window;  /* of a pad: kh kw sh sw are the rows above, columns left, rows below, columns right */
    fs_window pooling; /* of an adaptive pool: kh kw are the rows and columns that it makes */
    float number;      /* eps of a norm, slope of a LeakyReLU */
} fs_op;

static inline int fs_reads_two(const fs_op *op) {
    return op->kind == FS_ADD || op->kind == FS_MUL || op->kind == FS_CAT;
}
/* Rows or columns that a dilated kernel spans. */
static inline uint32_t fs_reach(uint32_t kernel, uint32_t dilation) { return (kernel - 1) * dilation + 1; }

/* Walks the sparse structure of one conv, weight by weight. */
typedef struct {
    const uint8_t *next, *end; /* bytes not yet taken */
    uint64_t bits;             /* bits taken and not yet used, lowest first; above `have` they are zero */
    uint32_t have;
    uint32_t rice;
    uint32_t left; /* weights not yet read */
    int64_t index; /* of the last one read; -1 before the first */
} fs_walk;

static inline fs_walk fs_walk_start(const uint8_t *bytes, size_t size, uint32_t rice, uint32_t n_weights) {
    fs_walk walk = {bytes, bytes + size, 0, 0, rice, n_weights, -1};
    return walk;
}

#ifdef FS_VECTORS
#define FS_WALK static inline
#include "walk.inl"
#else
int fs_walk_sparse(fs_walk *walk);
#endif

/* 1 and the next live weight's index, or 0 at the end (or at damage: then walk->left is not 0). */
static inline int fs_walk_next(fs_walk *walk) {
    if (!walk->left) return 0;
    if (walk->rice != FS_DENSE) return fs_walk_sparse(walk);
    walk->index++, walk->left--;
    return 1;
}

float fs_read_float(const uint8_t *bytes);
void fs_read_op(const fs_program *program, uint32_t number, fs_op *op);
const uint8_t *fs_structure(const fs_program *program);
static inline const uint8_t *fs_structure_end(const fs_program *program) { return program->bytes + program->size; }
/* The size of what a conv, then its pool, makes of a map; 0 if it does not fit. */
int fs_conv_size(const fs_op *op, fs_size *s);
int fs_pool_size(const fs_op *op, fs_size *s);
/* Bit of an offset, which is in bytes and so a multiple of four: what this tap reads for one vector the next reads for the
 * vector before it, and both share the loads. */
enum { FS_WITH_NEXT = 1 };

/* What one tap list gives: `m` (1 or 4) results, each of `rows` (1 or 2) rows of `n` vectors.
 * out[r][out_at + y * out_row + i * out_step] =
 *     act(bias[r] + sum over taps t of weights[t * m + r] * in[offsets[t] / 4 + y * in_row + i * in_step]) */
typedef struct {
    const uint32_t *offsets; /* in bytes; FS_WITH_NEXT only in `run1` */
    const float *weights;
    uint32_t taps;
    float bias[4]; /* m numbers */
    float *out[4];
} fs_run;

/* Where all runs of a call stand. */
typedef struct {
    const float *in;
    ptrdiff_t out_at;
    ptrdiff_t in_step, out_step; /* from one vector (or number, for `scalar`) to the next */
    ptrdiff_t in_row, out_row;   /* from one row to the next */
    size_t n;
    uint32_t rows;
    uint32_t act;
} fs_rows;

/* Where piece t of n begins, of `all` vectors that are cut into pieces of nearly equal and, but for the last, even length.
 * Two vectors of AVX2 fill a line of the cache, and processors that load from one half of a line at a time (Zen) take
 * 7.4 cycles for a tap of 2 x 5 results, 7.9 for 2 x 6 and 5.3 for 2 x 4. */
static inline size_t fs_even_cut(size_t all, size_t n, size_t t) {
    return t == n ? all : (all * t / n + 1) & ~(size_t)1;
}

/* `windows` windows of rows x columns positions, `stride` positions apart. */
typedef struct {
    uint32_t rows, columns, stride, windows, lanes;
    int max;
    float factor; /* of the sum, where it is not the maximum */
    size_t in_at, out_at; /* of the first window, from where rows of a map, and of its results, begin */
} fs_pooling;

/* The first row of a map to pool, and the row of results. */
typedef struct {
    const float *in;
    float *out;
} fs_pooled;

/* A map of one channel: `rows` rows of `n` positions of `lanes` numbers, `pitch` numbers from one row to the next. */
typedef struct {
    uint32_t rows, n, lanes;
    size_t pitch;
} fs_map;

/* Sums of numbers and of their squares, lane by lane. */
typedef struct {
    double sum[FS_MAX_LANES], square[FS_MAX_LANES];
} fs_moments;

/* act(x * a + b), one a and b for each lane; where several images fill vectors also act(x * a + b + plus). */
typedef struct {
    const float *a, *b;
    const float *plus; /* a map of the same size, or NULL */
    size_t plus_pitch; /* from one of its rows to the next */
    uint32_t act;
} fs_affine;

/* Of an image's logits: the largest, the first class that has it, and the sum of e^(logit - largest). */
typedef struct {
    double sum;
    float largest;
    uint32_t best;
} fs_softmax;

/* The inner loops, compiled once for each instruction set. */
typedef struct {
    const char *name;
    uint32_t width;                 /* floats of a vector */
    uint32_t band;                  /* vectors of a row that two rows of one result keep in registers; even */
    /* `count` runs, one after the other. */
    void (*run1)(const fs_rows *, const fs_run *runs, uint32_t count); /* one result: vectors, one or two rows */
    void (*run4)(const fs_rows *, const fs_run *runs, uint32_t count); /* four that share their input: the same */
    void (*scalar)(const fs_rows *, const fs_run *);                   /* one result, one row: single numbers, any step */
    void (*pixels)(float *out, const uint8_t *in, size_t n, float scale, float shift);
    /* Row y of a map begins rows[y] numbers after its `in`. */
    void (*pool)(const fs_pooled *maps, uint32_t count, const size_t *rows, const fs_pooling *pooling);
    void (*moments)(const float *in, const fs_map *map, fs_moments *to); /* adds those of a map */
    void (*affine)(float *data, const fs_map *map, const fs_affine *affine);
    void (*add)(float *out, const float *a, const float *b, size_t n, uint32_t act);
    void (*mul)(float *out, const float *a, const float *b, size_t n, size_t period, uint32_t act); /* b[i % period] */
    void (*act)(float *data, size_t n, uint32_t act, float slope); /* any activation, in place */
    /* z for coordinates start .. start + n - 1; start is a multiple of 128 */
    void (*direction)(float *z, uint64_t seed, const uint32_t counter[3], uint32_t kind, uint32_t start, size_t n);
    /* out = values + factor * z, for n numbers */
    void (*axpy)(float *out, const float *values, const float *z, size_t n, float factor);
    /* sums[i % 8] += z[i] * vector[i], for n numbers; n is a multiple of 8 but at a vector's end */
    void (*dot)(double sums[8], const float *z, const float *vector, size_t n);
    /* Of `width` images; their logits of a class stand side by side, `step` numbers after those of the class before.
     * NULL in the plain loops. */
    void (*softmax)(const float *logits, size_t step, uint32_t classes, fs_softmax *out);
    /* The same for signs, 128 at a time from the four words of a block; words of directions counter[0] + i * step.
     * NULL in the plain loops, where they would be larger and hardly faster. */
    void (*sign_words)(uint32_t *words, uint64_t seed, const uint32_t counter[3], uint32_t block, uint32_t step,
                       uint32_t count);
    void (*add_signs)(float *out, const uint32_t *words, const float *factors, uint32_t count, size_t n);
    void (*dot_signs)(double sums[8], const uint32_t words[4], const float *vector, size_t n);
    void (*sgd)(float *values, float *momentum, const float *gradient, size_t n, float lr, float mu, float decay);
    void (*adam)(float *values, float *m, float *v, const float *gradient, size_t n, const float *constants);
} fs_isa;

/* The inner loops for FS_BEST, FS_PLAIN, ...; NULL where this machine cannot run them. */
const fs_isa *fs_find_isa(uint32_t isa);
extern const fs_isa fs_plain;
#if defined(__x86_64__)
extern const fs_isa fs_avx2, fs_avx512;
#elif defined(__aarch64__)
extern const fs_isa fs_neon;
#endif

double fs_exp(double x); /* x <= 0 */
/* 1 / 13!, 1 / 12!, ..., 1 */
enum { FS_EXP_TERMS = 14 };
#define FS_INVERSE_FACTORIALS                                                                                      \
    {                                                                                                              \
        1.0 / 6227020800, 1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320, 1.0 / 5040,   \
        1.0 / 720, 1.0 / 120, 1.0 / 24, 1.0 / 6, 0.5, 1.0, 1.0                                                     \
    }
double fs_log(double x); /* x > 0, normal */
/* Correctly rounded: the processor's instruction, where it has one. With errno to be set compilers call libm for it. */
#if defined(__NO_MATH_ERRNO__) && (defined(__SSE2__) || defined(__aarch64__) || (defined(__ARM_FP) && __ARM_FP & 4))
static inline float fs_sqrt(float x) { return __builtin_sqrtf(x); }
#elif defined(__ARM_FP) && __ARM_FP & 4 && !defined(__aarch64__)
static inline float fs_sqrt(float x) {
    __asm__("vsqrt.f32 %0, %0" : "+t"(x));
    return x;
}
#else
#define FS_SOFT_SQRT
float fs_sqrt(float x);
#endif

#endif
