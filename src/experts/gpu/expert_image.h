// ExpertImage: one expert's weights as device memory holds them: codes and scales in the canonical
// order of their format, row-major, or in panels (kernels/common/weight_panels.h) where the matrix
// kernels read them so; then biases and globals as f32. Both sides of the CUDA plug-in compute it
// from the layer's configuration and the kernels that serve it.
#pragma once

#include <optional>

#include "device/cuda_plugin.h"
#include "kernels/common/weight_panels.h"
#include "moekit/config.h"
#include "problem/workspace_layout.h"
#include "quant/weight_codec.h"

namespace moekit::experts::cuda {

/// How the matrix kernels (every ExpertKernels but `reference`) read weights of a format; nothing
/// where they have no kernel for it.
constexpr std::optional<kernels::OperandFormat> operand_format(WeightFormat format) {
  switch (format) {
    case WeightFormat::bf16: return kernels::OperandFormat::bf16;
    case WeightFormat::fp8_block: return kernels::OperandFormat::fp8_block;
    case WeightFormat::mxfp4: return kernels::OperandFormat::mxfp4;
    case WeightFormat::nvfp4: return kernels::OperandFormat::nvfp4;
    case WeightFormat::mxfp8: return kernels::OperandFormat::mxfp8;
    default: return std::nullopt;
  }
}

struct ImageMatrix {
  quant::EncodedLayout layout;                   ///< sizes; its parts lie in the regions below
  std::optional<kernels::OperandFormat> panels;  ///< set: `codes` are panels, which hold the scales
  Region codes, scales;
  Region bias;    ///< f32 [rows]
  Region global;  ///< f32 [1]; in panels what sums are multiplied by
};

struct ExpertImage {
  ImageMatrix gate, up, down;  ///< gate is empty without one
  int64_t bytes = 0;           ///< a multiple of 128

  /// Throws invalid_argument for schemes that have no canonical storage.
  ExpertImage(const MoeConfig& config, device::ExpertKernels kernels) {
    WorkspaceLayout all;
    const int64_t width = config.routed_width();
    gate.panels = up.panels = panels_of(config.gate_up_weights.format, kernels);
    down.panels = panels_of(config.down_weights.format, kernels);
    gate.layout = up.layout = quant::EncodedLayout::of(config.gate_up_weights, config.inter, width);
    down.layout = quant::EncodedLayout::of(config.down_weights, width, config.inter);
    // Gate and up side by side: kernels step from one to the other by a constant.
    if (config.activation.gated) gate.codes = add_codes(all, gate);
    up.codes = add_codes(all, up);
    if (config.activation.gated) gate.scales = add_scales(all, gate);
    up.scales = add_scales(all, up);
    down.codes = add_codes(all, down);
    down.scales = add_scales(all, down);
    for (ImageMatrix* m : {&gate, &up, &down}) {
      if (m == &gate && !config.activation.gated) continue;
      const bool gate_up = m != &down;
      if (gate_up ? config.has_gate_up_bias : config.has_down_bias) {
        m->bias = all.add(m->layout.rows, sizeof(float));
      }
      m->global = all.add(1, sizeof(float));
    }
    bytes = all.total();
  }

  /// Whether a matrix of this format lies in panels for these kernels, and as what.
  static std::optional<kernels::OperandFormat> panels_of(WeightFormat format,
                                                         device::ExpertKernels kernels) {
    const auto operand = operand_format(format);
    const bool yes =
        kernels != device::ExpertKernels::reference && operand && kernels::in_panels(*operand);
    return yes ? operand : std::nullopt;
  }

 private:
  static Region add_codes(WorkspaceLayout& all, const ImageMatrix& m) {
    if (m.panels) {
      return all.add(kernels::panel_matrix_bytes(*m.panels, m.layout.rows, m.layout.cols), 1);
    }
    return all.add(m.layout.rows, m.layout.code_row_bytes);
  }
  static Region add_scales(WorkspaceLayout& all, const ImageMatrix& m) {
    if (m.panels) return {};
    return all.add(m.layout.scale_rows * m.layout.scale_cols, bytes_of(m.layout.scale_unit));
  }
};

}  // namespace moekit::experts::cuda
