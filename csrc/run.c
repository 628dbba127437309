/* The interpreter: ops in order over a batch, for all directions, then the losses. */
#include "conv.h"

#include <string.h>

/* ---- ops other than conv ---- */

/* Borders are short and many: calls of memset would take longer than what they do. */
static void zero_few(float *at, size_t n) {
#ifdef FS_VECTORS
    for (; n >= FS_MAX_LANES; n -= FS_MAX_LANES, at += FS_MAX_LANES) memset(at, 0, 4 * FS_MAX_LANES);
    if (!n) return;
#endif
    memset(at, 0, 4 * n);
}

static void zero_border(const fs_engine *e, const fs_place *p, float *tensor) {
    /* What is right of a row and left of the next lies side by side. */
    const size_t row = fs_row_floats(p, e->lanes), sides = 2 * (size_t)p->border_w * e->lanes;
    const size_t above = p->border_h * row + sides / 2;
    for (uint32_t c = 0; c < p->c; c++) {
        float *at = tensor + c * fs_channel_floats(p, e->lanes);
        memset(at, 0, 4 * above);
        at += above + row - sides;
        for (uint32_t y = 1; y < p->h; y++, at += row) zero_few(at, sides);
        memset(at, 0, 4 * above);
    }
}

static void zero_borders(const fs_engine *e, const fs_place *p, const fs_batch *batch) {
    if (!p->fresh || !(p->border_h | p->border_w)) return;
    for (uint32_t d = 0; d < batch->directions; d++)
        for (uint32_t b = 0; b < batch->blocks; b++) zero_border(e, p, fs_tensor(e, p, d, b));
}

static void materialise_image(fs_engine *e, const fs_batch *batch) {
    const fs_place *p = &e->places[0];
    zero_borders(e, p, batch);
    for (uint32_t b = 0; b < batch->blocks; b++) {
        fs_load_block(e, batch, b);
        for (uint32_t d = 0; d < batch->directions; d++)
            for (uint32_t c = 0; c < p->c; c++)
                for (uint32_t y = 0; y < p->h; y++)
                    fs_load_row(e, batch, b, c, y, fs_row(e, p, fs_tensor(e, p, d, b), c, y));
    }
}

static void pool_op(const fs_engine *e, const fs_op *op, const fs_place *in, const fs_place *out, uint32_t d, uint32_t b) {
    float *from = fs_tensor(e, in, d, b), *to = fs_tensor(e, out, d, b);
    const fs_pool_source source = {fs_row_floats(in, e->lanes), in->h, in->h, in->w};
    for (uint32_t c = 0; c < out->c; c++)
        for (uint32_t y = 0; y < out->h; y++) {
            const fs_pooled map = {fs_row(e, in, from, c, 0), fs_row(e, out, to, c, y)};
            fs_pool_row(e, op, &source, &map, 1, y, out->w);
        }
}

/* Writes a tensor into another, its first number at channel c, row y and column x. */
static void copy_into(const fs_engine *e, const fs_place *in, const fs_place *out, uint32_t d, uint32_t b, uint32_t c,
                      uint32_t y, uint32_t x) {
    float *from = fs_tensor(e, in, d, b), *to = fs_tensor(e, out, d, b);
    for (uint32_t i = 0; i < in->c; i++)
        for (uint32_t j = 0; j < in->h; j++)
            memcpy(fs_row(e, out, to, c + i, y + j) + (size_t)x * e->lanes, fs_row(e, in, from, i, j),
                   4 * (size_t)in->w * e->lanes);
}

static void cat_op(const fs_engine *e, const fs_op *op, const fs_place *out, uint32_t d, uint32_t b) {
    const fs_place *first = &e->places[op->a];
    copy_into(e, first, out, d, b, 0, 0, 0);
    copy_into(e, &e->places[op->b], out, d, b, first->c, 0, 0);
}

static void pad_op(const fs_engine *e, const fs_op *op, const fs_place *out, uint32_t d, uint32_t b) {
    float *to = fs_tensor(e, out, d, b);
    memset(to, 0, 4 * (size_t)fs_place_positions(out) * e->lanes);
    copy_into(e, &e->places[op->a], out, d, b, 0, op->window.kh, op->window.kw);
}

