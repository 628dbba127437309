/* Says what the model sees: reads images from standard input, and prints for each its class and that class's logit.
 *
 *     make && ./classify < image.bin
 *
 * An image is MODEL_CHANNELS planes of MODEL_HEIGHT x MODEL_WIDTH bytes, row by row; the program normalises it.
 * In firmware, `start` and `classify` are all that is needed: nothing is allocated, and program and values stay in
 * flash. Stack: about 9 KB while the engine starts, 4 KB while it runs. */
#include "foreseed.h"
#include "model.h"

#include <stdio.h>

static uint8_t arena[MODEL_ARENA] __attribute__((aligned(64)));
static fs_program program;
static fs_engine *engine;

static fs_status start(void) {
    const fs_config config = {.batch = 1, .lanes = 1, .directions = 1, .by_row = 1};
    const fs_status status = fs_open(&program, model_program, sizeof model_program);
    return status ? status : fs_start(&engine, &program, &config, arena, sizeof arena);
}

/* The most likely class; `logit` is its score. */
static fs_status classify(const uint8_t *image, uint32_t *label, float *logit) {
    static float logits[MODEL_CLASSES];
    const fs_samples samples = {.images = image, .labels = image, .stride = 1, .count = 1}; /* labels are not read */
    const fs_status status = fs_logits(engine, model_values, MODEL_STATS, &samples, logits);
    *label = 0;
    for (uint32_t i = 1; i < MODEL_CLASSES; i++)
        if (logits[i] > logits[*label]) *label = i;
    *logit = logits[*label];
    return status;
}

int main(void) {
    static uint8_t image[MODEL_CHANNELS * MODEL_HEIGHT * MODEL_WIDTH];
    fs_status status = start();
    while (!status && fread(image, 1, sizeof image, stdin) == sizeof image) {
        uint32_t label;
        float logit;
        status = classify(image, &label, &logit);
        if (!status) printf("%s %.6f\n", model_classes[label], (double)logit);
    }
    if (status) fprintf(stderr, "foreseed: status %d (see fs_status in foreseed.h)\n", (int)status);
    return (int)status;
}
