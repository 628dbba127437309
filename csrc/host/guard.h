/* Reading a mapped file on a host with an operating system; no part of the engine, which reads what it is given.
 *
 * A mapped file that somebody cuts short, or whose disk fails, ends whoever reads it: SIGBUS. Checking its size first
 * would leave a moment between the check and the reading. In a guarded range such a read gives zeros instead, to the
 * end of the range, and is noted, so that whoever computed with it can throw the result away. */
#ifndef FORESEED_GUARD_H
#define FORESEED_GUARD_H

#include <stddef.h>
#include <stdint.h>

typedef struct fs_guard {
    const uint8_t *start; /* the beginning of a mapped file */
    size_t size;
    int lost; /* whether a part of it could not be read; the caller sets it to 0 */
    struct fs_guard *next;
} fs_guard;

/* The caller keeps the guard where it is until fs_unguard, which comes before the file is unmapped. */
void fs_guard_range(fs_guard *guard);
void fs_unguard(fs_guard *guard);

#endif