/* add, mul and act: row by row, since two tensors may have different borders. */
static void row_op(const fs_engine *e, const fs_op *op, const fs_place *out, uint32_t d, uint32_t b) {
    const fs_place *pa = &e->places[op->a], *pb = &e->places[op->b];
    float *a = fs_tensor(e, pa, d, b), *second = fs_tensor(e, pb, d, b), *to = fs_tensor(e, out, d, b);
    const size_t n = (size_t)out->w * e->lanes;
    for (uint32_t c = 0; c < out->c; c++)
        for (uint32_t y = 0; y < out->h; y++) {
            float *row = fs_row(e, out, to, c, y), *left = fs_row(e, pa, a, c, y);
            if (fs_has(FS_LAYER_ADD) && op->kind == FS_ADD)
                e->isa->add(row, left, fs_row(e, pb, second, c, y), n, op->act);
            else if (fs_has(FS_LAYER_MUL) && op->kind == FS_MUL) {
                const int whole = pb->h == out->h && pb->w == out->w; /* or one number for each channel */
                e->isa->mul(row, left, fs_row(e, pb, second, c, whole ? y : 0), n, whole ? n : e->lanes, op->act);
            } else {
                if (row != left) memcpy(row, left, 4 * n);
                if (op->act) e->isa->act(row, n, op->act, op->number);
                continue;
            }
            fs_activate(e, op, row, n);
        }
}

static fs_map map_of(const fs_engine *e, const fs_place *p) {
    const fs_map map = {p->h, p->w, e->lanes, fs_row_floats(p, e->lanes)};
    return map;
}

/* A norm, and the add behind it where both are one pass over the map. */
typedef struct {
    const fs_op *op, *add; /* add: NULL where there is none */
    uint32_t number;       /* of the norm */
    const fs_place *place;
    const fs_place *plus;  /* what is added */
} norm;

/* Without vectors the compiler knows that there is none. */
static const fs_op *add_of(const norm *n) {
#ifdef FS_VECTORS
    return n->add;
#else
    (void)n;
    return NULL;
#endif
}

/* The activation, and its slope, are those of the last of both. */
static const fs_op *last_of(const norm *n) { return add_of(n) ? add_of(n) : n->op; }

/* Whether the norm `op` goes in one pass with the op behind it, which adds to its result in place. */
static int find_add(const fs_engine *e, const fs_op *op, uint32_t number, uint32_t end, fs_op *add) {
    if (!fs_has(FS_LAYER_ADD) || !fs_is_wide(e) || op->act || number + 1 >= end) return 0;
    fs_read_op(&e->program, number + 1, add);
    const fs_place *made = &e->places[number + 1], *sum = made + 1;
    const int reads = (add->a == number + 1) != (add->b == number + 1);
    return add->kind == FS_ADD && reads && !sum->fresh && sum->offset == made->offset;
}

/* y = x * a + b for one channel, with one mean and deviation (the root of variance + eps) per lane. */
static void normalise(fs_engine *e, const norm *n, uint32_t d, uint32_t block, uint32_t c, const float *mean,
                      const float *deviation) {
    const fs_place *p = n->place;
    float a[FS_MAX_LANES], b[FS_MAX_LANES];
    float gamma = 1.0f, beta = 0.0f;
    if (n->op->flags & 1) {
        gamma = *fs_parameters(e, d, e->steps[n->number].values + c, 1);
        beta = *fs_parameters(e, d, e->steps[n->number].values + p->c + c, 1);
    }
    for (uint32_t l = 0; l < e->lanes; l++) {
        a[l] = gamma / deviation[l];
        b[l] = beta - mean[l] * a[l];
    }
    const fs_map map = map_of(e, p);
    fs_affine f = {.a = a, .b = b, .act = last_of(n)->act};
    if (add_of(n)) {
        f.plus = fs_row(e, n->plus, fs_tensor(e, n->plus, d, block), c, 0);
        f.plus_pitch = fs_row_floats(n->plus, e->lanes);
    }
    float *tensor = fs_tensor(e, p, d, block);
    e->isa->affine(fs_row(e, p, tensor, c, 0), &map, &f);
    for (uint32_t y = 0; y < p->h; y++) fs_activate(e, last_of(n), fs_row(e, p, tensor, c, y), (size_t)p->w * e->lanes);
}

static void set_moments(double sum, double square, double n, float *mean, float *variance) {
    const double m = sum / n, v = square / n - m * m;
    *mean = (float)m;
    *variance = v > 0 ? (float)v : 0.0f;
}

static float deviation_of(float variance, const fs_op *op) { return fs_sqrt(variance + op->number); }

