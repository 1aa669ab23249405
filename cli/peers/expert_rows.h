// What an expert needs beside its two products, for peers that are a matrix library: rows in,
// activation function, weighted rows out. Vectorized for the CPU that runs it, so that a library is
// not held back by what it does not bring.
#pragma once

#include <cstdint>

#include "moekit/config.h"

namespace moekit::cli {

/// Rows of a peer: f32, or bf16 as its bits.
enum class RowType : uint8_t { f32, bf16 };
inline int64_t bytes_of(RowType type) { return type == RowType::f32 ? 4 : 2; }

/// out[i] = hidden[rows[i]], i in [first, last); hidden is bf16 [.., width].
void gather_rows(const uint16_t* hidden, const int32_t* rows, int64_t first, int64_t last,
                 int64_t width, RowType type, void* out);

/// h [rows, inter] = act(gate, up); gate_up [rows, 2 inter], or [rows, inter] without gate.
void activate_rows(const ActivationSpec& spec, const void* gate_up, int64_t rows, int64_t inter,
                   RowType type, void* h);

/// out[t] = sum over slots j of weights[t, j] * y[positions[t, j]], t in [first, last); a position
/// of -1 is no row.
void combine_rows(const void* y, const int32_t* positions, const float* weights, int64_t top_k,
                  int64_t first, int64_t last, int64_t width, RowType type, float* out);

/// Nearest bf16 value, ties to even.
uint16_t bf16_of(float x);

}  // namespace moekit::cli
