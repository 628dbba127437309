/* Mutates valid programs, knowing the format, and runs the fuzz target on each.
 *
 *     driver run  CORPUS SEED N     runs N mutants; prints how many were refused, too large, run, and the digest
 *     driver emit CORPUS SEED N     writes N mutants instead: per mutant a u32 size, a verdict byte, the program
 *
 * CORPUS is one file of valid programs, each after its u32 size. Mutants are the same for a seed on every machine;
 * those that the engine accepts join the corpus, so that changes add up. */
#include "fuzz.h"

#include "foreseed.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LONGEST = 1 << 16, POOL = 4096, HEADER = 32, OP = 40, MOST_OPS = 256 };

typedef struct {
    size_t size;
    uint8_t bytes[LONGEST]; /* the program, without the config */
} mutant;

typedef struct {
    size_t size;
    uint8_t *bytes;
} program;

static program pool[POOL];
static uint32_t pooled, originals;
static uint64_t state;

static uint64_t draw(void) {
    uint64_t z = state += 0x9E3779B97F4A7C15u;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return z ^ z >> 31;
}
static size_t below(size_t n) { return n ? draw() % n : 0; }

/* ---- fields ---- */

typedef struct {
    uint8_t at, bytes;
} field;

static const field HEADER_FIELDS[] = {{4, 2},  {6, 2},  {8, 2},  {10, 2}, {12, 2}, {14, 2},
                                      {16, 4}, {20, 4}, {24, 4}, {28, 4}, {32, 4}, {36, 4}};
static const field OP_FIELDS[] = {{0, 1},  {1, 1},  {2, 1},  {3, 1},  {4, 2},  {6, 2},  {8, 2},  {10, 2}, {12, 2},
                                  {14, 2}, {16, 2}, {18, 2}, {20, 2}, {22, 2}, {24, 1}, {25, 1}, {26, 1}, {27, 1},
                                  {28, 1}, {29, 1}, {30, 1}, {31, 1}, {32, 4}, {36, 4}};
enum { N_HEADER_FIELDS = sizeof HEADER_FIELDS / sizeof(field), N_OP_FIELDS = sizeof OP_FIELDS / sizeof(field) };

static uint32_t get(const uint8_t *p, uint32_t bytes) {
    uint32_t value = 0;
    for (uint32_t i = 0; i < bytes; i++) value |= (uint32_t)p[i] << 8 * i;
    return value;
}
static void put(uint8_t *p, uint32_t bytes, uint32_t value) {
    for (uint32_t i = 0; i < bytes; i++) p[i] = (uint8_t)(value >> 8 * i);
}

static uint32_t other_value(uint32_t old) {
    static const uint32_t interesting[] = {0,   1,      2,      3,       4,          7,          8,          15,
                                           16,  127,    128,    254,     255,        256,        0x7FFF,     0x8000,
                                           257, 0xFFFE, 0xFFFF, 0x10000, 0x0FFFFFFF, 0x10000000, 0x7F800000, 0xFFFFFFFF};
    switch (below(4)) {
    case 0: return old + 1 + (uint32_t)below(2);
    case 1: return old - 1 - (uint32_t)below(2);
    case 2: return interesting[below(sizeof interesting / 4)];
    default: return (uint32_t)below(12);
    }
}

static size_t ops_at(const mutant *m) { return HEADER + 8 * (size_t)get(m->bytes + 8, 2); }
static size_t n_ops(const mutant *m) {
    const size_t n = get(m->bytes + 6, 2), room = m->size > ops_at(m) ? (m->size - ops_at(m)) / OP : 0;
    return n < room ? n : room;
}
static uint8_t *op_at(mutant *m, size_t i) { return m->bytes + ops_at(m) + OP * i; }

/* ---- mutations ---- */

static void open_gap(mutant *m, size_t at, size_t n) {
    if (at > m->size || m->size + n > LONGEST) return;
    memmove(m->bytes + at + n, m->bytes + at, m->size - at);
    m->size += n;
}
static void close_gap(mutant *m, size_t at, size_t n) {
    if (at + n > m->size) return;
    memmove(m->bytes + at, m->bytes + at + n, m->size - at - n);
    m->size -= n;
}

/* Draws stand in statements of their own: compilers differ in which argument they evaluate first. */

static void flip_bit(mutant *m) {
    const size_t bit = below(8 * m->size);
    m->bytes[bit / 8] ^= (uint8_t)(1 << bit % 8);
}

static void set_byte(mutant *m) {
    uint8_t *byte = m->bytes + below(m->size);
    *byte = (uint8_t)other_value(*byte);
}

static void edit_header(mutant *m) {
    const field f = HEADER_FIELDS[below(N_HEADER_FIELDS)];
    put(m->bytes + f.at, f.bytes, other_value(get(m->bytes + f.at, f.bytes)));
}

static void edit_op(mutant *m) {
    if (!n_ops(m)) return;
    const field f = OP_FIELDS[below(N_OP_FIELDS)];
    uint8_t *at = op_at(m, below(n_ops(m))) + f.at;
    put(at, f.bytes, below(4) ? other_value(get(at, f.bytes)) : get(op_at(m, below(n_ops(m))) + f.at, f.bytes));
}

