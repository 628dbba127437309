/* The inner loops for AVX-512: 32 registers of 16 floats. */
#if defined(__x86_64__)
#include <immintrin.h>

#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma")))
#define VEC __m512
#define WIDTH 16
#define REGISTERS 28
#define TILE1 14
#define v_once(v) __asm__("" : "+v"(v))
#define v_accumulate(sum, a, b) ((sum) = v_fma((a), (b), (sum)))
#define v_load _mm512_loadu_ps
#define v_store _mm512_storeu_ps
#define v_set1 _mm512_set1_ps
#define v_fma _mm512_fmadd_ps
#define v_max _mm512_max_ps
#define v_min _mm512_min_ps
#define v_mul _mm512_mul_ps
#define v_add _mm512_add_ps
#define DVEC __m512d
#define d_set1 _mm512_set1_pd
#define d_trunc(x) _mm512_roundscale_pd((x), _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC)
#define d_low(v) _mm512_cvtps_pd(_mm512_castps512_ps256(v))
#define d_high(v) _mm512_cvtps_pd(_mm512_extractf32x8_ps((v), 1))
#define IVEC __m512i
#define i_load(p) _mm512_loadu_si512((const __m512i *)(p))
#define i_store(p, x) _mm512_storeu_si512((__m512i *)(p), (x))
#define i_set1(x) _mm512_set1_epi32((int32_t)(x))
#define i_xor _mm512_xor_si512
#define i_mullo _mm512_mullo_epi32

static inline __attribute__((always_inline)) TARGET __m512i i_mulhi(__m512i a, __m512i b) {
    const __m512i even = _mm512_mul_epu32(a, b), odd = _mm512_mul_epu32(_mm512_srli_epi64(a, 32), b);
    return _mm512_mask_blend_epi32(0xAAAA, _mm512_srli_epi64(even, 32), odd);
}

#include "kernels.inl"

const fs_isa fs_avx512 = LOOPS("avx512");
#else
typedef int fs_avx512_is_for_x86;
#endif
