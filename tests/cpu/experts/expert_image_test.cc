// Images of experts as the GPU's members make them: where panels lie, what is packed into them,
// what is refused.
#include "experts/gpu/expert_image.h"

#include <gtest/gtest.h>

#include "cpu/experts/layers.h"
#include "cpu/experts/stored_panels.h"
#include "experts/gpu/members.h"
#include "support/error_code.h"

namespace moekit::experts::cuda {
namespace {

using device::ExpertKernels;
using testing::LayerOptions;
using testing::TestLayer;

LayerOptions layer_options(WeightFormat format) {
  LayerOptions o;
  o.weights.format = format;
  o.bias = true;
  o.activation.kind = ActivationKind::swiglu_oai;
  return o;
}

TEST(ExpertImage, MatrixKernelsReadPanelsAndTheReferenceDoesNot) {
  for (const WeightFormat format : kFormats) {
    const TestLayer t(layer_options(format));
    const MoeConfig& c = t.layer.config;
    const ExpertImage sm90(c, ExpertKernels::sm90), decode(c, ExpertKernels::decode),
        reference(c, ExpertKernels::reference);
    EXPECT_EQ(sm90.bytes, decode.bytes) << "one image serves both chains";
    EXPECT_EQ(sm90.up.panels, operand(format));
    EXPECT_EQ(sm90.up.codes.bytes, kernels::panel_matrix_bytes(operand(format), c.inter, c.hidden));
    EXPECT_EQ(sm90.up.codes.offset - sm90.gate.codes.offset, sm90.gate.codes.bytes);
    EXPECT_EQ(sm90.down.codes.bytes,
              kernels::panel_matrix_bytes(operand(format), c.hidden, c.inter));
    EXPECT_EQ(sm90.up.scales.bytes, 0);
    EXPECT_FALSE(reference.up.panels);
    EXPECT_EQ(reference.up.codes.bytes, c.inter * reference.up.layout.code_row_bytes);
    EXPECT_GT(reference.up.scales.bytes, 0);
  }
  for (const WeightFormat format : {WeightFormat::bf16, WeightFormat::fp8_block}) {
    const TestLayer t(layer_options(format));
    EXPECT_FALSE(ExpertImage(t.layer.config, ExpertKernels::sm90).up.panels);
  }
}

TEST(ExpertImage, MembersPackPanelsBiasesAndMultipliers) {
  for (const WeightFormat format : kFormats) {
    const TestLayer t(layer_options(format));
    ThreadPool pool(2);
    for (const Experts* member : {&sm90_experts(), &cuda_decode_experts()}) {
      const WeightLayout layout = member->weight_layout(t.layer, t.local);
      EXPECT_EQ(layout.name, "cuda_panels");
      EXPECT_TRUE(layout.on_device);
      Buffer blob(layout.total_bytes());
      std::memset(blob.data(), 0xff, static_cast<size_t>(blob.size()));
      member->pack(t.layer, t.local, layout, blob.data(), pool);
      const ExpertImage image(t.layer.config, ExpertKernels::sm90);
      ASSERT_EQ(layout.expert_bytes(), image.bytes);
      for (size_t e = 0; e < t.layer.experts.size(); ++e) {
        const std::byte* at = blob.data() + layout.expert_offset[e];
        const StoredExpert& expert = t.layer.experts[e];
        const struct {
          const StoredMatrix& stored;
          const StoredVector& bias;
          const ImageMatrix& image;
        } matrices[] = {{expert.gate, expert.gate_bias, image.gate},
                        {expert.up, expert.up_bias, image.up},
                        {expert.down, expert.down_bias, image.down}};
        for (const auto& m : matrices) {
          Panels panels;
          panels.bytes.assign(at + m.image.codes.offset,
                              at + m.image.codes.offset + m.image.codes.bytes);
          std::memcpy(&panels.multiplier, at + m.image.global.offset, 4);
          expect_codecs_values(m.stored, panels);
          for (int64_t n = 0; n < m.stored.rows; ++n) {
            float bias;
            std::memcpy(&bias, at + m.image.bias.offset + n * 4, 4);
            ASSERT_EQ(bias, quant::element(m.bias, n));
          }
        }
      }
    }
    EXPECT_EQ(cuda_ref_experts().weight_layout(t.layer, t.local).name, "cuda_images");
  }
}

TEST(ExpertImage, FaultsOfAMatrixNameItsExpert) {
  TestLayer t(layer_options(WeightFormat::mxfp4));
  ThreadPool pool(2);
  const WeightLayout layout = sm90_experts().weight_layout(t.layer, t.local);
  Buffer blob(layout.total_bytes());
  std::vector<float> scales(static_cast<size_t>(160 * 3), 0.3f);
  ScaleGrid& grid = t.layer.experts[2].up.scales;
  grid.values.data = reinterpret_cast<const std::byte*>(scales.data());
  grid.values.unit = DType::f32;
  grid.values.row_stride = 12;
  grid.values.col_stride = 4;
  std::string text;
  EXPECT_EQ(test::code_of([&] { sm90_experts().pack(t.layer, t.local, layout, blob.data(), pool); },
                          &text),
            ErrorCode::unsupported);
  EXPECT_EQ(text.find("up of expert 2: the scale 0.3 of row 0"), 0u) << text;
}

TEST(ExpertImage, ScalesOfSingleColumnsAreRefusedWhenTheLayoutIsMade) {
  TestLayer t(layer_options(WeightFormat::mxfp4));
  // As ModelOpt packs GPT-OSS: groups of outputs.
  t.layer.experts[1].down.scales.row_group = 32;
  t.layer.experts[1].down.scales.col_group = 1;
  for (const Experts* member : {&sm90_experts(), &cuda_ref_experts()}) {
    std::string text;
    EXPECT_EQ(test::code_of([&] { member->weight_layout(t.layer, t.local); }, &text),
              ErrorCode::unsupported);
    EXPECT_NE(text.find("the scales of down of expert 1 stand for 1 columns"), std::string::npos)
        << text;
  }
}

}  // namespace
}  // namespace moekit::experts::cuda
