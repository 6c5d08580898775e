// What all processors of an architecture have.
#pragma once

#ifdef __aarch64__
#include "aarch64.h"
#else
#include "x86.h"
#endif
