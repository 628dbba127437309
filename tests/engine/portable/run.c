/* Runs a program on the processor at hand and prints what must be the same on all, as hexadecimal bits.
 *
 *     run PROGRAM VALUES SHARD BATCH LANES
 *
 * VALUES are float32, SHARD holds records of a label byte and the pixels. */
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

static void print_direction(const fs_directions *directions) {
    static float z[COORDINATES];
    fs_direction(directions, directions->first, 77, COORDINATES, z);
    for (int i = 0; i < COORDINATES; i++) {
        uint32_t bits;
        memcpy(&bits, &z[i], 4);
        printf("%08lx%c", (unsigned long)bits, i + 1 < COORDINATES ? ' ' : '\n');
    }
}

/* Scale and codes of a direction, taken for loss differences, in 1, 2, 4 and 8 bits. */
static void print_packed(const fs_directions *directions) {
    static float z[COORDINATES];
    for (uint32_t bits = 1; bits <= 8; bits *= 2) {
        const fs_quantiser quantiser = {directions->seed, directions->round, directions->device, bits};
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
    void *arena = NULL;
    if (fs_make_plan(program, config, &plan) || posix_memalign(&arena, 64, plan.arena) ||
        fs_start(&engine, program, config, arena, plan.arena))
        exit(5);
    return engine;
}

int main(int argc, char **argv) {
    if (argc != 6) return 2;
    size_t program_size, values_size, shard_size;
    const void *bytes = read_all(argv[1], &program_size);
    const float *values = read_all(argv[2], &values_size);
    const uint8_t *shard = read_all(argv[3], &shard_size);
    fs_program program;
    const fs_status status = fs_open(&program, bytes, program_size);
    if (status) return printf("status %d, op %lu\n", (int)status, (unsigned long)program.where), 4;
    if (values_size != 4 * (size_t)program.n_live) return 4;
    const fs_config config = {(uint32_t)atoi(argv[4]), (uint32_t)atoi(argv[5]), 2, 0, FS_BEST};
    fs_engine *engine = start(&program, &config);
    const size_t stride = (size_t)program.channels * program.height * program.width + 1;
    const fs_samples samples = {shard + 1, shard, stride, (uint32_t)(shard_size / stride)};
    for (uint32_t kind = FS_GAUSSIAN; kind <= FS_RADEMACHER; kind++) {
        const fs_directions directions = {0x0123456789ABCDEFu, 4, 9, 1, 3, PROBES, kind, 0.01f, FS_BEST};
        double losses[PROBES];
        if (fs_probe(engine, values, NULL, &samples, &directions, losses)) return 6;
        print_losses(losses);
        print_direction(&directions);
        if (kind == FS_RADEMACHER) print_packed(&(fs_directions){.seed = 11, .round = 4, .device = 9, .isa = FS_BEST});
    }
    return 0;
}
