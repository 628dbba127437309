/* The inner loops in plain C: any processor. */
#define TARGET
#include "kernels.inl"

const fs_isa fs_plain = LOOPS("plain");
