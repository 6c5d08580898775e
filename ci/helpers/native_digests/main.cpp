// Prints a digest of what each function of native/isa/, each kind of product and each operation gives for fixed inputs,
// with denormals, ties, infinities and NaN among them: equal lines are equal bits. A NaN that arithmetic gives counts
// as one, since processors choose its sign and payload.
//
// Compiled together with native/program.cpp, for one type of elements, by ci/unit/kernels/test_aarch64.py.
#include "of_functions.h"
#include "of_operations.h"
#include "of_products.h"

using namespace inflight;

int main() {
  {
    const FlushedDenormals flushed;
    print_arithmetic();
    print_format<Bf16>("bfloat16");
    print_format<F16>("float16");
    print_moves();
    print_codes();
    print_whole_numbers();
  }
  print_all_products();
  print_operations(CacheFormat::ELEMENT, Instruction::FMA, "operations");
  print_operations(CacheFormat::FP8, Instruction::FMA, "operations, fp8 cache");
  print_operations(CacheFormat::INT8, Instruction::FMA, "operations, int8 cache");
  if (NUM_ORDERS > 1) print_operations(CacheFormat::ELEMENT, Instruction::FMA_AS_AMX, "operations, order amx");
}
