// Row codec: fp32 rows <-> RowFormat records, by the exact chains of docs/numerics.md. The
// definition that every back-end's quantizer is tested against.
#pragma once

#include <cstddef>

#include "moekit/config.h"
#include "quant/row_format.h"

namespace moekit::quant {

/// Throws invalid_argument unless `static_scale` is usable where the scheme needs one: in [2^-100,
/// 2^100]. Called once when a plan is made; the functions below rely on it and never throw.
void check_static_scale(const ActivationScheme& scheme, float static_scale);

/// Quantizes x[0, width) into `record` (format.record_bytes; padding zeroed). `static_scale` is the
/// checkpoint's value in the scheme's sense; ignored unless scheme.static_scale.
void encode_row(const ActivationScheme& scheme, float static_scale, const float* x, int64_t width,
                std::byte* record);

/// Exact decode to fp32.
void decode_row(const RowFormat& format, const std::byte* record, float* x);

/// x[0, width) quantized and dequantized in place. Equal to encode_row + decode_row, bit for bit.
void round_trip_row(const ActivationScheme& scheme, float static_scale, float* x, int64_t width);

}  // namespace moekit::quant
