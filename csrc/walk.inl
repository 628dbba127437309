/* The next live weight of a sparse conv. Where there are vectors it is inlined (FS_WALK), so that a walk stays in registers;
 * elsewhere it is one function, in program.c. */

/* At least 32 bits, if there are as many left. */
static inline void fill_walk(fs_walk *walk) {
    const uint8_t *p = walk->next;
    if (walk->have >= 32) return;
    if (walk->end - p >= 4) {
        const uint32_t four = p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
        walk->bits |= (uint64_t)four << walk->have;
        walk->have += 32, walk->next += 4;
        return;
    }
    for (; walk->next < walk->end; walk->have += 8) walk->bits |= (uint64_t)*walk->next++ << walk->have;
}

FS_WALK int fs_walk_sparse(fs_walk *walk) {
    uint64_t gap = 0;
    for (fill_walk(walk); !walk->bits; fill_walk(walk)) {
        gap += walk->have, walk->have = 0;
        if (walk->next == walk->end) return 0;
    }
    const uint32_t zeros = (uint32_t)__builtin_ctzll(walk->bits);
    walk->bits = walk->bits >> zeros >> 1, walk->have -= zeros + 1;
    gap = (gap + zeros) << walk->rice;
    if (walk->have < walk->rice) fill_walk(walk);
    if (walk->have < walk->rice) return 0;
    gap |= walk->bits & ((1u << walk->rice) - 1);
    walk->bits >>= walk->rice, walk->have -= walk->rice;
    walk->index += (int64_t)gap + 1;
    walk->left--;
    return 1;
}
