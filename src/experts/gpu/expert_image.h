// ExpertImage: one expert's weights as device memory holds them: codes and scales in the canonical
// order of their format, row-major, then biases and globals as f32. Both sides of the CUDA plug-in
// compute it from the layer's configuration.
#pragma once

#include "moekit/config.h"
#include "problem/workspace_layout.h"
#include "quant/weight_codec.h"

namespace moekit::experts::cuda {

struct ImageMatrix {
  quant::EncodedLayout layout;  ///< sizes; its parts lie in the regions below
  Region codes, scales;
  Region bias;    ///< f32 [rows]
  Region global;  ///< f32 [1]
};

struct ExpertImage {
  ImageMatrix gate, up, down;  ///< gate is empty without one
  int64_t bytes = 0;           ///< a multiple of 128

  /// Throws invalid_argument for schemes that have no canonical storage.
  explicit ExpertImage(const MoeConfig& config) {
    WorkspaceLayout all;
    const int64_t width = config.routed_width();
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

 private:
  static Region add_codes(WorkspaceLayout& all, const ImageMatrix& m) {
    return all.add(m.layout.rows, m.layout.code_row_bytes);
  }
  static Region add_scales(WorkspaceLayout& all, const ImageMatrix& m) {
    return all.add(m.layout.scale_rows * m.layout.scale_cols, bytes_of(m.layout.scale_unit));
  }
};

}  // namespace moekit::experts::cuda