static void group_norm(fs_engine *e, const norm *n, uint32_t d, uint32_t block) {
    const fs_op *op = n->op;
    const fs_place *p = n->place;
    float *tensor = fs_tensor(e, p, d, block);
    const fs_map map = map_of(e, p);
    const uint32_t channels = p->c / op->groups;
    for (uint32_t group = 0; group < op->groups; group++) {
        const uint32_t first = group * channels;
        fs_moments m = {{0}, {0}};
        for (uint32_t c = first; c < first + channels; c++) e->isa->moments(fs_row(e, p, tensor, c, 0), &map, &m);
        float mean[FS_MAX_LANES], deviation[FS_MAX_LANES];
        for (uint32_t l = 0; l < e->lanes; l++) {
            set_moments(m.sum[l], m.square[l], (double)(channels * p->h * p->w), &mean[l], &deviation[l]);
            deviation[l] = deviation_of(deviation[l], op);
        }
        for (uint32_t c = first; c < first + channels; c++) normalise(e, n, d, block, c, mean, deviation);
    }
}

/* Statistics of one channel over the batch: images' sums added in image order. */
static void batch_moments(const fs_engine *e, const fs_place *p, const fs_batch *batch, uint32_t d, uint32_t c,
                          float *mean, float *variance) {
    const fs_map map = map_of(e, p);
    double sum = 0, square = 0;
    for (uint32_t block = 0; block < batch->blocks; block++) {
        fs_moments m = {{0}, {0}};
        e->isa->moments(fs_row(e, p, fs_tensor(e, p, d, block), c, 0), &map, &m);
        for (uint32_t l = 0; l < e->lanes && block * e->lanes + l < batch->images; l++)
            sum += m.sum[l], square += m.square[l];
    }
    set_moments(sum, square, (double)batch->images * p->h * p->w, mean, variance);
}

static void batch_norm(fs_engine *e, const norm *n, const fs_batch *batch, uint32_t d) {
    const fs_place *p = n->place;
    const uint32_t at = e->steps[n->number].stats;
    for (uint32_t c = 0; c < p->c; c++) {
        float mean[FS_MAX_LANES], deviation[FS_MAX_LANES], variance;
        if (e->stats) mean[0] = e->stats[at + c], variance = e->stats[at + p->c + c];
        else batch_moments(e, p, batch, d, c, &mean[0], &variance);
        if (e->stats_out) {
            const float share = (float)batch->images / (float)batch->samples->count;
            e->stats_out[at + c] += share * mean[0];
            e->stats_out[at + p->c + c] += share * variance;
        }
        deviation[0] = deviation_of(variance, n->op);
        for (uint32_t l = 1; l < e->lanes; l++) mean[l] = mean[0], deviation[l] = deviation[0];
        for (uint32_t block = 0; block < batch->blocks; block++)
            normalise(e, n, d, block, c, mean, deviation);
    }
}

static void norm_op(fs_engine *e, const norm *n, const fs_batch *batch, uint32_t d) {
    const fs_place *in = &e->places[n->op->a];
    for (uint32_t b = 0; n->place->fresh && b < batch->blocks; b++) copy_into(e, in, n->place, d, b, 0, 0, 0);
    if (fs_has(FS_LAYER_BATCH_NORM) && !n->op->groups) batch_norm(e, n, batch, d);
    else if (fs_has(FS_LAYER_GROUP_NORM))
        for (uint32_t b = 0; b < batch->blocks; b++) group_norm(e, n, d, b);
}

/* A norm for all directions; returns how many ops that were. */
static uint32_t norm_ops(fs_engine *e, const fs_op *op, uint32_t number, uint32_t end, const fs_batch *batch) {
    fs_op add;
    norm n = {.op = op, .number = number, .place = &e->places[number + 1]};
    if (find_add(e, op, number, end, &add)) n.add = &add, n.plus = &e->places[add.a == number + 1 ? add.b : add.a];
    for (uint32_t d = 0; d < batch->directions; d++) norm_op(e, &n, batch, d);
    return add_of(&n) ? 2 : 1;
}

/* ---- a batch ---- */

static void note_high_water(fs_engine *e, const fs_place *p, const fs_batch *batch) {
    const float *end = fs_tensor(e, p, batch->directions - 1, batch->blocks - 1) + fs_place_positions(p) * e->lanes;
    const size_t bytes = (size_t)((const uint8_t *)end - (const uint8_t *)e);
    if (bytes > e->high_water) e->high_water = bytes;
}

