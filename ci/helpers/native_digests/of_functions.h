// Digests of the functions of native/isa/, and of what native/vectors.h makes of them.
#pragma once

#include "activations.h"
#include "line.h"

namespace inflight {

constexpr int64_t NUM_VECTORS = 1024;
constexpr Activation ACTIVATIONS[] = {Activation::SILU, Activation::GELU,         Activation::GELU_TANH,
                                      Activation::RELU, Activation::RELU_SQUARED, Activation::CLAMPED_SWIGLU};

/// Sixteen numbers of every kind, thrice, `NUM_VECTORS` times.
template <class Compute>
inline void of_vectors(const char* name, Compute compute) {
  Line line("%s", name);
  Random random(1);
  for (int64_t n = 0; n < NUM_VECTORS; ++n) {
    float numbers[3][16];
    for (auto& vector : numbers)
      for (float& number : vector) number = n % 4 ? random.any() : random.usual();
    compute(line, load(numbers[0]), load(numbers[1]), load(numbers[2]));
  }
}

inline void print_arithmetic() {
  of_vectors("a + b", [](Line& line, Floats a, Floats b, Floats) { line.add(a + b); });
  of_vectors("a - b", [](Line& line, Floats a, Floats b, Floats) { line.add(a - b); });
  of_vectors("a * b", [](Line& line, Floats a, Floats b, Floats) { line.add(a * b); });
  of_vectors("a / b", [](Line& line, Floats a, Floats b, Floats) { line.add(a / b); });
  of_vectors("fma", [](Line& line, Floats a, Floats b, Floats c) { line.add(fma(a, b, c)); });
  of_vectors("fms", [](Line& line, Floats a, Floats b, Floats c) { line.add(fms(a, b, c)); });
  of_vectors("fnma", [](Line& line, Floats a, Floats b, Floats c) { line.add(fnma(a, b, c)); });
  of_vectors("min", [](Line& line, Floats a, Floats b, Floats) { line.add(min(a, b)); });
  of_vectors("max", [](Line& line, Floats a, Floats b, Floats) { line.add(max(a, b)); });
  of_vectors("nearest", [](Line& line, Floats a, Floats, Floats) { line.add(nearest(a)); });
  of_vectors("exp2", [](Line& line, Floats a, Floats, Floats) { line.add(inflight::exp2(min(splat(127.0f), a))); });
  of_vectors("tanh", [](Line& line, Floats a, Floats, Floats) { line.add(inflight::tanh(a)); });
  of_vectors("silu", [](Line& line, Floats a, Floats, Floats) { line.add(silu(a)); });
  of_vectors("softplus", [](Line& line, Floats a, Floats, Floats) { line.add(softplus(a)); });
  of_vectors("erf", [](Line& line, Floats a, Floats, Floats) { line.add(inflight::erf(a)); });
  of_vectors("activations", [](Line& line, Floats a, Floats b, Floats) {
    for (Activation activation : ACTIVATIONS) line.add(gated(activation, a, b));
  });
  of_vectors("sum", [](Line& line, Floats a, Floats, Floats) { line.add(sum(a)); });
  of_vectors("largest", [](Line& line, Floats a, Floats, Floats) { line.add(largest(a)); });
  of_vectors("replace_below", [](Line& line, Floats a, Floats b, Floats c) { line.add(replace_below(a, b, c)); });
  of_vectors("differ", [](Line& line, Floats a, Floats b, Floats c) {
    line.add(differ(a, b) + 2 * differ(a, a) + 4 * differ(min(a, c), min(a, c)));
  });
  of_vectors("sums_of", [](Line& line, Floats a, Floats b, Floats c) {
    Floats rows[16];
    for (int i = 0; i < 16; ++i) rows[i] = i % 3 == 0 ? a : i % 3 == 1 ? b + a : c * splat(static_cast<float>(i));
    line.add(sums_of(rows));
  });
  of_vectors("keep_lanes", [](Line& line, Floats a, Floats b, Floats) {
    for (int64_t first = -20; first < 40; first += 13)
      for (int64_t end = -9; end < 40; end += 11) line.add(keep_lanes(a, first, end, b));
  });
}

/// Of formats. Conversions keep the payload of a NaN.
template <class Format>
inline void print_format(const char* name) {
  {
    Line line("store and load of %s", name);
    Random random(2);
    for (int64_t n = 0; n < NUM_VECTORS; ++n) {
      float numbers[16];
      for (float& number : numbers) number = random.any();
      Format kept[16], some[16] = {};
      store(kept, load(numbers));
      store(some, load(numbers), n % 18);
      line.add_bytes(kept, sizeof kept);
      line.add_bytes(some, sizeof some);
      store(numbers, load(kept, n % 18));
      line.add_bytes(numbers, sizeof numbers);
    }
  }
  Line line("load of all of %s", name);
  for (uint32_t bits = 0; bits < 0x10000; bits += 16) {
    Format all[16];
    float numbers[16];
    for (uint32_t i = 0; i < 16; ++i) all[i].bits = static_cast<uint16_t>(bits + i);
    store(numbers, load(all));
    line.add_bytes(numbers, sizeof numbers);
  }
}

inline void print_moves() {
  Line line("moves");
  Random random(3);
  for (int64_t n = 0; n < 64; ++n) {
    Bf16 pairs[32], even[16], odd[16];
    for (Bf16& each : pairs) each.bits = static_cast<uint16_t>(random.bits());
    float numbers[16];
    store(numbers, even_of_pairs(pairs));
    line.add_bytes(numbers, sizeof numbers);
    store(even, even_of_pairs(pairs));
    store(numbers, odd_of_pairs(pairs));
    line.add_bytes(numbers, sizeof numbers);
    store(odd, odd_of_pairs(pairs));
    interleave(odd, even, pairs);
    line.add_bytes(pairs, sizeof pairs);
    store_pairs(pairs, load(odd), load(even));
    line.add_bytes(pairs, sizeof pairs);
    Floats rows[16];
    for (Floats& row : rows) {
      for (float& number : numbers) number = random.any();
      row = load(numbers);
    }
    transpose(rows);
    for (Floats row : rows) {
      store(numbers, row);
      line.add_bytes(numbers, sizeof numbers);
    }
  }
}

inline void print_codes() {
  {
    Line line("codes of 8 bits");
    for (int first = 0; first < 256; first += 16) {
      char codes[16];
      for (int i = 0; i < 16; ++i) codes[i] = static_cast<char>(first + i);
      line.add(load_int8(codes));
      line.add(load_fp8(codes));
    }
    E4m3 codes[32];
    for (int first = 0; first < 256; first += 32) {
      for (int i = 0; i < 32; ++i) codes[i].bits = static_cast<uint8_t>(first + i);
      float floats[32];
      F16 halves[32];
      Bf16 brains[32];
      widen(codes, floats);
      widen(codes, halves);
      widen(codes, brains);
      line.add_bytes(floats, sizeof floats);
      line.add_bytes(halves, sizeof halves);
      line.add_bytes(brains, sizeof brains);
    }
  }
  of_vectors("store of fp8", [](Line& line, Floats a, Floats b, Floats) {
    E4m3 codes[16];
    store(codes, max(splat(-448.0f), min(splat(448.0f), a * b)));
    // With the sign that a NaN has here.
    for (E4m3& code : codes) code.bits = (code.bits & 0x7f) == 0x7f ? 0x7f : code.bits;
    line.add_bytes(codes, sizeof codes);
    store(codes, max(splat(-448.0f), min(splat(448.0f), a)));
    line.add_bytes(codes, sizeof codes);
  });
  of_vectors("store_int8", [](Line& line, Floats a, Floats, Floats) {
    int8_t codes[16];
    store_int8(codes, max(min(a, splat(127.0f)), splat(-127.0f)));
    line.add_bytes(codes, sizeof codes);
  });
  Line line("codes of 4 bits");
  Random random(4);
  for (int64_t n = 0; n < 64; ++n) {
    uint32_t words[16];
    for (uint32_t& word : words) word = random.bits();
    const char* const from = reinterpret_cast<const char*>(words);
    for (int shift = 0; shift < 32; shift += 4) {
      line.add(load_int4(from, shift));
      line.add(load_chosen(Fp4::NUMBERS, from, shift));
      line.add(load_chosen(Nf4::NUMBERS, from, shift));
    }
  }
}

inline void print_whole_numbers() {
  Line line("products of whole numbers");
  Random random(5);
  for (int64_t n = 0; n < 512; ++n) {
    Ints sums = whole(static_cast<int32_t>(n)), part = begin_small(sums);
    for (int step = 0; step < 8; ++step) {
      // The extremes often.
      int8_t numbers[4], codes[64];
      int32_t four, sum = 0;
      for (int8_t& number : numbers)
        sum += number = static_cast<int8_t>(n % 2 ? 127 - 254 * random.between(0, 1) : random.between(-127, 127));
      for (int8_t& code : codes)
        code = static_cast<int8_t>(n % 3 ? random.between(-128, 127) : 127 - 255 * random.between(0, 1));
      std::memcpy(&four, numbers, sizeof four);
      const Ints loaded = load_whole(codes);
      const Ints halves = step % 2 ? low_halves(loaded) : high_halves(loaded);
      line.add(to_floats(add_products(whole(-INT8_OFFSET * sum), with_offset(loaded), four)));
      part = add_small(part, halves, four);
    }
    sums = end_small(sums, part);
    line.add(to_floats(sums));
  }
}

}  // namespace inflight
