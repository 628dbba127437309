/* The inner loops for AVX2 and FMA: 16 registers of 8 floats. */
#if defined(__x86_64__)
#include <immintrin.h>

#define TARGET __attribute__((target("avx2,fma")))
#define VEC __m256
#define WIDTH 8
#define REGISTERS 12
#define TILE1 12
#define v_once(v) __asm__("" : "+x"(v))
/* Left to itself GCC moves sums from register to register, runs out of them with twelve, and sends two through memory:
 * 39 GMAC/s instead of 53. */
#define v_accumulate(sum, a, b) __asm__("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b))
#define v_load _mm256_loadu_ps
#define v_store _mm256_storeu_ps
#define v_set1 _mm256_set1_ps
#define v_fma _mm256_fmadd_ps
#define v_max _mm256_max_ps
#define v_min _mm256_min_ps
#define v_mul _mm256_mul_ps
#define v_add _mm256_add_ps
#define DVEC __m256d
#define d_set1 _mm256_set1_pd
#define d_trunc(x) _mm256_round_pd((x), _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC)
#define d_low(v) _mm256_cvtps_pd(_mm256_castps256_ps128(v))
#define d_high(v) _mm256_cvtps_pd(_mm256_extractf128_ps((v), 1))
#define IVEC __m256i
#define i_load(p) _mm256_loadu_si256((const __m256i *)(p))
#define i_store(p, x) _mm256_storeu_si256((__m256i *)(p), (x))
#define i_set1(x) _mm256_set1_epi32((int32_t)(x))
#define i_xor _mm256_xor_si256
#define i_mullo _mm256_mullo_epi32

static inline __attribute__((always_inline)) TARGET __m256i i_mulhi(__m256i a, __m256i b) {
    const __m256i even = _mm256_mul_epu32(a, b), odd = _mm256_mul_epu32(_mm256_srli_epi64(a, 32), b);
    return _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xAA);
}

#include "kernels.inl"

const fs_isa fs_avx2 = LOOPS("avx2");
#else
typedef int fs_avx2_is_for_x86;
#endif