/* An op that looks at one block of one direction at a time. */
static void block_op(const fs_engine *e, const fs_op *op, uint32_t number, uint32_t d, uint32_t b) {
    const fs_place *out = &e->places[number + 1];
    if (fs_has(FS_LAYER_POOL) && op->kind == FS_POOL) pool_op(e, op, &e->places[op->a], out, d, b);
    else if (fs_has(FS_LAYER_CAT) && op->kind == FS_CAT) cat_op(e, op, out, d, b);
    else if (fs_has(FS_LAYER_PAD) && op->kind == FS_PAD) pad_op(e, op, out, d, b);
    else row_op(e, op, out, d, b);
}

/* Ops [first, end). From an op on that is not the first, all directions share what was made before it, by the first of
 * them. */
static void forward(fs_engine *e, const fs_batch *batch, uint32_t first, uint32_t end) {
    e->own = first ? e->places + first + 1 : e->places;
    if (!e->streamed && !first) materialise_image(e, batch);
    fs_lap(FS_TIME_IMAGES);
    for (uint32_t i = first, done; i < end; i += done) {
        fs_op op;
        fs_read_op(&e->program, i, &op);
        done = 1;
        note_high_water(e, &e->places[i + 1], batch);
        zero_borders(e, &e->places[i + 1], batch);
        if (op.kind == FS_CONV) {
            fs_conv(e, i, &op, batch);
        } else if ((fs_has(FS_LAYER_BATCH_NORM) || fs_has(FS_LAYER_GROUP_NORM)) && op.kind == FS_NORM) {
            done = norm_ops(e, &op, i, end, batch);
        } else {
            for (uint32_t d = 0; d < batch->directions; d++)
                for (uint32_t b = 0; b < batch->blocks; b++) block_op(e, &op, i, d, b);
        }
        fs_lap(i);
    }
}

/* Where the logits of an image stand, those of a class `step` numbers after those of the class before. */
static const float *find_logits(const fs_engine *e, uint32_t d, uint32_t number, size_t *step) {
    const fs_place *p = &e->places[e->program.n_ops];
    *step = fs_channel_floats(p, e->lanes);
    return fs_row(e, p, fs_tensor(e, p, d, number / e->lanes), 0, 0) + number % e->lanes;
}

/* How many images' softmaxes are found together. */
static uint32_t softmax_images(const fs_engine *e) {
    const uint32_t vector = fs_vector(e->isa);
    return vector && e->lanes == vector ? vector : 1;
}

static void find_softmaxes(const fs_engine *e, const float *logits, size_t step, fs_softmax *out) {
    if (softmax_images(e) > 1) {
        e->isa->softmax(logits, step, e->program.classes, out);
        return;
    }
    float largest = logits[0];
    uint32_t best = 0;
    for (uint32_t c = 1; c < e->program.classes; c++)
        if (logits[c * step] > largest) largest = logits[c * step], best = c;
    double sum = 0;
    for (uint32_t c = 0; c < e->program.classes; c++) sum += fs_exp((double)logits[c * step] - largest);
    out->sum = sum, out->largest = largest, out->best = best;
}

/* Cross-entropy of an image, in float64, given the logit of its class. */
static double cross_entropy(const fs_softmax *s, float logit) {
    if (s->sum != s->sum) return s->sum; /* a logit is not a number; fs_log knows only numbers */
    return fs_log(s->sum) - ((double)logit - s->largest);
}

static fs_status check_count(const fs_samples *samples) {
    if (!samples->count) return FS_NO_SAMPLES;
    return samples->count > INT32_MAX ? FS_BAD_CONFIG : FS_OK; /* so that counting in batches cannot wrap */
}

static fs_status check_samples(const fs_engine *e, const fs_samples *samples) {
    const fs_status status = check_count(samples);
    if (status) return status;
    for (uint32_t i = 0; i < samples->count; i++)
        if (samples->labels[(size_t)i * samples->stride] >= e->program.classes) return FS_BAD_LABEL;
    return FS_OK;
}

static fs_status check_stats(const fs_engine *e, const float *stats) {
    for (uint32_t i = 0; stats && i < e->program.n_ops; i++) {
        fs_op op;
        fs_read_op(&e->program, i, &op);
        if (op.kind != FS_NORM || op.groups) continue;
        const uint32_t channels = e->places[i + 1].c;
        for (uint32_t c = 0; c < channels; c++)
            if (stats[e->steps[i].stats + channels + c] < 0) return FS_BAD_STATS;
    }
    return FS_OK;
}