/* Another size that may well be right: of the input, or of a conv's channels, groups, kernel, stride or padding. */
static void reshape(mutant *m) {
    static const field sizes[] = {{8, 2}, {10, 2}, {12, 2}, {14, 2}, {16, 2}, {18, 2}, {20, 2}, {22, 2}};
    const size_t i = below(n_ops(m) + 1);
    if (i == n_ops(m)) {
        const size_t side = below(2);
        put(m->bytes + 10 + 2 * side, 2, 1 + (uint32_t)below(40));
    } else if (op_at(m, i)[0] == 1) {
        const field f = sizes[below(sizeof sizes / sizeof *sizes)];
        put(op_at(m, i) + f.at, f.bytes, (uint32_t)(f.at == 8 ? 1 + below(20) : below(5)));
        if (below(4) == 0) op_at(m, i)[3] = 255;
    }
}

static void duplicate_op(mutant *m) {
    const size_t n = n_ops(m);
    if (!n || n >= MOST_OPS || m->size + OP > LONGEST) return;
    const size_t from = below(n);
    uint8_t record[OP];
    memcpy(record, op_at(m, from), OP);
    open_gap(m, ops_at(m) + OP * (from + 1), OP);
    memcpy(op_at(m, from + 1), record, OP);
    put(m->bytes + 6, 2, (uint32_t)n + 1);
    /* It reads what the first one made, and what read that now reads the second. */
    put(op_at(m, from + 1) + 4, 2, (uint32_t)from + 1);
    for (size_t i = from + 2; i <= n; i++)
        for (size_t at = 4; at <= 6; at += 2) {
            const uint32_t read = get(op_at(m, i) + at, 2);
            if (read > from) put(op_at(m, i) + at, 2, read + 1);
        }
}

static void remove_op(mutant *m) {
    const size_t n = n_ops(m);
    if (n < 2) return;
    close_gap(m, ops_at(m) + OP * below(n), OP);
    put(m->bytes + 6, 2, (uint32_t)n - 1);
}

/* Lets a conv or norm use the values of an earlier op of its kind. */
static void share(mutant *m) {
    if (!n_ops(m)) return;
    uint8_t *op = op_at(m, below(n_ops(m)));
    op[3] = (uint8_t)below(n_ops(m));
    op[2] |= 2;
    put(op + 32, 4, get(op_at(m, op[3]) + 32, 4));
    put(m->bytes + 4, 2, 2);
}

static void truncate(mutant *m) { m->size -= below(below(8) ? 9 : m->size); }

static void extend(mutant *m) {
    for (size_t n = below(9); n && m->size < LONGEST; n--) m->bytes[m->size++] = (uint8_t)draw();
}

/* The start of one program and the end of another. */
static void splice(mutant *m) {
    const program *other = &pool[below(pooled)];
    const size_t head = below(m->size + 1), tail = below(other->size + 1);
    if (head + tail > LONGEST) return;
    memcpy(m->bytes + head, other->bytes + other->size - tail, tail);
    m->size = head + tail;
}

/* ---- repair: a change in one place is seldom valid before others follow ---- */

typedef struct {
    uint32_t c, h, w;
} shape;

static int slide(uint32_t *size, uint32_t kernel, uint32_t stride, uint32_t padding, int ceil) {
    if (!kernel || !stride || *size + 2 * padding < kernel) return 0;
    const uint32_t rest = *size + 2 * padding - kernel;
    uint32_t out = rest / stride + 1;
    if (ceil && rest % stride && out * stride < *size + padding) out++;
    *size = out;
    return 1;
}

static int repair_pool(const uint8_t *op, shape *s) {
    if (op[24] != 4)
        return slide(&s->h, op[25], op[27], op[29], op[2] & 4) && slide(&s->w, op[26], op[28], op[30], op[2] & 4);
    s->h = op[25], s->w = op[26];
    return op[25] && op[26];
}

static int repair_conv(uint8_t *op, shape *s, int is_last, uint32_t *live) {
    if (is_last && !op[24]) {
        const uint32_t window[] = {s->h, s->w, 1, 1, 0, 0};
        for (uint32_t i = 0; i < 6; i++) put(op + 12 + 2 * i, 2, window[i]);
    }
    const uint32_t channels = get(op + 8, 2), groups = get(op + 10, 2);
    if (!groups) return 0;
    const uint64_t total = (uint64_t)channels * (s->c / groups) * get(op + 12, 2) * get(op + 14, 2);
    if (op[3] == 255 && total < 1 << 20) put(op + 32, 4, (uint32_t)total);
    if (!(op[2] & 2)) *live += get(op + 32, 4) + (op[2] & 1 ? channels : 0);
    s->c = channels;
    return slide(&s->h, (get(op + 12, 2) - 1) * (op[6] + 1u) + 1, get(op + 16, 2), get(op + 20, 2), 0) &&
           slide(&s->w, (get(op + 14, 2) - 1) * (op[7] + 1u) + 1, get(op + 18, 2), get(op + 22, 2), 0);
}

