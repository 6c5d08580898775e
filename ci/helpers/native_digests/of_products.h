// Digests of products with weights of every format, of few and of many rows, in both orders of sums.
#pragma once

#include "line.h"

namespace inflight {

const struct {
  const char* name;
  Instruction instruction;
} ORDERS[] = {{"fma", Instruction::FMA}, {"amx", Instruction::FMA_AS_AMX}};
constexpr int64_t NUM_ORDERS = std::is_same_v<Element, Bf16> ? 2 : 1;

inline void print_products(const char* name, const Matrix& matrix, int64_t num_outputs) {
  Random random(7);
  constexpr int64_t MOST_ROWS = 70;
  std::vector<Element> x = elements(random, (MOST_ROWS + PANEL) * matrix.num_inputs);
  // Rows of denormal numbers, of all kinds, and with one that is infinite.
  const auto write = [&](int64_t row, auto number) {
    for (int64_t i = 0; i < matrix.num_inputs; i += 16) {
      float numbers[16];
      for (float& each : numbers) each = number();
      store(&x[row * matrix.num_inputs + i], load(numbers));
    }
  };
  write(1, [&] { return from_bits(random.bits() & 0x80ffffff); });
  write(3, [&] { return random.any(); });
  write(4, [&] { return random.usual() * 0x1p-70f; });
  write(5, [&] { return random.between(0, 40) ? random.usual() : HUGE_VALF; });
  for (int64_t order = 0; order < NUM_ORDERS; ++order)
    for (int64_t num_rows : {1, 2, 3, 7, 33, 70}) {
      const Instruction by = ORDERS[order].instruction;
      const Instructions instructions{by, by, by};
      std::vector<Element> out(num_rows * num_outputs);
      inflight_linear(&instructions, x.data(), num_rows, &matrix, num_outputs, NUM_THREADS, out.data());
      Line("%s, %lld rows, order %s", name, static_cast<long long>(num_rows), ORDERS[order].name)
          .add(out.data(), num_rows * num_outputs);
    }
}

inline void print_all_products() {
  Weights weights(6);
  print_products("plain", weights.plain(80, 96), 80);
  const struct {
    const char* name;
    WeightFormat format;
    InputFormat inputs;
    int64_t num_inputs, group_size;
    SharedFormat shared;
    bool has_zeros;
  } cases[] = {
      {"int8", WeightFormat::INT8, InputFormat::KEPT, 96, 64, SharedFormat::F16, true},
      {"int8 in groups of 16", WeightFormat::INT8, InputFormat::KEPT, 96, 16, SharedFormat::INT8, false},
      {"fp8", WeightFormat::FP8, InputFormat::KEPT, 160, 128, SharedFormat::F32, false},
      {"int4", WeightFormat::INT4, InputFormat::KEPT, 96, 32, SharedFormat::BF16, true},
      {"fp4", WeightFormat::FP4, InputFormat::KEPT, 96, 32, SharedFormat::F32, false},
      {"nf4", WeightFormat::NF4, InputFormat::KEPT, 128, 64, SharedFormat::F32, false},
      {"int8 by int8", WeightFormat::INT8, InputFormat::INT8, 160, 64, SharedFormat::F16, true},
      {"int8 by int8 in groups of 16", WeightFormat::INT8, InputFormat::INT8, 96, 16, SharedFormat::F32, false},
      {"int4 by int8", WeightFormat::INT4, InputFormat::INT8, 160, 64, SharedFormat::BF16, true},
      {"int4 by int8 in groups of 16", WeightFormat::INT4, InputFormat::INT8, 96, 16, SharedFormat::F32, false},
  };
  for (const auto& each : cases)
    print_products(
        each.name,
        weights.codes(each.format, each.inputs, 80, each.num_inputs, each.group_size, each.shared, each.has_zeros), 80);
}

}  // namespace inflight
