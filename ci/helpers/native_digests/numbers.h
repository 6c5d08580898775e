// Fixed pseudo-random numbers, and what is made of them.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "exports.h"

namespace inflight {

inline float from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

/// Splitmix64.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}

  uint32_t bits() {
    uint64_t z = state_ += 0x9e3779b97f4a7c15;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return static_cast<uint32_t>((z ^ (z >> 31)) >> 32);
  }
  int32_t between(int32_t lowest, int32_t highest) {
    return lowest + static_cast<int32_t>(bits() % static_cast<uint32_t>(highest - lowest + 1));
  }
  /// From -2 to 2.
  float usual() { return static_cast<float>(static_cast<int32_t>(bits())) * 0x1p-30f; }
  /// Of every kind.
  float any() {
    const uint32_t some = bits(), sign = some & 0x80000000;
    switch (bits() % 8) {
      case 0:  // denormal or zero
        return from_bits(some & (some & 1 ? 0x807fffff : 0x80000000));
      case 1:
        return some % 4 ? from_bits(sign | 0x7f800000) : from_bits(sign | 0x7f800001 | (some & 0x3fffff));
      case 2:  // half way between two whole numbers
        return static_cast<float>(between(-255, 255)) / 2;
      case 3:  // or between two numbers of bfloat16
        return from_bits((some & 0xffff0000) | 0x8000);
      case 4:  // or of float16, also of its denormals, or of fp8
        return from_bits(sign | (100 + some % 44) << 23 | (bits() & 0x7f0000) | (some & 2 ? 0x1000 : 0x80000));
      case 5:  // near 2 ** -126
        return from_bits(sign | (1 + some % 30) << 23 | (bits() & 0x7fffff));
      case 6:
        return from_bits(some);
      default:
        return usual();
    }
  }

 private:
  uint64_t state_;
};

inline std::vector<Element> elements(Random& random, int64_t count, bool any = false) {
  std::vector<Element> made(round_up(count, 16));
  for (int64_t i = 0; i < count; i += 16) {
    float numbers[16];
    for (float& number : numbers) number = any ? random.any() : random.usual();
    store(made.data() + i, load(numbers));
  }
  return made;
}

/// What a network's weights are made of, kept while it runs.
class Weights {
 public:
  explicit Weights(uint64_t seed) : random_(seed) {}

  /// (`count` of them, one after the other).
  Matrix plain(int64_t num_outputs, int64_t num_inputs, bool gated = false, int64_t count = 1) {
    const int64_t size = inflight_packed_size(num_outputs, num_inputs);
    Element* const packed = take<Element>(size * count);
    for (int64_t i = 0; i < count; ++i)
      inflight_pack(elements(random_, num_outputs * num_inputs).data(), num_outputs, num_inputs, gated, NUM_THREADS,
                    packed + i * size);
    return {packed, nullptr, nullptr, WeightFormat::PLAIN, InputFormat::KEPT, {}, {}, num_inputs, 1, num_inputs};
  }
  Matrix codes(WeightFormat format, InputFormat inputs, int64_t num_outputs, int64_t num_inputs, int64_t group_size,
               SharedFormat shared, bool has_zeros) {
    const int64_t num_groups = ceil_div(num_inputs, group_size), count = round_up(num_outputs, PANEL);
    const void* const values = bytes(count * round_up(num_inputs, 64));
    const auto floats = [&]() -> const void* {
      if (shared == SharedFormat::INT8) {
        auto* const wholes = take<int8_t>(count * num_groups);
        for (int64_t i = 0; i < count * num_groups; ++i) wholes[i] = static_cast<int8_t>(random_.between(-20, 20));
        return wholes;
      }
      if (shared == SharedFormat::F32) return convert<float>(count * num_groups);
      if (shared == SharedFormat::F16) return convert<F16>(count * num_groups);
      return convert<Bf16>(count * num_groups);
    };
    const void *const scales = floats(), *const zeros = has_zeros ? floats() : nullptr;
    return {values, scales, zeros, format, inputs, shared, shared, num_inputs, num_groups, group_size};
  }
  /// Any; a multiple of four.
  uint32_t* bytes(int64_t count) {
    auto* const made = take<uint32_t>(count / 4);
    for (int64_t i = 0; i < count / 4; ++i) made[i] = random_.bits();
    return made;
  }
  template <class Format>
  Format* convert(int64_t count) {
    Format* const made = take<Format>(count);
    for (int64_t i = 0; i < count; i += 16) {
      float numbers[16];
      for (float& number : numbers) number = random_.usual();
      store(made + i, load(numbers), count - i);
    }
    return made;
  }

 private:
  /// Zeros.
  template <class Item>
  Item* take(int64_t count) {
    held_.emplace_back(count * sizeof(Item) + 256);
    return reinterpret_cast<Item*>(held_.back().data());
  }

  Random random_;
  std::vector<std::vector<char>> held_;
};

}  // namespace inflight
