/* foreseed: a forward-only engine for pruned networks on devices too small for backpropagation.
 *
 * A pruned model is a program (immutable bytes, may live in read-only memory; docs/format.md) and one
 * short vector of float32 `values`. The engine runs the program forward over uint8 images, with the
 * values as they are or perturbed along random directions (docs/protocol.md), and returns losses.
 *
 *     fs_program program;
 *     fs_open(&program, bytes, size);                        // validates every byte
 *     fs_config config = {.batch = 1, .directions = 1};
 *     fs_plan plan;
 *     fs_make_plan(&program, &config, &plan);                // how many bytes will it take?
 *     fs_engine *engine;
 *     fs_start(&engine, &program, &config, arena, plan.arena);
 *     fs_probe(engine, values, NULL, &samples, &directions, losses, NULL);
 *
 * This header is C99; compiling the engine takes GCC or Clang, for a few of their builtins and attributes
 * (__builtin_ctzll, always_inline; on x86-64 also target and __builtin_cpu_supports). No malloc (the
 * caller gives one arena), no libm, no I/O, no globals. Calls on different engines may run on different
 * threads; program bytes and values are only read. Stack: about 9 KB while a plan is made or an engine
 * started, 4 KB while one is opened, 4 KB while one runs.
 */
#ifndef FORESEED_H
#define FORESEED_H

#include <stddef.h>
#include <stdint.h>

typedef enum {
    FS_OK = 0,
    FS_BAD_MAGIC,     /* not a program */
    FS_BAD_VERSION,   /* from the future */
    FS_BAD_SIZE,      /* truncated, or longer than it says */
    FS_BAD_HEADER,    /* a header field out of its range */
    FS_BAD_OP,        /* an op breaks a rule: `where` is its number */
    FS_BAD_STRUCTURE, /* the sparse structure of op `where` is damaged */
    FS_BAD_CONFIG,    /* zero batch or directions, too large for this machine, an instruction set it lacks, or
                         directions of values that the program does not have */
    FS_SMALL_ARENA,   /* the arena has fewer bytes than the plan, or is not aligned to 64 */
    FS_NO_SAMPLES,    /* zero samples */
    FS_BAD_LABEL,     /* a label is not below `classes` */
    FS_BAD_STATS,     /* a frozen variance is negative */
    FS_NOT_FINITE,    /* the loss is not a finite number */
    FS_LEFT_OUT       /* op `where` needs a layer that this build leaves out */
} fs_status;

/* What a build may leave out, to be smaller: -DFS_WITHOUT='FS_LAYER_GELU|FS_LAYER_CAT'. Convolutions, linear layers
 * and ReLU always stay; `foreseed bench code` tells what each takes. */
enum {
    FS_LAYER_HARDSWISH = 1 << 2,
    FS_LAYER_RELU6 = 1 << 3,
    FS_LAYER_LEAKY_RELU = 1 << 4,
    FS_LAYER_HARDSIGMOID = 1 << 5,
    FS_LAYER_SIGMOID = 1 << 6,
    FS_LAYER_SILU = 1 << 7,
    FS_LAYER_TANH = 1 << 8,
    FS_LAYER_GELU = 1 << 9,
    FS_LAYER_GELU_TANH = 1 << 10,
    FS_LAYER_ADD = 1 << 11,
    FS_LAYER_MUL = 1 << 12,
    FS_LAYER_CAT = 1 << 13,
    FS_LAYER_PAD = 1 << 14,
    FS_LAYER_POOL = 1 << 15,
    FS_LAYER_CEIL_MODE = 1 << 16,
    FS_LAYER_ADAPTIVE_POOL = 1 << 17,
    FS_LAYER_BATCH_NORM = 1 << 18,
    FS_LAYER_GROUP_NORM = 1 << 19,
    FS_LAYER_SHARED = 1 << 20
};

/* A validated program. It points into the caller's bytes, which must stay as they are. */
typedef struct {
    const uint8_t *bytes;
    size_t size;
    uint32_t where; /* the op that fs_open refused */
    uint32_t n_ops, channels, height, width, classes;
    uint32_t n_live, n_stats;
    uint32_t max_taps;  /* most live weights of one output channel */
    uint32_t max_row;   /* longest dense row: input channels of a group x kernel */
    uint64_t macs;      /* multiply-accumulates of live weights, one image */
} fs_program;

/* How to run it. `lanes` images lie side by side in memory, and a batch is ceil(batch / lanes) blocks of
 * them; 0 chooses: 1 for a batch smaller than a vector (lean), otherwise as many as a vector has (wide). */
typedef struct {
    uint32_t batch;      /* images in memory at once */
    uint32_t lanes;      /* 0, 1, 2, 4, 8 or 16 */
    uint32_t directions; /* perturbed copies run side by side */
    uint32_t by_row;     /* 1: no perturbed copy; each row of weights is perturbed when it is used, again
                            for every batch: less memory, more arithmetic. Needs directions = 1. */
    uint32_t isa;        /* 0: the best that this machine runs; otherwise FS_PLAIN, FS_AVX2, FS_AVX512 or FS_NEON */
    /* Where ranges of directions begin: what comes before the op of such a value is computed once for all directions
     * of a range that begins there or later, and stays in memory. Other ranges take whole passes, to the same bits.
     * Read by fs_make_plan and fs_start only. */
    const uint32_t *keep;
    uint32_t n_keep;
} fs_config;

