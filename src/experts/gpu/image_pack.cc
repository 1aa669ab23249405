#include "experts/gpu/image_pack.h"

#include <cstring>
#include <span>
#include <string>

#include "base/check.h"
#include "experts/gpu/panel_pack.h"
#include "quant/stored_codec.h"
#include "tensor/float_formats.h"

namespace moekit::experts::cuda {
namespace {

void pack_codes(const StoredMatrix& m, const quant::EncodedLayout& layout, std::byte* to) {
  const auto bits = static_cast<int>(layout.code_row_bytes * 8 / m.cols);
  const bool dense = quant::is_dense(m.codes, bits);
  for (int64_t n = 0; n < m.rows; ++n) {
    std::byte* row = to + n * layout.code_row_bytes;
    if (dense) {
      const std::byte* from = m.codes.data + (m.row_first + m.row_step * n) * m.codes.row_stride;
      std::memcpy(row, from, static_cast<size_t>(layout.code_row_bytes));
    } else {
      quant::copy_codes(m, n, 0, m.cols, bits, row);
    }
  }
}

void pack_scales(const StoredMatrix& m, const quant::EncodedLayout& layout, std::byte* to) {
  for (int64_t r = 0; r < layout.scale_rows; ++r) {
    for (int64_t c = 0; c < layout.scale_cols; ++c) {
      const float scale = quant::scale_at(m, r * layout.row_group, c * layout.col_group);
      const int64_t i = r * layout.scale_cols + c;
      if (layout.scale_unit == DType::f8_e8m0) {
        to[i] = std::byte{power_to_e8m0(scale)};
      } else if (layout.scale_unit == DType::f8_e4m3) {
        to[i] = std::byte{f32_to_e4m3(scale)};
      } else {
        std::memcpy(to + i * 4, &scale, 4);
      }
    }
  }
}

/// A matrix of an expert, as errors name it.
struct MatrixName {
  const char* matrix;
  int32_t expert;
  std::string text() const { return fmt::format("{} of expert {}", matrix, expert); }
};

void pack_matrix(const StoredMatrix& m, const StoredVector& bias, const ImageMatrix& image,
                 const MatrixName& name, std::byte* to) {
  float global = m.global;
  if (image.panels) {
    global = pack_panels(m, *image.panels, name.text(), to + image.codes.offset);
  } else {
    pack_codes(m, image.layout, to + image.codes.offset);
    pack_scales(m, image.layout, to + image.scales.offset);
  }
  auto* floats = image.bias.in<float>(to);
  for (int64_t n = 0; n < image.bias.bytes / 4; ++n) {
    floats[n] = bias.empty() ? 0.0f : quant::element(bias, n);
  }
  *image.global.in<float>(to) = global;
}

/// Whether each group of `wanted` columns (0: all) has one stored scale.
bool has_groups(const StoredMatrix& m, int64_t wanted) {
  if (m.scales.empty()) return true;
  const int64_t stored = m.scales.col_group;
  if (m.group_index != nullptr) return false;
  return stored == 0 || stored >= m.cols || (wanted != 0 && stored % wanted == 0);
}

void check_matrix(const StoredMatrix& m, const ImageMatrix& image, ScaleSense sense,
                  const MatrixName& name) {
  if (m.empty()) return;
  const bool blocks = m.scheme.format == WeightFormat::fp8_block;
  MOEKIT_CHECK_AS(ErrorCode::unsupported, !blocks || (m.row_step == 1 && m.row_first % 128 == 0),
                  "the blocks of {} begin at row {} of a stacked matrix: for a device they must "
                  "begin at a multiple of 128",
                  name.text(), m.row_first);
  MOEKIT_CHECK_AS(ErrorCode::unsupported, has_groups(m, image.layout.col_group),
                  "the scales of {} stand for {} columns each: for a device it must be whole "
                  "groups of {}",
                  name.text(), m.scales.col_group, image.layout.col_group);
  MOEKIT_CHECK_AS(ErrorCode::unsupported, image.panels.has_value() || m.global_sense == sense,
                  "the globals of {} multiply in some experts and divide in others", name.matrix);
}

}  // namespace

void check_images(const CanonicalLayer& layer, std::span<const int32_t> local_experts,
                  const ExpertImage& image) {
  for (int32_t e : local_experts) {
    const StoredExpert& expert = layer.experts[static_cast<size_t>(e)];
    const StoredExpert& first = layer.experts[static_cast<size_t>(local_experts.front())];
    check_matrix(expert.gate, image.gate, first.up.global_sense, {"gate", e});
    check_matrix(expert.up, image.up, first.up.global_sense, {"up", e});
    check_matrix(expert.down, image.down, first.down.global_sense, {"down", e});
  }
}

void pack_image(const StoredExpert& expert, int32_t expert_id, const ExpertImage& image,
                std::byte* to) {
  std::memset(to, 0, static_cast<size_t>(image.bytes));
  if (!expert.gate.empty()) {
    pack_matrix(expert.gate, expert.gate_bias, image.gate, {"gate", expert_id}, to);
  }
  pack_matrix(expert.up, expert.up_bias, image.up, {"up", expert_id}, to);
  pack_matrix(expert.down, expert.down_bias, image.down, {"down", expert_id}, to);
}

}  // namespace moekit::experts::cuda
