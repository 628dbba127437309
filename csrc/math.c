/* exp and log in float64 and the square root in float32, from IEEE basic operations alone:
 * the same bits everywhere, and no libm. */
#include "internal.h"

#include <string.h>

double fs_exp(double x) {
    if (!(x > -700.0)) return x == x ? 0.0 : x;
    /* x = n ln2 + r, |r| <= ln2 / 2; the series' last term is below 2^-56. */
    const int32_t n = (int32_t)(x * 1.4426950408889634 - 0.5);
    const double r = (x - n * 6.93147180369123816490e-01) - n * 1.90821492927058770002e-10;
    static const double terms[FS_EXP_TERMS] = FS_INVERSE_FACTORIALS;
    double sum = 0.0;
    for (int i = 0; i < FS_EXP_TERMS; i++) sum = sum * r + terms[i];
    const uint64_t bits = (uint64_t)(1023 + n) << 52;
    double scale;
    memcpy(&scale, &bits, 8);
    return sum * scale;
}

double fs_log(double x) {
    uint64_t bits;
    memcpy(&bits, &x, 8);
    /* x = m 2^e with m in [sqrt(1/2), sqrt(2)); log m = 2 artanh((m - 1) / (m + 1)). */
    const int64_t e = (int64_t)(bits - 0x3FE6A09E667F3BCDu) >> 52;
    bits -= (uint64_t)e << 52;
    double m;
    memcpy(&m, &bits, 8);
    const double f = (m - 1.0) / (m + 1.0), g = f * f;
    static const double twice_inverse[] = {2.0 / 21, 2.0 / 19, 2.0 / 17, 2.0 / 15, 2.0 / 13, 2.0 / 11,
                                           2.0 / 9,  2.0 / 7,  2.0 / 5,  2.0 / 3,  2.0};
    double sum = 0.0;
    for (int i = 0; i < 11; i++) sum = sum * g + twice_inverse[i];
    return (double)e * 0.69314718055994530942 + f * sum;
}

#ifdef FS_SOFT_SQRT

float fs_sqrt(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if (!(x > 0.0f) || bits >= 0x7F800000u) return x == 0.0f || x > 0.0f ? x : (x - x) / (x - x);
    int32_t e = (int32_t)(bits >> 23) - 127;
    uint32_t m = bits & 0x7FFFFFu;
    if (e == -127) { /* subnormal */
        for (e = -126; !(m & 0x800000u); e--) m <<= 1;
    } else m |= 0x800000u;
    /* The root of m 2^(e - 23) with 25 bits, one at a time, then rounded to nearest even. */
    if (e & 1) m <<= 1, e--;
    uint64_t rest = (uint64_t)m << 25, result = 0;
    for (uint64_t bit = (uint64_t)1 << 48; bit; bit >>= 2) {
        if (rest >= result + bit) rest -= result + bit, result = (result >> 1) + bit;
        else result >>= 1;
    }
    const uint32_t keep = (uint32_t)(result >> 1), half = (uint32_t)result & 1;
    const uint32_t rounded = keep + (half && (rest || keep & 1));
    const uint32_t out = ((uint32_t)(e / 2 + 127) << 23) + (rounded - 0x800000u);
    float root;
    memcpy(&root, &out, 4);
    return root;
}

#endif
