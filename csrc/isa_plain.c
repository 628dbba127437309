/* The inner loops in plain C: any processor. */
#define TARGET
#include "kernels.inl"

const fs_isa fs_plain = {"plain", 0, 0, 0, 0, scalar, pixels, pool, moments, affine, add, mul, act_row, direction, axpy, dot, 0, 0, 0, sgd, adam};