/* Makes dense layers' weights, the counts of the header and the last layer's kernel fit the ops. */
static void repair(mutant *m) {
    shape shapes[MOST_OPS + 1] = {{get(m->bytes + 8, 2), get(m->bytes + 10, 2), get(m->bytes + 12, 2)}};
    const size_t n = n_ops(m);
    uint32_t live = 0, stats = 0;
    if (!n || n > MOST_OPS) return;
    for (size_t i = 0; i < n; i++) {
        uint8_t *op = op_at(m, i);
        if (get(op + 4, 2) > i) return;
        shape s = shapes[get(op + 4, 2)];
        if (op[0] == 1 && !repair_conv(op, &s, i + 1 == n, &live)) return;
        if (op[0] == 3) live += (op[2] & 3) == 1 ? 2 * s.c : 0, stats += get(op + 10, 2) ? 0 : 2 * s.c;
        if (op[0] == 7 && get(op + 6, 2) <= i) s.c += shapes[get(op + 6, 2)].c;
        if (op[0] == 8) s.h += get(op + 12, 2) + get(op + 16, 2), s.w += get(op + 14, 2) + get(op + 18, 2);
        if (op[24] && !repair_pool(op, &s)) return;
        shapes[i + 1] = s;
    }
    put(m->bytes + 14, 2, shapes[n].c);
    put(m->bytes + 16, 4, live);
    put(m->bytes + 20, 4, stats);
    put(m->bytes + 24, 4, (uint32_t)(m->size - ops_at(m) - OP * n));
}

static void mutate(mutant *m) {
    static void (*const mutations[])(mutant *) = {flip_bit, set_byte,     edit_header, edit_op,  edit_op, edit_op,
                                                  reshape,  reshape,      reshape,     reshape,  reshape, reshape,
                                                  splice,   duplicate_op, duplicate_op, remove_op, truncate, extend,
                                                  share};
    const program *from = &pool[below(2) ? below(pooled) : below(originals)];
    m->size = from->size;
    memcpy(m->bytes, from->bytes, from->size);
    for (size_t n = below(4); n; n--)
        if (m->size > HEADER) mutations[below(sizeof mutations / sizeof *mutations)](m);
    if (m->size > HEADER && below(5)) repair(m);
}

/* ---- driving ---- */

static void keep(const uint8_t *bytes, size_t size) {
    /* When it is full, mutants make room for mutants; the originals stay. */
    const uint32_t at = pooled < POOL ? pooled++ : originals + (uint32_t)below(POOL - originals);
    free(pool[at].bytes);
    pool[at].bytes = malloc(size);
    pool[at].size = size;
    memcpy(pool[at].bytes, bytes, size);
}

static int load(const char *path) {
    static uint8_t bytes[LONGEST];
    uint8_t size[4];
    FILE *file = fopen(path, "rb");
    if (!file) return 0;
    while (pooled < POOL / 2 && fread(size, 1, 4, file) == 4) {
        const size_t n = get(size, 4);
        if (n > LONGEST || fread(bytes, 1, n, file) != n) break;
        keep(bytes, n);
    }
    fclose(file);
    originals = pooled;
    return pooled > 0;
}

static void emit(const mutant *m, int accepted) {
    uint8_t head[5];
    put(head, 4, (uint32_t)m->size);
    head[4] = (uint8_t)accepted;
    fwrite(head, 1, 5, stdout);
    fwrite(m->bytes, 1, m->size, stdout);
}

int main(int argc, char **argv) {
    static mutant m;
    static uint8_t input[CONFIG + LONGEST];
    uint32_t counts[FUZZ_VERDICTS] = {0};
    uint64_t digest = 0xCBF29CE484222325u;
    if (argc != 5 || !load(argv[2])) return fprintf(stderr, "usage: driver run|emit CORPUS SEED N\n"), 2;
    state = strtoull(argv[3], NULL, 10);
    for (unsigned long i = strtoul(argv[4], NULL, 10); i; i--) {
        fs_program program;
        mutate(&m);
        const int accepted = fs_open(&program, m.bytes, m.size) == FS_OK;
        if (accepted) keep(m.bytes, m.size);
        if (!strcmp(argv[1], "emit")) {
            emit(&m, accepted);
            continue;
        }
        put(input, 4, (uint32_t)draw()), put(input + 4, 4, (uint32_t)draw());
        memcpy(input + CONFIG, m.bytes, m.size);
        counts[fuzz_one(input, CONFIG + m.size, &digest)]++;
    }
    for (uint32_t i = 0; i < pooled; i++) free(pool[i].bytes);
    if (strcmp(argv[1], "run")) return 0;
    printf("%u refused, %u too large, %u run, digest %016llx\n", counts[FUZZ_REFUSED], counts[FUZZ_TOO_LARGE],
           counts[FUZZ_RAN], (unsigned long long)digest);
    return 0;
}
