/* The fuzz target: any bytes as a program, on an engine whose every buffer is exactly as long as promised, so that
 * the address sanitizer sees the first byte read or written beyond.
 *
 * With clang it is also a libFuzzer target (checks as calls, or the unrolled kernels take minutes to compile):
 *     clang -g -O1 -fsanitize=fuzzer,address -mllvm -asan-instrumentation-with-call-threshold=0 -fno-math-errno \
 *         -ffp-contract=off -Icsrc csrc/?*.c tests/engine/fuzz/fuzz_program.c */
#include "fuzz.h"

#include "foreseed.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { PROBES = 5, KINDS = 2 };
/* What an input may cost: a fuzzer lives from the number of inputs it tries. */
static const uint64_t MOST_LEAN = 1 << 18, MOST_CHOSEN = 1 << 23, MOST_STEPS = 1 << 19, MOST_POOLING = 1 << 24;

typedef struct {
    fs_program program;
    fs_config config;
    uint32_t keep[2];
    uint64_t seed;
    float *values, *stats, *perturbed;
    int frozen, huge;
    uint8_t *records;
    fs_samples samples;
} subject;

typedef struct {
    fs_status loss_status, probe_status[KINDS], range_status;
    double loss, probes[KINDS][PROBES], range[PROBES];
    uint32_t correct;
    float *logits;
} results;

