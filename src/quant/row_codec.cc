#include "quant/row_codec.h"

#include <cstring>

#include "base/check.h"
#include "quant/fp8.h"
#include "quant/mx.h"
#include "quant/nvfp4.h"

namespace moekit::quant {
namespace {

uint8_t* codes_of(std::byte* record) { return reinterpret_cast<uint8_t*>(record); }
const uint8_t* codes_of(const std::byte* record) {
  return reinterpret_cast<const uint8_t*>(record);
}

/// Calls visit(first, n, block) for each block of a row.
template <typename Visit>
void for_each_block(int64_t width, int64_t block, Visit visit) {
  for (int64_t first = 0, b = 0; first < width; first += block, ++b) {
    visit(first, width - first < block ? width - first : block, b);
  }
}

template <typename Blocks>
void encode_blocks(const Blocks& blocks, const RowFormat& format, const float* x,
                   std::byte* record) {
  using Scale = typename Blocks::Scale;
  std::byte* scales = record + format.scale_offset;
  for_each_block(format.width, Blocks::kBlock, [&](int64_t first, int64_t n, int64_t b) {
    Scale scale;
    if constexpr (Blocks::kPairs) {
      uint8_t codes[Blocks::kBlock];
      scale = blocks.encode(x + first, n, codes);
      pack_nibbles(codes, n, codes_of(record) + first / 2);
    } else {
      scale = blocks.encode(x + first, n, codes_of(record) + first);
    }
    std::memcpy(scales + (Blocks::kRowScale ? 0 : b * int64_t{sizeof(Scale)}), &scale,
                sizeof(Scale));
  });
}

template <typename Blocks>
void decode_blocks(const RowFormat& format, const std::byte* record, float multiplier, float* x) {
  using Scale = typename Blocks::Scale;
  const std::byte* scales = record + format.scale_offset;
  for_each_block(format.width, Blocks::kBlock, [&](int64_t first, int64_t n, int64_t b) {
    Scale scale;
    std::memcpy(&scale, scales + (Blocks::kRowScale ? 0 : b * int64_t{sizeof(Scale)}),
                sizeof(Scale));
    if constexpr (Blocks::kPairs) {
      uint8_t codes[Blocks::kBlock];
      unpack_nibbles(codes_of(record) + first / 2, n, codes);
      Blocks::decode(codes, n, scale, multiplier, x + first);
    } else {
      Blocks::decode(codes_of(record) + first, n, scale, multiplier, x + first);
    }
  });
}

template <typename Blocks>
void round_trip_blocks(const Blocks& blocks, float multiplier, float* x, int64_t width) {
  for_each_block(width, Blocks::kBlock, [&](int64_t first, int64_t n, int64_t) {
    uint8_t codes[Blocks::kBlock];
    const auto scale = blocks.encode(x + first, n, codes);
    Blocks::decode(codes, n, scale, multiplier, x + first);
  });
}

/// Where an nvfp4 record keeps its fp32 global.
int64_t global_offset(const RowFormat& format) {
  return format.scale_offset + format.scale_bytes - int64_t{sizeof(float)};
}

/// Calls visit(blocks, multiplier) with the block codec of a scheme, for the row x[0, width).
template <typename Visit>
void with_blocks(const ActivationScheme& scheme, float static_scale, const float* x, int64_t width,
                 Visit visit) {
  switch (scheme.format) {
    case ActivationFormat::f32:
    case ActivationFormat::bf16: return;
    case ActivationFormat::fp8_tensor:
      visit(Fp8StaticBlocks{multiplier_of(scheme.sense, static_scale)}, 1.0f);
      return;
    case ActivationFormat::fp8_token:
      visit(Fp8StaticBlocks{fp8_scale(abs_max(x, width), scheme.ue8m0_scale)}, 1.0f);
      return;
    case ActivationFormat::fp8_block: visit(Fp8Blocks{scheme.ue8m0_scale}, 1.0f); return;
    case ActivationFormat::mxfp8: visit(MxBlocks<MxElement::e4m3>{}, 1.0f); return;
    case ActivationFormat::mxfp4: visit(MxBlocks<MxElement::e2m1>{}, 1.0f); return;
    case ActivationFormat::nvfp4: {
      Nvfp4Blocks blocks{scheme.sense, static_scale};
      if (!scheme.static_scale) {
        blocks = {ScaleSense::multiplier, nvfp4_global(abs_max(x, width))};
      }
      visit(blocks, multiplier_of(blocks.sense, blocks.global));
      return;
    }
  }
}

}  // namespace

void check_static_scale(const ActivationScheme& scheme, float static_scale) {
  const bool needed = scheme.format == ActivationFormat::fp8_tensor ||
                      (scheme.format == ActivationFormat::nvfp4 && scheme.static_scale);
  MOEKIT_CHECK(!needed || (static_scale >= kScaleFloor && static_scale <= 1.0f / kScaleFloor),
               "the static input scale of {} must lie in [2^-100, 2^100], got {}; the checkpoint's "
               "input scale is damaged",
               to_string(scheme.format), static_scale);
}

void encode_row(const ActivationScheme& scheme, float static_scale, const float* x, int64_t width,
                std::byte* record) {
  const RowFormat format = RowFormat::of(scheme.format, width);
  if (scheme.format == ActivationFormat::f32) {
    std::memcpy(record, x, static_cast<size_t>(width) * 4);
    std::memset(record + width * 4, 0, static_cast<size_t>(format.record_bytes - width * 4));
    return;
  }
  if (scheme.format == ActivationFormat::bf16) {
    auto* out = reinterpret_cast<uint16_t*>(record);
    for (int64_t i = 0; i < width; ++i) out[i] = f32_to_bf16(x[i]);
    std::memset(record + width * 2, 0, static_cast<size_t>(format.record_bytes - width * 2));
    return;
  }
  std::memset(record + format.code_bytes, 0,
              static_cast<size_t>(format.record_bytes - format.code_bytes));
  with_blocks(scheme, static_scale, x, width, [&](const auto& blocks, float multiplier) {
    encode_blocks(blocks, format, x, record);
    if (scheme.format == ActivationFormat::nvfp4) {
      std::memcpy(record + global_offset(format), &multiplier, sizeof(multiplier));
    }
  });
}

void decode_row(const RowFormat& format, const std::byte* record, float* x) {
  switch (format.format) {
    case ActivationFormat::f32:
      std::memcpy(x, record, static_cast<size_t>(format.width) * 4);
      return;
    case ActivationFormat::bf16: {
      const auto* in = reinterpret_cast<const uint16_t*>(record);
      for (int64_t i = 0; i < format.width; ++i) x[i] = bf16_to_f32(in[i]);
      return;
    }
    case ActivationFormat::fp8_tensor:
    case ActivationFormat::fp8_token:
      decode_blocks<Fp8StaticBlocks>(format, record, 1.0f, x);
      return;
    case ActivationFormat::fp8_block: decode_blocks<Fp8Blocks>(format, record, 1.0f, x); return;
    case ActivationFormat::mxfp8:
      decode_blocks<MxBlocks<MxElement::e4m3>>(format, record, 1.0f, x);
      return;
    case ActivationFormat::mxfp4:
      decode_blocks<MxBlocks<MxElement::e2m1>>(format, record, 1.0f, x);
      return;
    case ActivationFormat::nvfp4: {
      float multiplier;
      std::memcpy(&multiplier, record + global_offset(format), sizeof(multiplier));
      decode_blocks<Nvfp4Blocks>(format, record, multiplier, x);
      return;
    }
  }
}

void round_trip_row(const ActivationScheme& scheme, float static_scale, float* x, int64_t width) {
  if (scheme.format == ActivationFormat::bf16) {
    for (int64_t i = 0; i < width; ++i) x[i] = bf16_to_f32(f32_to_bf16(x[i]));
    return;
  }
  with_blocks(scheme, static_scale, x, width, [&](const auto& blocks, float multiplier) {
    round_trip_blocks(blocks, multiplier, x, width);
  });
}

}  // namespace moekit::quant
