/* Probes a program and prints nothing: what `foreseed bench instructions` counts the instructions of.
 *
 *     probe PROGRAM VALUES SHARD BATCH DIRECTIONS PROBES ISA */
#include "foreseed.h"

#include <stdio.h>
#include <stdlib.h>

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

int main(int argc, char **argv) {
    if (argc != 8) return 2;
    uint32_t numbers[4]; /* batch, directions, probes, isa */
    for (int i = 0; i < 4; i++) numbers[i] = (uint32_t)atoi(argv[4 + i]);
    size_t program_size, values_size, shard_size;
    const void *bytes = read_all(argv[1], &program_size);
    const float *values = read_all(argv[2], &values_size);
    const uint8_t *shard = read_all(argv[3], &shard_size);
    const fs_config config = {.batch = numbers[0], .directions = numbers[1], .isa = numbers[3]};
    fs_program program;
    fs_plan plan;
    fs_engine *engine;
    if (fs_open(&program, bytes, program_size) || fs_make_plan(&program, &config, &plan)) return 4;
    char *memory = malloc(plan.arena + 63);
    if (fs_start(&engine, &program, &config, memory + (-(uintptr_t)memory & 63), plan.arena)) return 5;
    const size_t stride = (size_t)program.channels * program.height * program.width + 1;
    const fs_samples samples = {shard + 1, shard, stride, (uint32_t)(shard_size / stride)};
    const fs_directions directions = {
        .seed = 1, .step = 1, .count = numbers[2], .kind = FS_GAUSSIAN, .sigma = 1e-4f, .isa = numbers[3]};
    double *losses = malloc(sizeof *losses * directions.count);
    return fs_probe(engine, values, NULL, &samples, &directions, losses, NULL) ? 6 : 0;
}
