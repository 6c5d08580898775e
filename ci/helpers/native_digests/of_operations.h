// Digests of what a program's operations give.
#pragma once

#include <iterator>

#include "line.h"

namespace inflight {

/// A layer with experts: what each operation leaves in its buffer.
inline void print_operations(CacheFormat format, Instruction instruction, const char* name) {
  enum {
    HIDDEN,
    NORMED,
    QKV,
    ATTENDED,
    MIXED,
    SUMMED,
    GATED,
    NARROW,
    DELTA,
    DOWN,
    LOGITS,
    CHOSEN,
    ACTIVATED,
    SCALED,
    PLACED,
    ADDED,
    CENTRED,
    TOTAL,
    UNGATED,
    CONVOLVED,
    RECALLED,
    FADED,
    GATED_NORM,
    SCANNED,
    ABSORBED,
    GATHERED,
    OF_HEADS,
    MULTIPLIED,
    NORMED_HEADS,
    SQUARES,
    PART_NORM
  };
  const int64_t columns_of_float = sizeof(float) / sizeof(Element);
  const int64_t widths[] = {64, 64, 256, 128, 64,  64, 96, 32, 64, 64,  32,  64,  32, 32, 64,
                            64, 64, 64,  64,  100, 96, 96, 96, 64, 256, 128, 256, 64, 64, 2 * columns_of_float,
                            96};
  constexpr int64_t NUM_BUFFERS = std::size(widths), HEAD = 32, BLOCK = 16, TABLE_WIDTH = 64;
  Weights weights(8);
  Random random(9);

  const int64_t positions_before[] = {699, 36, 10, 597}, counts[] = {1, 1, 40, 3};
  std::vector<int32_t> table, adapters;
  for (int32_t i = 0; i < 4 * TABLE_WIDTH; ++i) table.push_back(i * 37 % (4 * TABLE_WIDTH));
  std::vector<int64_t> positions, slots, of_sequences;
  std::vector<int32_t> kept;
  for (int64_t row = 0; row < 4; ++row)
    for (int64_t i = 0; i < counts[row]; ++i) {
      const int64_t position = positions_before[row] + i;
      positions.push_back(position);
      slots.push_back(table[row * TABLE_WIDTH + position / BLOCK] * BLOCK + position % BLOCK);
      // One sequence is new, and the states behind some tokens are kept in other slots.
      of_sequences.push_back(row == 2 ? i : position);
      kept.push_back(i == 1 ? 4 + row : -1);
      adapters.push_back(static_cast<int32_t>(slots.size() % 3) - 1);
    }
  const int64_t num_tokens = slots.size(), rows[] = {0, 1, 2, 3};
  const int32_t decode_lens[] = {700, 37}, prefill_lens[] = {50, 600}, starts[] = {0, 40, 43};
  Batch batch{};
  batch.num_tokens = num_tokens;
  batch.num_decodes = batch.num_prefills = 2;
  batch.positions = positions.data();
  const Blocks blocks{slots.data(), table.data(), TABLE_WIDTH};
  batch.blocks = &blocks;
  batch.decode_rows = rows;
  batch.decode_lens = decode_lens;
  batch.prefill_rows = rows + 2;
  batch.prefill_lens = prefill_lens;
  batch.prefill_starts = starts;
  batch.adapters = adapters.data();
  const int64_t states[] = {1, 3, 0, 2};
  const int32_t sequence_starts[] = {0, 1, 2, 42, 45};
  batch.sequences = {4, states, sequence_starts, of_sequences.data(), kept.data()};

  const auto cache_of = [&](int64_t num_heads, int64_t head_dim, int64_t value_dim) {
    Cache cache{nullptr, nullptr, format, BLOCK, num_heads, head_dim, value_dim, 1.0f, 1.0f, nullptr, nullptr, 0};
    const int64_t count = 4 * TABLE_WIDTH * BLOCK * num_heads * head_dim;
    const auto values_or = [&](void* keys, auto make) { return value_dim < head_dim ? keys : make(count); };
    switch (format) {
      case CacheFormat::FP8: {
        const auto make = [&](int64_t size) { return weights.convert<E4m3>(size); };
        cache.keys = make(count);
        cache.values = values_or(cache.keys, make);
        cache.key_scale = 0.375f;
        cache.value_scale = value_dim < head_dim ? 0.375f : 0.6f;
        break;
      }
      case CacheFormat::INT8: {
        cache.keys = weights.bytes(count);
        cache.values = values_or(cache.keys, [&](int64_t size) { return weights.bytes(size); });
        const auto scales = [&](int64_t size) { return weights.convert<float>(size / head_dim); };
        cache.key_scales = scales(count);
        cache.value_scales = value_dim < head_dim ? cache.key_scales : scales(count);
        break;
      }
      case CacheFormat::ELEMENT: {
        const auto make = [&](int64_t size) { return weights.convert<Element>(size); };
        cache.keys = make(count);
        cache.values = values_or(cache.keys, make);
      }
    }
    return cache;
  };
  const Cache cache = cache_of(2, HEAD, HEAD), latents = cache_of(1, 2 * HEAD, HEAD);

  const Value none{-1, 0};
  const auto of = [](int64_t buffer, int64_t column = 0) { return Value{buffer, column}; };
  const float scales[] = {0.7f, 1.3f}, sinks[] = {-3.0f, 0.0f, 1.7f, 40.0f};
  const int32_t ranks[] = {32, 5};
  const RmsNorm first_norm{
      Kind::RMS_NORM, of(HIDDEN), none, of(NORMED), none, {weights.convert<Element>(64), nullptr}, 64, 1e-5f, 1};
  const Linear qkv{Kind::LINEAR, of(NORMED), of(QKV), none, weights.plain(256, 64), weights.convert<Element>(256), 256};
  const RopeAndKvWrite rope{Kind::ROPE_AND_KV_WRITE,
                            of(QKV),
                            of(QKV, 128),
                            of(QKV, 192),
                            cache,
                            4,
                            weights.convert<float>(1024 * HEAD),
                            HEAD,
                            0,
                            {weights.convert<Element>(HEAD), nullptr},
                            {nullptr, weights.convert<float>(HEAD)},
                            1e-6f};
  const Attention decode{Kind::DECODE_ATTENTION, of(QKV), of(ATTENDED), cache, 4, 0, 0.177f, 0.0f, nullptr};
  const Attention prefill{Kind::PREFILL_ATTENTION, of(QKV), of(ATTENDED), cache, 4, 100, 0.177f, 1.5f, sinks};
  const Matrix of_codes = weights.codes(WeightFormat::INT8, InputFormat::INT8, 64, 128, 64, SharedFormat::F32, false);
  const Linear mix{Kind::LINEAR, of(ATTENDED), of(MIXED), none, of_codes, nullptr, 64};
  const RmsNorm second_norm{
      Kind::RMS_NORM, of(MIXED), of(HIDDEN), of(NORMED), of(SUMMED), {nullptr, weights.convert<float>(64)}, 64,
      1e-5f,          1};
  const GatedLinear gate{Kind::GATED_LINEAR, of(NORMED), of(GATED), none, weights.plain(192, 64, true), nullptr, 96, 96,
                         Activation::SILU};
  const Lora lora{Kind::LORA,
                  of(GATED),
                  of(NARROW),
                  of(DELTA),
                  weights.convert<Element>(2 * 32 * 96),
                  weights.convert<Element>(2 * 32 * 64),
                  scales,
                  ranks,
                  96,
                  32,
                  1,
                  {64, 0, 0}};
  const Linear down{Kind::LINEAR, of(GATED), of(DOWN), of(DELTA), weights.plain(64, 96), nullptr, 64};
  const Linear route{Kind::LINEAR, of(DOWN), of(LOGITS), none, weights.plain(8, 64), nullptr, 8};
  const Experts experts{Kind::EXPERTS,
                        of(DOWN),
                        of(LOGITS),
                        of(CHOSEN),
                        weights.plain(192, 64, true, 8),
                        weights.plain(64, 96, false, 8),
                        nullptr,
                        nullptr,
                        1,
                        weights.convert<Element>(8 * 192),
                        nullptr,
                        Activation::CLAMPED_SWIGLU,
                        8,
                        2,
                        0,
                        8,
                        Scores::SIGMOID,
                        GroupScore::TOP2_SUM,
                        2,
                        1,
                        weights.convert<float>(8),
                        1,
                        0.5f,
                        1.5f,
                        nullptr,
                        64,
                        96,
                        96};
  const Activate activate{Kind::ACTIVATE_AND_MUL, of(CHOSEN), of(ACTIVATED), 32, Activation::GELU};
  const Scale scale{Kind::SCALE, of(ACTIVATED), of(SCALED), 32, 0.3f};
  const Embedding place{Kind::EMBEDDING, of(PLACED), weights.convert<Element>(1024 * 64), {}, 0, 1024, 64,
                        Ids::POSITION,   1.5f};
  const Add add{Kind::ADD, of(PLACED), of(CHOSEN), of(ADDED), 64};
  const LayerNorm centre{Kind::LAYER_NORM,
                         of(ADDED),
                         of(PLACED),
                         of(CENTRED),
                         of(TOTAL),
                         weights.convert<Element>(64),
                         weights.convert<Element>(64),
                         64,
                         1e-5f};
  const Activate without_gate{Kind::ACTIVATE, of(CENTRED), of(UNGATED), 50, Activation::GELU_TANH};
  constexpr int64_t STATES = 8;
  const CausalConv convolve{Kind::CAUSAL_CONV,
                            of(QKV),
                            of(CONVOLVED),
                            weights.convert<float>(4 * 100),
                            weights.convert<float>(100),
                            weights.convert<Element>(STATES * 3 * 100),
                            100,
                            4,
                            1,
                            Activation::SILU};
  const auto recall = [&](int64_t buffer, int64_t num_decays) {
    return GatedDeltaRule{Kind::GATED_DELTA_RULE,
                          of(QKV),
                          of(NORMED),
                          of(DOWN),
                          of(buffer),
                          weights.convert<float>(16),
                          weights.convert<float>(64),
                          weights.convert<float>(STATES * 2 * 32 * 48),
                          1,
                          2,
                          32,
                          48,
                          num_decays};
  };
  const GatedDeltaRule delta_rule = recall(RECALLED, 1), by_channel = recall(FADED, 32);
  const GatedRmsNorm gated_norm{Kind::GATED_RMS_NORM,
                                of(RECALLED),
                                of(GATED),
                                of(GATED_NORM),
                                {weights.convert<Element>(48), nullptr},
                                96,
                                48,
                                48,
                                Gate::SIGMOID,
                                0,
                                1e-5f};
  const StateSpaceScan scan{Kind::STATE_SPACE_SCAN,
                            of(QKV),
                            of(QKV, 64),
                            of(QKV, 128),
                            of(NORMED),
                            of(SCANNED),
                            weights.convert<float>(16),
                            weights.convert<float>(16),
                            weights.convert<float>(16),
                            weights.convert<float>(STATES * 2 * 32 * 48),
                            2,
                            1,
                            32,
                            48,
                            0.1f,
                            2.0f};
  const RowSquares squares{Kind::ROW_SQUARES, of(RECALLED), of(GATED), of(SQUARES), 96};
  const RowSquares other_squares{Kind::ROW_SQUARES, of(FADED), {-1, 0}, of(SQUARES, columns_of_float), 96};
  const RmsNormOfPart part_norm{Kind::RMS_NORM_OF_PART,
                                of(RECALLED),
                                of(GATED),
                                of(SQUARES),
                                of(PART_NORM),
                                {weights.convert<Element>(96), nullptr},
                                96,
                                0,
                                1,
                                2,
                                192,
                                1,
                                1e-5f};
  const HeadLinear absorb{Kind::HEAD_LINEAR, of(QKV), of(ABSORBED), weights.plain(HEAD, HEAD, false, 4), 4, HEAD,
                          2 * HEAD,          2 * HEAD};
  const RopeAndLatentWrite rotate{Kind::ROPE_AND_LATENT_WRITE,
                                  of(QKV, HEAD),
                                  of(SUMMED),
                                  of(ABSORBED, HEAD),
                                  4,
                                  2 * HEAD,
                                  2 * HEAD,
                                  latents,
                                  weights.convert<float>(1024 * HEAD),
                                  1,
                                  {weights.convert<Element>(HEAD), nullptr},
                                  1e-6f};
  const Attention decode_latents{
      Kind::DECODE_ATTENTION, of(ABSORBED), of(GATHERED), latents, 4, 0, 0.177f, 0.0f, nullptr};
  const Attention prefill_latents{
      Kind::PREFILL_ATTENTION, of(ABSORBED), of(GATHERED), latents, 4, 0, 0.177f, 0.0f, nullptr};
  const HeadLinear widen_heads{
      Kind::HEAD_LINEAR, of(GATHERED), of(OF_HEADS), weights.plain(64, HEAD, false, 4), 4, 64, HEAD, 64};
  const Add multiply{Kind::MUL, of(PLACED), of(CHOSEN), of(MULTIPLIED), 64};
  const RmsNorm norm_heads{
      Kind::RMS_NORM, of(QKV, 192), none, of(NORMED_HEADS), none, {nullptr, weights.convert<float>(HEAD)},
      HEAD,           1e-5f,        2};
  const Rope rotate_queries{Kind::ROPE, of(NORMED_HEADS),   2,    HEAD, weights.convert<float>(1024 * HEAD), HEAD,
                            0,          {nullptr, nullptr}, 1e-6f};
  const Kind* const operations[] = {&first_norm.kind,
                                    &qkv.kind,
                                    &rope.kind,
                                    &decode.kind,
                                    &prefill.kind,
                                    &mix.kind,
                                    &second_norm.kind,
                                    &gate.kind,
                                    &lora.kind,
                                    &down.kind,
                                    &route.kind,
                                    &experts.kind,
                                    &activate.kind,
                                    &scale.kind,
                                    &place.kind,
                                    &add.kind,
                                    &centre.kind,
                                    &without_gate.kind,
                                    &convolve.kind,
                                    &delta_rule.kind,
                                    &by_channel.kind,
                                    &gated_norm.kind,
                                    &scan.kind,
                                    &absorb.kind,
                                    &rotate.kind,
                                    &decode_latents.kind,
                                    &prefill_latents.kind,
                                    &widen_heads.kind,
                                    &multiply.kind,
                                    &norm_heads.kind,
                                    &rotate_queries.kind,
                                    &squares.kind,
                                    &other_squares.kind,
                                    &part_norm.kind};
  const Place places[NUM_BUFFERS] = {};

  std::vector<Element> x = elements(random, num_tokens * 64);
  const auto odd = elements(random, 64, true);
  std::copy(odd.begin(), odd.end(), x.begin() + 30 * 64);
  for (int64_t output = NORMED; output < NUM_BUFFERS; ++output) {
    const Program program{std::size(operations),
                          NUM_BUFFERS,
                          operations,
                          widths,
                          places,
                          HIDDEN,
                          output,
                          {instruction, instruction, instruction},
                          100000,
                          {nullptr, 0, 1}};
    std::vector<char> workspace(inflight_workspace_bytes(&program, &batch) + 4096);
    char* const start = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(workspace.data()) + 4095) / 4096 * 4096);
    std::vector<Element> out((num_tokens + PANEL) * widths[output]);
    inflight_run(&program, &batch, NUM_THREADS, x.data(), out.data(), start);
    Line line("%s: buffer %lld", name, static_cast<long long>(output));
    // Halves of a float that is no number are not to be read as elements: any such float is as good.
    if (output == SQUARES)
      line.add_floats(out.data(), num_tokens * 2);
    else
      line.add(out.data(), num_tokens * widths[output]);
  }
}

}  // namespace inflight