#define PROMISE(holds)                                                                                                \
    do {                                                                                                              \
        if (!(holds)) {                                                                                               \
            fprintf(stderr, "%s:%d: broken promise: %s\n", __FILE__, __LINE__, #holds);                               \
            abort();                                                                                                  \
        }                                                                                                             \
    } while (0)

static void *exactly(size_t bytes) {
    void *memory = NULL;
    PROMISE(!posix_memalign(&memory, 64, bytes));
    return memory;
}

static fs_directions directions(const subject *s, uint32_t kind, float sigma) {
    const fs_directions d = {.seed = s->seed, .round = 3, .device = 5, .first = (uint32_t)s->seed % 1000, .step = 7,
                             .count = PROBES, .kind = kind, .sigma = sigma};
    return d;
}

/* ---- choosing ---- */

static fs_config read_config(const uint8_t *data) {
    static const uint32_t lanes[] = {0, 1, 2, 4, 8, 16};
    fs_config config = {.batch = 1 + data[0] % 40u, .lanes = lanes[data[1] % 6], .directions = 1 + data[2] % 6u,
                        .by_row = data[3] & 1, .isa = data[5] % 4u, .n_keep = (data[3] >> 2 & 3) % 3u};
    if (config.by_row) config.directions = 1;
    return config;
}

/* One image, one lane, with the same multiplications. */
static fs_config lean_config(const fs_config *config) {
    const fs_config lean = {.batch = 1, .lanes = 1, .directions = 1,
                            .isa = config->isa == FS_PLAIN ? FS_PLAIN : FS_BEST};
    return lean;
}

/* Where check_range's directions begin. */
static uint32_t range_start(const subject *s) { return (uint32_t)(s->seed * 7919 % s->program.n_live); }

/* Passes begin there, before or behind it; a program without values has none of what is named. */
static void choose_kept(subject *s) {
    s->keep[0] = s->program.n_live / 3;
    s->keep[1] = s->program.n_live ? range_start(s) : 0;
    s->config.keep = s->keep;
}

/* The work of pooling, which no field of the public structs bounds: the largest window times all positions. */
static uint64_t pooling_steps(const fs_program *p, const fs_plan *plan) {
    uint64_t largest = 1;
    for (uint32_t i = 0; i < p->n_ops; i++) {
        const uint8_t *op = p->bytes + 32 + 8 * p->channels + 40 * i;
        /* Windows of an adaptive pool share the map: each position is in four of them at most. */
        const uint64_t window = op[24] == 4 ? 4 : (uint64_t)op[25] * op[26];
        if (window > largest) largest = window;
    }
    return largest * (plan->activations / 4);
}

/* No activation can overflow (products of products soon do), and so no order of arithmetic makes a NaN that another does not. */
static int is_tame(const subject *s) {
    const fs_program *p = &s->program;
    float x;
    for (uint32_t i = 0; i < 2 * p->channels; i++) {
        memcpy(&x, p->bytes + 32 + 4 * i, 4);
        if (x > 64 || x < -64) return 0;
    }
    uint32_t products = 0;
    for (uint32_t i = 0; i < p->n_ops; i++) {
        const uint8_t *op = p->bytes + 32 + 8 * p->channels + 40 * i;
        products += op[0] == 6;
        memcpy(&x, op + 36, 4);
        if (op[0] == 3 && x < 1e-6f) return 0;
        if (op[0] != 3 && (x > 64 || x < -64)) return 0; /* the slope of a LeakyReLU */
    }
    return !s->huge && p->n_ops <= 24 && products <= 2;
}

/* ---- making what a program needs ---- */

static float *numbers(const subject *s, uint32_t k, uint32_t n, float scale) {
    const fs_directions d = directions(s, FS_GAUSSIAN, 0);
    float *out = exactly(4 * (size_t)n);
    fs_direction(&d, k, 0, n, out);
    for (uint32_t i = 0; i < n; i++) out[i] *= scale;
    return out;
}

static void make_samples(subject *s) {
    const fs_program *p = &s->program;
    const size_t image = (size_t)p->channels * p->height * p->width;
    s->samples.stride = image + 1;
    s->records = exactly(s->samples.count * s->samples.stride);
    uint32_t state = (uint32_t)s->seed | 1;
    for (size_t i = 0; i < s->samples.count * s->samples.stride; i++) {
        state = state * 1664525u + 1013904223u;
        s->records[i] = (uint8_t)(state >> 24);
    }
    for (uint32_t i = 0; i < s->samples.count; i++) s->records[i * s->samples.stride] %= p->classes;
    s->samples.labels = s->records, s->samples.images = s->records + 1;
}

static void make_numbers(subject *s) {
    const fs_program *p = &s->program;
    s->values = numbers(s, 0, p->n_live, s->huge ? 1e37f : 0.25f);
    s->stats = numbers(s, 1, p->n_stats, 1.0f);
    /* Means and variances alternate layer by layer; numbers that are not negative serve as both. */
    for (uint32_t i = 0; i < p->n_stats; i++) s->stats[i] = s->stats[i] < 0 ? -s->stats[i] : s->stats[i];
    s->perturbed = exactly(4 * (size_t)p->n_live);
}

/* ---- running ---- */

/* The loss at the perturbed values of one of the directions is what the probe found. */
static void check_loss(const subject *s, fs_engine *e, const float *stats, const double *expected) {
    double loss;
    uint32_t correct;
    PROMISE(!fs_loss(e, s->perturbed, stats, &s->samples, &loss, &correct));
    PROMISE(!memcmp(&loss, expected, sizeof loss));
}

/* A probe is the loss at the perturbed values, which are the values themselves for sigma = 0. */
static void check_probes(const subject *s, fs_engine *e, const float *stats, uint32_t kind, results *r) {
    fs_directions d = directions(s, kind, 0.01f);
    r->probe_status[kind] = fs_probe(e, s->values, stats, &s->samples, &d, r->probes[kind], NULL);
    if (!r->probe_status[kind] && !s->huge) {
        fs_perturb(&d, d.first + 2 * d.step, 0, s->program.n_live, s->values, s->perturbed);
        check_loss(s, e, stats, &r->probes[kind][2]);
    }
    double still[PROBES], base;
    d.sigma = 0;
    const fs_status status = fs_probe(e, s->values, stats, &s->samples, &d, still, &base);
    PROMISE(status == r->loss_status);
    PROMISE(status || !memcmp(&base, &r->loss, sizeof base));
    for (uint32_t i = 0; !status && i < PROBES; i++) PROMISE(!memcmp(&still[i], &r->loss, sizeof r->loss));
}

/* Directions of a range of the values leave the others as they are; one that is not there is refused. */
static void check_range(const subject *s, fs_engine *e, const float *stats, results *r) {
    const uint32_t n = s->program.n_live;
    fs_directions d = directions(s, FS_RADEMACHER, 0.01f);
    double base;
    d.at = 1 + n / 2, d.size = n - n / 2;
    PROMISE(fs_probe(e, s->values, stats, &s->samples, &d, r->range, &base) == FS_BAD_CONFIG);
    d.size = 0;
    PROMISE(fs_probe(e, s->values, stats, &s->samples, &d, r->range, &base) == FS_BAD_CONFIG);
    if (!n) return;
    d.at = range_start(s);
    d.size = 1 + (uint32_t)(s->seed * 104729 % (n - d.at));
    r->range_status = fs_probe(e, s->values, stats, &s->samples, &d, r->range, &base);
    if (r->range_status || s->huge) return;
    PROMISE(!memcmp(&base, &r->loss, sizeof base));
    memcpy(s->perturbed, s->values, 4 * (size_t)n);
    fs_perturb(&d, d.first + 3 * d.step, 0, d.size, s->values + d.at, s->perturbed + d.at);
    check_loss(s, e, stats, &r->range[3]);
}

/* All calls on a new engine. Its memory starts as `fill`: what it does not write, it must not use. */
static void run(const subject *s, const fs_config *config, int fill, results *r) {
    fs_plan plan;
    PROMISE(!fs_make_plan(&s->program, config, &plan));
    PROMISE(plan.arena == plan.bookkeeping + plan.perturbed + plan.activations + plan.input);
    void *arena = exactly(plan.arena);
    memset(arena, fill, plan.arena);
    fs_engine *e;
    PROMISE(fs_start(&e, &s->program, config, arena, plan.arena - 1) == FS_SMALL_ARENA);
    PROMISE(!fs_start(&e, &s->program, config, arena, plan.arena));
    const float *stats = s->frozen ? s->stats : NULL;
    memset(r, 0, sizeof *r);
    r->loss_status = fs_loss(e, s->values, stats, &s->samples, &r->loss, &r->correct);
    PROMISE(r->loss_status == FS_OK || r->loss_status == FS_NOT_FINITE);
    PROMISE(r->loss_status || r->loss >= 0);
    PROMISE(r->correct <= s->samples.count);
    for (uint32_t kind = 0; kind < KINDS; kind++) check_probes(s, e, stats, kind, r);
    check_range(s, e, stats, r);
    r->logits = exactly(4 * (size_t)s->samples.count * s->program.classes);
    PROMISE(!fs_logits(e, s->values, stats, &s->samples, r->logits));
    float *seen = exactly(4 * (size_t)s->program.n_stats);
    PROMISE(!fs_batch_stats(e, s->values, &s->samples, seen));
    PROMISE(fs_high_water(e) <= plan.arena);
    free(seen);
    free(arena);
}

static void take_in(uint64_t *digest, const void *data, size_t n) {
    const uint8_t *bytes = data;
    for (size_t i = 0; i < n; i++) *digest = (*digest ^ bytes[i]) * 0x100000001B3u;
}

/* How a set of images is batched changes nothing, unless through the statistics of a batch. */
static void check_same(const subject *s, const results *lean, const results *chosen) {
    const size_t logits = 4 * (size_t)s->samples.count * s->program.classes;
    PROMISE(lean->loss_status == chosen->loss_status && lean->correct == chosen->correct);
    PROMISE(!memcmp(&lean->loss, &chosen->loss, sizeof lean->loss));
    PROMISE(!memcmp(lean->probe_status, chosen->probe_status, sizeof lean->probe_status));
    PROMISE(!memcmp(lean->probes, chosen->probes, sizeof lean->probes));
    PROMISE(lean->range_status == chosen->range_status && !memcmp(lean->range, chosen->range, sizeof lean->range));
    PROMISE(!memcmp(lean->logits, chosen->logits, logits));
}

static void run_both(subject *s, uint64_t *digest) {
    fs_plan plan;
    /* An instruction set that this machine lacks is refused; then the best will do. */
    if (fs_make_plan(&s->program, &s->config, &plan)) s->config.isa = FS_BEST;
    const fs_config lean = lean_config(&s->config);
    results as_lean, as_chosen;
    make_samples(s);
    make_numbers(s);
    run(s, &lean, 0x00, &as_lean);
    run(s, &s->config, 0xFF, &as_chosen);
    if (is_tame(s)) {
        if (!s->program.n_stats || s->frozen) check_same(s, &as_lean, &as_chosen);
        if (s->config.isa != FS_PLAIN) take_in(digest, as_chosen.probes, sizeof as_chosen.probes);
    }
    free(as_lean.logits), free(as_chosen.logits);
    free(s->records), free(s->values), free(s->stats), free(s->perturbed);
}

/* Judged by the plans of the plain loops, so that every machine runs the same inputs. */
static int is_affordable(const subject *s) {
    const fs_program *p = &s->program;
    const uint64_t image = (uint64_t)p->channels * p->height * p->width;
    const fs_config lean = {.batch = 1, .lanes = 1, .directions = 1, .isa = FS_PLAIN};
    fs_config chosen = s->config;
    chosen.isa = FS_PLAIN;
    fs_plan plan;
    if (fs_make_plan(p, &lean, &plan) || plan.arena > MOST_LEAN || image > MOST_LEAN) return 0;
    if (p->macs * s->samples.count > MOST_STEPS || pooling_steps(p, &plan) > MOST_POOLING) return 0;
    return !fs_make_plan(p, &chosen, &plan) && plan.arena <= MOST_CHOSEN;
}

fuzz_verdict fuzz_one(const uint8_t *data, size_t size, uint64_t *digest) {
    if (size < CONFIG) return FUZZ_REFUSED;
    subject s = {.config = read_config(data), .seed = data[6], .frozen = data[3] >> 1 & 1, .huge = data[7] % 4 == 3};
    s.samples.count = 1 + data[4] % 7u;
    /* At an odd address: a program may lie anywhere. */
    uint8_t *bytes = malloc(size - CONFIG + 1);
    memcpy(bytes + 1, data + CONFIG, size - CONFIG);
    fuzz_verdict verdict = FUZZ_REFUSED;
    if (!fs_open(&s.program, bytes + 1, size - CONFIG)) {
        choose_kept(&s);
        verdict = is_affordable(&s) ? FUZZ_RAN : FUZZ_TOO_LARGE;
        if (verdict == FUZZ_RAN) run_both(&s, digest);
    }
    free(bytes);
    return verdict;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    uint64_t digest = 0;
    fuzz_one(data, size, &digest);
    return 0;
}