static fs_batch next_batch(const fs_engine *e, const fs_samples *samples, uint32_t first, uint32_t directions) {
    const uint32_t left = samples->count - first;
    fs_batch batch = {directions, left < e->batch ? left : e->batch, 0, samples, first};
    batch.blocks = (batch.images + e->lanes - 1) / e->lanes;
    return batch;
}

/* Adds the losses of a batch's images, in order, to the sum of each direction. */
static void add_losses(const fs_engine *e, const fs_batch *batch, double *losses, uint32_t *correct) {
    const fs_samples *samples = batch->samples;
    fs_softmax made[FS_MAX_LANES];
    for (uint32_t d = 0; d < batch->directions; d++)
        for (uint32_t i = 0; i < batch->images; i++) {
            const uint32_t label = samples->labels[(size_t)(batch->first + i) * samples->stride];
            const fs_softmax *s = made + i % softmax_images(e);
            size_t step;
            const float *logits = find_logits(e, d, i, &step);
            if (s == made) find_softmaxes(e, logits, step, made);
            losses[d] += cross_entropy(s, logits[label * step]);
            *correct += s->best == label;
        }
    fs_lap(FS_TIME_LOSS);
}

static fs_status check_finite(const double *losses, uint32_t n) {
    for (uint32_t d = 0; d < n; d++)
        if (!(losses[d] - losses[d] == 0)) return FS_NOT_FINITE;
    return FS_OK;
}

/* Sums of losses over all samples for `n` directions side by side. */
static fs_status run(fs_engine *e, const fs_samples *samples, uint32_t n, double *losses, uint32_t *correct) {
    for (uint32_t d = 0; d < n; d++) losses[d] = 0;
    for (uint32_t first = 0; first < samples->count; first += e->batch) {
        const fs_batch batch = next_batch(e, samples, first, n);
        forward(e, &batch, 0, e->program.n_ops);
        add_losses(e, &batch, losses, correct);
    }
    return check_finite(losses, n);
}

static void use(fs_engine *e, const float *values, size_t stride, const float *stats) {
    e->values = values, e->values_stride = stride, e->stats = stats;
    e->noise = NULL, e->stats_out = NULL;
}

fs_status fs_loss(fs_engine *e, const float *values, const float *stats, const fs_samples *samples, double *loss,
                  uint32_t *correct) {
    fs_status status = check_samples(e, samples);
    if (status || (status = check_stats(e, stats))) return status;
    use(e, values, 0, stats);
    *correct = 0;
    return run(e, samples, 1, loss, correct);
}

fs_status fs_logits(fs_engine *e, const float *values, const float *stats, const fs_samples *samples, float *logits) {
    fs_status status = check_count(samples);
    if (status || (status = check_stats(e, stats))) return status;
    use(e, values, 0, stats);
    for (uint32_t first = 0; first < samples->count; first += e->batch) {
        const fs_batch batch = next_batch(e, samples, first, 1);
        forward(e, &batch, 0, e->program.n_ops);
        for (uint32_t i = 0; i < batch.images; i++) {
            size_t step;
            const float *found = find_logits(e, 0, i, &step);
            for (uint32_t c = 0; c < e->program.classes; c++) *logits++ = found[c * step];
        }
    }
    return FS_OK;
}

fs_status fs_batch_stats(fs_engine *e, const float *values, const fs_samples *samples, float *stats) {
    const fs_status status = check_count(samples);
    if (status) return status;
    use(e, values, 0, NULL);
    memset(stats, 0, 4 * (size_t)e->program.n_stats);
    e->stats_out = stats;
    for (uint32_t first = 0; first < samples->count; first += e->batch) {
        const fs_batch batch = next_batch(e, samples, first, 1);
        forward(e, &batch, 0, e->program.n_ops);
    }
    return FS_OK;
}

/* ---- probes ---- */

typedef struct {
    const float *values, *stats;
    const fs_samples *samples;
    fs_directions directions; /* with the size of their range */
} probe;

static size_t perturbed_stride(const fs_engine *e) {
    return ((size_t)e->program.n_live + FS_MAX_LANES - 1) / FS_MAX_LANES * FS_MAX_LANES;
}

