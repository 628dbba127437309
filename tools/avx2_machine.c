/* Loaded before a program's own libraries (LD_PRELOAD): answers CPUID as a processor would that has AVX2 and no more, in
 * libraries where `avx2_machine.py` wrote 0xCE twice over it: in 64-bit mode no instruction, so that it raises a signal. */
#define _GNU_SOURCE
#include <cpuid.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

/* Bits of leaf 7: AVX-512 in all its parts, AMX, and what of either came to AVX later (VNNI, IFMA, ...). */
static void strike_out(uint32_t page, uint32_t *a, uint32_t *b, uint32_t *c, uint32_t *d) {
    if (page == 0) {
        *b &= ~0xDC230000u; /* F DQ IFMA PF ER CD BW VL */
        *c &= ~0x00005842u; /* VBMI VBMI2 VNNI BITALG VPOPCNTDQ */
        *d &= ~0x03C0010Cu; /* 4VNNIW 4FMAPS VP2INTERSECT, AMX-BF16, FP16, AMX-TILE AMX-INT8 */
    } else if (page == 1) {
        *a &= ~0x00A00030u; /* AVX-VNNI, BF16, AMX-FP16, AVX-IFMA */
        *d &= ~0x00080430u; /* AVX-VNNI-INT8 AVX-NE-CONVERT AVX-VNNI-INT16, AVX10 */
    }
}

static void answer(int number, siginfo_t *info, void *context) {
    greg_t *r = ((ucontext_t *)context)->uc_mcontext.gregs;
    if (info->si_code <= 0 || memcmp((const void *)r[REG_RIP], "\xCE\xCE", 2)) {
        /* A signal that was sent, or another fault, which happens again, and ends the program. */
        signal(number, SIG_DFL);
        if (info->si_code <= 0) raise(number);
        return;
    }
    uint32_t a, b, c, d;
    const uint32_t leaf = (uint32_t)r[REG_RAX], page = (uint32_t)r[REG_RCX];
    __cpuid_count(leaf, page, a, b, c, d);
    if (leaf == 7) strike_out(page, &a, &b, &c, &d);
    r[REG_RAX] = a, r[REG_RBX] = b, r[REG_RCX] = c, r[REG_RDX] = d;
    r[REG_RIP] += 2;
}

__attribute__((constructor)) static void hold(void) {
    const struct sigaction action = {.sa_sigaction = answer, .sa_flags = SA_SIGINFO};
    if (sigaction(SIGILL, &action, NULL)) abort();
}
