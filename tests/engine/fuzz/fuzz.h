/* What the fuzz target (fuzz_program.c) and the driver with its mutations (driver.c) share.
 *
 * An input is CONFIG bytes that choose how to run, then a program section (docs/format.md). */
#ifndef FORESEED_FUZZ_H
#define FORESEED_FUZZ_H

#include <stddef.h>
#include <stdint.h>

enum { CONFIG = 8 };

typedef enum { FUZZ_REFUSED, FUZZ_TOO_LARGE, FUZZ_RAN, FUZZ_VERDICTS } fuzz_verdict;

/* Runs one input; aborts where a promise of the engine is broken. `digest` takes in the bits of every result that
 * must be the same on all machines with a fused multiply-add. */
fuzz_verdict fuzz_one(const uint8_t *data, size_t size, uint64_t *digest);

#endif
