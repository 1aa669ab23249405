// RowFormat: how one activation row is stored between stages and on the wire: codes, then its
// scales, in one record.
#pragma once

#include <cstdint>

#include "base/math.h"
#include "moekit/config.h"

namespace moekit {

/// A record is [codes | pad to 4 | scales | pad to 16]; records are `record_bytes` apart, so scales
/// travel with their row. Codes: f32, bf16, e4m3 bytes, or e2m1 pairs (low nibble first). Scales by
/// format: fp8_token f32 [1]; fp8_block f32 [ceil(K/128)]; mxfp8, mxfp4 e8m0 [ceil(K/32)]; nvfp4
/// e4m3 [ceil(K/16)] then, 4-aligned, the global f32 multiplier [1]; fp8_tensor f32 [1] (the static
/// multiplier). A stored multiplier always multiplies, whatever the checkpoint's sense.
struct RowFormat {
  ActivationFormat format = ActivationFormat::f32;
  int64_t width = 0;  ///< K, elements
  int64_t code_bytes = 0;
  int64_t scale_offset = 0;  ///< from the record's start
  int64_t scale_bytes = 0;
  int64_t record_bytes = 0;

  /// What can be read of any row of this format: rows of a caller's tensor have no padding.
  int64_t row_bytes() const { return scale_bytes > 0 ? record_bytes : code_bytes; }

  friend bool operator==(const RowFormat&, const RowFormat&) = default;

  static RowFormat of(ActivationFormat format, int64_t width) {
    RowFormat f;
    f.format = format;
    f.width = width;
    switch (format) {
      case ActivationFormat::f32: f.code_bytes = width * 4; break;
      case ActivationFormat::bf16: f.code_bytes = width * 2; break;
      case ActivationFormat::fp8_tensor:
      case ActivationFormat::fp8_token:
        f.code_bytes = width;
        f.scale_bytes = 4;
        break;
      case ActivationFormat::fp8_block:
        f.code_bytes = width;
        f.scale_bytes = 4 * ceil_div(width, 128);
        break;
      case ActivationFormat::mxfp8:
        f.code_bytes = width;
        f.scale_bytes = ceil_div(width, 32);
        break;
      case ActivationFormat::mxfp4:
        f.code_bytes = ceil_div(width, 2);
        f.scale_bytes = ceil_div(width, 32);
        break;
      case ActivationFormat::nvfp4:
        f.code_bytes = ceil_div(width, 2);
        f.scale_bytes = round_up(ceil_div(width, 16), 4) + 4;
        break;
    }
    f.scale_offset = round_up(f.code_bytes, 4);
    f.record_bytes = round_up(f.scale_offset + f.scale_bytes, 16);
    return f;
  }
};

}  // namespace moekit
