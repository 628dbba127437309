/* Runs a program on the processor at hand and prints what must be the same on all, as hexadecimal bits.
 *
 *     run PROGRAM VALUES SHARD BATCH LANES ISA
 *
 * VALUES are float32, SHARD holds records of a label byte and the pixels, ISA is the number of an instruction set. */
#include "foreseed.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { PROBES = 6, COORDINATES = 1000 };

static void *read_all(const char *path, size_t *size) {
    FILE *file = fopen(path, "rb");
    if (!file || fseek(file, 0, SEEK_END)) exit(3);
    *size = (size_t)ftell(file);
    rewind(file);
    void *bytes = malloc(*size + 1);
    if (fread(bytes, 1, *size, file) != *size) exit(3);
    fclose(file);
    return bytes;
}

static void print_losses(const double *losses) {
    for (int i = 0; i < PROBES; i++) {
        uint64_t bits;
        memcpy(&bits, &losses[i], 8);
        printf("%016llx%c", (unsigned long long)bits, i + 1 < PROBES ? ' ' : '\n');
    }
}

static void print_floats(const float *numbers, int n) {
    for (int i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, &numbers[i], 4);
        printf("%08lx%c", (unsigned long)bits, i + 1 < n ? ' ' : '\n');
    }
}

/* A part of a direction, then all of them added up, and their products with that sum. */
static void print_directions(const fs_directions *directions) {
    static float z[COORDINATES];
    const float coefficients[PROBES] = {0.5f, -1.25f, 0.3f, 2.0f, -0.7f, 0.1f};
    double products[PROBES];
    fs_direction(directions, directions->first, 77, COORDINATES, z);
    print_floats(z, COORDINATES);
    memset(z, 0, sizeof z);
    fs_accumulate(directions, coefficients, 0, COORDINATES, z);
    print_floats(z, COORDINATES);
    fs_project(directions, z, COORDINATES, products);
    print_losses(products);
}

/* Scale and codes of a direction, taken for loss differences, in 1, 2, 4 and 8 bits. */
static void print_packed(const fs_directions *directions) {
    static float z[COORDINATES];
    for (uint32_t bits = 1; bits <= 8; bits *= 2) {
        const fs_quantiser quantiser = {directions->seed, directions->round, directions->device, bits, bits / 4};
        fs_direction(directions, directions->first, 77, COORDINATES, z);
        const float scale = fs_quantise(z, COORDINATES, &quantiser);
        uint32_t word;
        memcpy(&word, &scale, 4);
        printf("%08lx ", (unsigned long)word);
        for (uint32_t i = 0; i < COORDINATES * bits / 8; i++) printf("%02x", ((const uint8_t *)z)[i]);
        printf("\n");
    }
}

static fs_engine *start(const fs_program *program, const fs_config *config) {
    fs_plan plan;
    fs_engine *engine;
    if (fs_make_plan(program, config, &plan)) exit(5);
    char *memory = malloc(plan.arena + 63);
    if (!memory || fs_start(&engine, program, config, memory + (-(uintptr_t)memory & 63), plan.arena)) exit(5);
    return engine;
}

int main(int argc, char **argv) {
    if (argc != 7) return 2;
    size_t program_size, values_size, shard_size;
    const void *bytes = read_all(argv[1], &program_size);
    const float *values = read_all(argv[2], &values_size);
    const uint8_t *shard = read_all(argv[3], &shard_size);
    fs_program program;
    const fs_status status = fs_open(&program, bytes, program_size);
    if (status) return printf("status %d, op %lu\n", (int)status, (unsigned long)program.where), 4;
    if (values_size != 4 * (size_t)program.n_live) return 4;
    const uint32_t isa = (uint32_t)atoi(argv[6]);
    const uint32_t half = program.n_live / 2;
    const fs_config config = {.batch = (uint32_t)atoi(argv[4]), .lanes = (uint32_t)atoi(argv[5]), .directions = 5,
                              .isa = isa, .keep = &half, .n_keep = 1};
    fs_engine *engine = start(&program, &config);
    const size_t stride = (size_t)program.channels * program.height * program.width + 1;
    const fs_samples samples = {shard + 1, shard, stride, (uint32_t)(shard_size / stride)};
    for (uint32_t kind = FS_GAUSSIAN; kind <= FS_RADEMACHER; kind++) {
        fs_directions directions = {.seed = 0x0123456789ABCDEFu, .round = 4, .device = 9, .first = 1, .step = 3,
                                    .count = PROBES, .kind = kind, .sigma = 0.01f, .isa = isa};
        double losses[PROBES];
        if (fs_probe(engine, values, NULL, &samples, &directions, losses, NULL)) return 6;
        print_losses(losses);
        directions.at = half, directions.size = program.n_live / 4;
        if (fs_probe(engine, values, NULL, &samples, &directions, losses, NULL)) return 6;
        print_losses(losses);
        print_directions(&directions);
        if (kind == FS_RADEMACHER) print_packed(&(fs_directions){.seed = 11, .round = 4, .device = 9, .isa = isa});
    }
    return 0;
}
