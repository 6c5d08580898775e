// Sixteen floats at a time, by the widest vectors that the compiler may use.
//
// Each header here defines the same type and the same functions: `Floats`, in one register or in several, with the
// arithmetic operators; loads and stores of every format, of sixteen elements or of the first `count`; and what cannot
// be written with these. A function gives the same bits by all of them, and so does all that is written over them.
#pragma once

#if defined(__AVX512F__)
#include "avx512.h"
#elif defined(__AVX2__)
#include "avx2.h"
#include "partial.h"
#elif defined(__aarch64__)
#include "neon.h"
#include "partial.h"
#else
#error "no header in isa/ is for these instructions"
#endif