enum { FS_BEST = 0, FS_PLAIN, FS_AVX2, FS_AVX512, FS_NEON };

/* What it takes, to the byte. */
typedef struct {
    size_t arena;       /* what fs_start must be given: the sum of the next four */
    size_t bookkeeping; /* engine, steps, tap lists */
    size_t perturbed;   /* perturbed copies of the values */
    size_t activations; /* all tensors, planned by liveness, and the rows in flight */
    size_t input;       /* float rows of the image being read, and its bytes where they are rearranged */
    uint32_t lanes;     /* as chosen */
} fs_plan;

typedef struct fs_engine fs_engine;

/* Image i is the channels*height*width bytes at images + i*stride, its label the byte at labels + i*stride. */
typedef struct {
    const uint8_t *images, *labels;
    size_t stride;
    uint32_t count;
} fs_samples;

enum { FS_GAUSSIAN = 0, FS_RADEMACHER = 1 };

/* Directions first, first + step, ... (count of them) of one device in one round. They perturb values
 * [at, at + size) of a program, or all of them with size = 0 (and at = 0): coordinate j belongs to value at + j.
 * Only fs_probe looks at this range; other functions speak of coordinates. */
typedef struct {
    uint64_t seed;
    uint32_t round, device;
    uint32_t first, step, count;
    uint32_t kind;
    float sigma;
    uint32_t isa; /* as in fs_config; one that this machine lacks is taken for FS_BEST */
    uint32_t at, size;
} fs_directions;

/* How a device's loss differences are packed: in 1, 2, 4 or 8 bits each, rounded up or down at random by these. */
typedef struct {
    uint64_t seed;
    uint32_t round, device;
    uint32_t bits;
    uint32_t block; /* of the round's blocks of values, below 65,536: each is rounded in its own way */
} fs_quantiser;

/* ---- programs ---- */
fs_status fs_open(fs_program *program, const void *bytes, size_t size);
fs_status fs_make_plan(const fs_program *program, const fs_config *config, fs_plan *plan);
fs_status fs_start(fs_engine **engine, const fs_program *program, const fs_config *config, void *arena, size_t bytes);
size_t fs_high_water(const fs_engine *engine); /* bytes of the arena touched so far */
const char *fs_isa_name(uint32_t isa);         /* "avx512", "avx2" or "plain"; NULL if this machine lacks it */

/* ---- running ----
 * `stats` are the frozen statistics of the batch-norm layers (n_stats numbers), or NULL: the statistics of
 * each batch. Sums of losses are float64 in image order. The caller has checked that values are finite. */
fs_status fs_loss(fs_engine *engine, const float *values, const float *stats, const fs_samples *samples, double *loss,
                  uint32_t *correct);
fs_status fs_logits(fs_engine *engine, const float *values, const float *stats, const fs_samples *samples,
                    float *logits);
/* The image-weighted mean over batches of every batch-norm layer's statistics. */
fs_status fs_batch_stats(fs_engine *engine, const float *values, const fs_samples *samples, float *stats);
/* losses[i]: the loss of values perturbed along the i-th direction; base (may be NULL): of the values themselves. */
fs_status fs_probe(fs_engine *engine, const float *values, const float *stats, const fs_samples *samples,
                   const fs_directions *directions, double *losses, double *base);

/* ---- directions and updates, to the bit (docs/protocol.md); `start` is the first of n coordinates ---- */
void fs_philox(const uint32_t counter[4], uint64_t seed, uint32_t words[4]);
void fs_direction(const fs_directions *directions, uint32_t k, uint32_t start, size_t n, float *out);
void fs_perturb(const fs_directions *directions, uint32_t k, uint32_t start, size_t n, const float *values, float *out);
/* gradient[j] += coefficients[i] * z_i[j] for each direction i in order. */
void fs_accumulate(const fs_directions *directions, const float *coefficients, uint32_t start, size_t n,
                   float *gradient);
/* out[i] = sum over j of z_i[j] * vector[j], in float64: the derivative along each direction, given a gradient. */
void fs_project(const fs_directions *directions, const float *vector, size_t n, double *out);
void fs_sgd(float *values, float *momentum, const float *gradient, size_t n, float lr, float mu, float decay,
            uint32_t isa);
void fs_adam(float *values, float *m, float *v, const float *gradient, size_t n, float lr, float beta1, float beta2,
             float eps, float decay, float k1, float k2, uint32_t isa);
/* Packs n finite differences (at least one) into the first ceil(n * bits / 8) of their own bytes; returns their scale. */
float fs_quantise(float *differences, size_t n, const fs_quantiser *quantiser);
/* The place of the first NaN or infinity, or n. */
size_t fs_first_not_finite(const float *numbers, size_t n);

#endif
