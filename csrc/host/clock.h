/* Where an engine's time goes, for benchmarks on a host; no part of the engine, which is the same without FS_TIMED. */
#ifndef FORESEED_CLOCK_H
#define FORESEED_CLOCK_H

#include <stdint.h>

/* What is timed beside the ops: making perturbed copies, arranging images, pooling inside convs, the loss. */
enum { FS_TIME_PERTURB = 256, FS_TIME_IMAGES, FS_TIME_POOL, FS_TIME_LOSS, FS_TIMES };

/* From now on this thread's engines add their nanoseconds to `times` (FS_TIMES numbers); NULL: no more. */
void fs_time(uint64_t *times);
/* What has passed since the last lap was spent on this. */
void fs_lap(uint32_t what);

#endif
