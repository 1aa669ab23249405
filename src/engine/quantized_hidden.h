// Quantized hidden states from the caller (codes and scales apart) -> RowFormat records.
#pragma once

#include "moekit/layer.h"
#include "quant/row_format.h"

namespace moekit::engine {

/// True when `hidden` holds codes rather than f32, bf16, f16 values.
bool is_quantized_hidden(const TensorView& hidden);

/// Throws unsupported or invalid_argument unless args.hidden, its scales and its global fit
/// `format` and `num_tokens`.
void check_quantized_hidden(const LayerArgs& args, const RowFormat& format, int64_t num_tokens);

/// Assembles the records of all rows. The arguments have been checked.
void gather_records(const LayerArgs& args, const RowFormat& format, int64_t num_tokens,
                    std::byte* records);

}  // namespace moekit::engine
