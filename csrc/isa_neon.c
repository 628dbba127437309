/* The inner loops for NEON on 64-bit ARM: 32 registers of 4 floats. On 32-bit ARM NEON takes the smallest numbers for
 * zero, so its bits would be others: the plain loops serve there. */
#if defined(__aarch64__)
#include <arm_neon.h>

#define TARGET
#define VEC float32x4_t
#define WIDTH 4
#define REGISTERS 20
#define TILE1 14
#define v_once(v) __asm__("" : "+w"(v))
#define v_accumulate(sum, a, b) ((sum) = v_fma((a), (b), (sum)))
#define v_load vld1q_f32
#define v_store vst1q_f32
#define v_set1 vdupq_n_f32
#define v_fma(a, b, c) vfmaq_f32((c), (a), (b))
#define v_mul vmulq_f32
#define v_add vaddq_f32
#define DVEC float64x2_t
#define d_set1 vdupq_n_f64
#define d_trunc vrndq_f64
#define d_low(v) vcvt_f64_f32(vget_low_f32(v))
#define d_high(v) vcvt_high_f64_f32(v)
#define IVEC uint32x4_t
#define i_load vld1q_u32
#define i_store vst1q_u32
#define i_set1 vdupq_n_u32
#define i_xor veorq_u32
#define i_mullo vmulq_u32

/* As on x86: the second where neither is larger, so that -0 and what is not a number come out alike. */
static inline float32x4_t v_max(float32x4_t a, float32x4_t b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
static inline float32x4_t v_min(float32x4_t a, float32x4_t b) { return vbslq_f32(vcltq_f32(a, b), a, b); }

static inline uint32x4_t i_mulhi(uint32x4_t a, uint32x4_t b) {
    const uint64x2_t low = vmull_u32(vget_low_u32(a), vget_low_u32(b)), high = vmull_high_u32(a, b);
    return vuzp2q_u32(vreinterpretq_u32_u64(low), vreinterpretq_u32_u64(high));
}

#include "kernels.inl"

const fs_isa fs_neon = LOOPS("neon");
#else
typedef int fs_neon_is_for_aarch64;
#endif
