// What program.cpp exports.
#pragma once

#include "products.h"

namespace inflight {

constexpr int64_t NUM_THREADS = 2;

extern "C" {
int64_t inflight_workspace_bytes(const Program*, const Batch*);
void inflight_run(const Program*, const Batch*, int64_t num_threads, const Element* x, Element* out, char* workspace);
void inflight_linear(const Instructions*, const Element* x, int64_t num_rows, const Matrix*, int64_t num_outputs,
                     int64_t num_threads, Element* out);
int64_t inflight_packed_size(int64_t num_outputs, int64_t num_inputs);
void inflight_pack(const Element*, int64_t num_outputs, int64_t num_inputs, bool gated, int64_t num_threads, Element*);
}

}  // namespace inflight