/* As many directions as run side by side, of those that are not yet done. */
static uint32_t next_group(const fs_engine *e, const probe *p, uint32_t done) {
    const uint32_t left = p->directions.count - done;
    return left < e->directions ? left : e->directions;
}

/* The values that no direction perturbs are the same in all perturbed copies. */
static void copy_the_rest(fs_engine *e, const probe *p) {
    const uint32_t at = p->directions.at, end = at + p->directions.size;
    for (uint32_t d = 0; !e->by_row && d < next_group(e, p, 0); d++) {
        float *copy = e->perturbed + d * perturbed_stride(e);
        memcpy(copy, p->values, 4 * (size_t)at);
        memcpy(copy + end, p->values + end, 4 * (size_t)(e->program.n_live - end));
    }
}

/* From now on the engine runs n directions, those after the first `done`. */
static void use_directions(fs_engine *e, const probe *p, uint32_t done, uint32_t n) {
    const fs_directions *d = &p->directions;
    const uint32_t first = d->first + done * d->step;
    if (e->by_row) {
        use(e, p->values, 0, p->stats);
        e->noise = d, e->noise_k = first;
        return;
    }
    const size_t stride = perturbed_stride(e);
    for (uint32_t i = 0; i < n; i++)
        fs_perturb(d, first + i * d->step, 0, d->size, p->values + d->at, e->perturbed + i * stride + d->at);
    use(e, e->perturbed, stride, p->stats);
    fs_lap(FS_TIME_PERTURB);
}

/* The last op that a run may begin at and before which none uses a value of the range; 0 is a whole pass. */
static uint32_t find_start(const fs_engine *e, const fs_directions *range) {
    uint32_t start = 0;
    for (uint32_t i = 0; i < e->program.n_ops; i++) {
        fs_op op;
        fs_read_op(&e->program, i, &op);
        if (e->places[i + 1].start) start = i;
        const uint32_t at = e->steps[i].values, end = at + fs_op_values(&op, e->places[op.a].c);
        if (at < range->at + range->size && range->at < end) break;
    }
    return start;
}

/* Every direction by passes of its own over all samples. */
static fs_status probe_by_passes(fs_engine *e, const probe *p, double *losses, double *base) {
    fs_status status = FS_OK;
    uint32_t correct = 0;
    for (uint32_t done = 0, n; !status && done < p->directions.count; done += n) {
        n = next_group(e, p, done);
        use_directions(e, p, done, n);
        status = run(e, p->samples, n, losses + done, &correct);
    }
    if (status || !base) return status;
    use(e, p->values, 0, p->stats);
    return run(e, p->samples, 1, base, &correct);
}

/* Batch by batch: ops before `start` once, the others for every direction. */
static fs_status probe_by_batches(fs_engine *e, const probe *p, uint32_t start, double *losses, double *base) {
    const uint32_t count = p->directions.count, n_ops = e->program.n_ops;
    uint32_t correct = 0;
    for (uint32_t i = 0; i < count; i++) losses[i] = 0;
    if (base) *base = 0;
    for (uint32_t first = 0; first < p->samples->count; first += e->batch) {
        fs_batch batch = next_batch(e, p->samples, first, 1);
        use(e, p->values, 0, p->stats);
        forward(e, &batch, 0, base ? n_ops : start);
        if (base) add_losses(e, &batch, base, &correct);
        for (uint32_t done = 0; done < count; done += batch.directions) {
            batch.directions = next_group(e, p, done);
            use_directions(e, p, done, batch.directions);
            forward(e, &batch, start, n_ops);
            add_losses(e, &batch, losses + done, &correct);
        }
    }
    const fs_status status = check_finite(losses, count);
    return status || !base ? status : check_finite(base, 1);
}

fs_status fs_probe(fs_engine *e, const float *values, const float *stats, const fs_samples *samples,
                   const fs_directions *directions, double *losses, double *base) {
    const uint32_t n_live = e->program.n_live;
    probe p = {values, stats, samples, *directions};
    if (!p.directions.size && !p.directions.at) p.directions.size = n_live;
    const fs_directions *range = &p.directions;
    if (range->at > n_live || range->size > n_live - range->at || (n_live && !range->size)) return FS_BAD_CONFIG;
    fs_status status = check_samples(e, samples);
    if (status || (status = check_stats(e, stats))) return status;
    const uint32_t start = find_start(e, range);
    copy_the_rest(e, &p);
    return start ? probe_by_batches(e, &p, start, losses, base) : probe_by_passes(e, &p, losses, base);
}
