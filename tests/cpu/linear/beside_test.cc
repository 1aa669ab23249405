// Panels side by side: the bits of one panel at a time, in every format on every ISA that has such
// kernels, whether or not this CPU prefers them.
#include <gtest/gtest.h>

#include <array>
#include <vector>

#include "base/buffer.h"
#include "base/cpu_features.h"
#include "cpu/linear/matrices.h"
#include "linear/kernels.h"
#include "linear/panel_pack.h"
#include "linear/product.h"
#include "linear/row_operand.h"
#include "quant/row_format.h"

namespace moekit::linear {
namespace {

using testing::random_values;

constexpr int64_t kPanels = 7;
constexpr int64_t kRows = kPanels * kPanelCols;
constexpr int64_t kCols = 672;  // neither whole chunks nor whole segments of 128
constexpr int64_t kSumsOfPanel = kMaxRowsBeside * kPanelCols;

/// Seven panels of random weights.
struct Packed {
  PanelSpec spec;
  Buffer panels;

  explicit Packed(const WeightScheme& scheme) {
    const auto w = random_values(kRows, kCols, 5, 0.1f);
    const auto encoded = quant::encode_matrix(w.data(), kRows, kCols, scheme);
    spec = plan_panels(encoded.view);
    panels = Buffer(spec.total_bytes());
    const StoredVector no_bias;
    for (int64_t i = 0; i < kPanels; ++i) {
      pack_panel({&encoded.view, &no_bias, &spec, i, at(i)});
    }
  }
  std::byte* at(int64_t panel) { return panels.data() + panel * spec.panel_bytes(); }
};

/// Rows in the operand type of `plan`.
struct Operands {
  std::vector<Buffer> memory;
  std::array<RowOperand, kMaxRowsBeside> rows;

  explicit Operands(const ProductPlan& plan) {
    const auto x = random_values(kMaxRowsBeside, kCols, 6);
    const RowFormat format = RowFormat::of(ActivationFormat::f32, kCols);
    for (size_t r = 0; r < rows.size(); ++r) {
      memory.emplace_back(operand_stride(kCols));
      std::byte* values = memory.back().data();
      memory.emplace_back(4 * operand_extras(kCols, plan.input.format, plan.sums));
      auto* extras = reinterpret_cast<float*>(memory.back().data());
      const Buffer scratch(prepare_scratch_bytes(kCols, 0));
      RowRecord record;
      record.format = &format;
      record.data = reinterpret_cast<const std::byte*>(x.data() + r * kCols);
      rows[r] = prepare_row(plan, record, values, extras, scratch.data());
    }
  }
};

/// Sums of panels [0, num_panels), each product by itself or all of them in one call.
std::vector<float> multiply(const ProductPlan& plan, Packed& packed, const RowOperand* rows,
                            int64_t num_rows, int64_t num_panels, bool together) {
  std::vector<float> sums(static_cast<size_t>(kPanels * kSumsOfPanel), 7.0f);
  std::vector<Product> products;
  for (int64_t i = 0; i < num_panels; ++i) {
    products.push_back(Product::of(plan, packed.at(i), packed.at((i + 1) % kPanels), rows,
                                   sums.data() + i * kSumsOfPanel));
  }
  const Buffer scratch(kScratchBytes);
  if (together) {
    multiply_panels(products, num_rows, scratch.data());
  } else {
    for (const Product& p : products) multiply_panel(p, num_rows, scratch.data());
  }
  return sums;
}

TEST(PanelsBeside, BitsOfOnePanelAtATime) {
  for (const CpuIsa isa : available_cpu_isas()) {
    for (const WeightScheme& scheme : testing::all_weight_schemes()) {
      for (const ActivationFormat input :
           {ActivationFormat::f32, ActivationFormat::bf16, ActivationFormat::fp8_block}) {
        Packed packed(scheme);
        ProductPlan plan = ProductPlan::of(isa, packed.spec, ActivationScheme{input});
        Kernels eager = *plan.kernels;
        eager.prefers_beside = true;
        plan.kernels = &eager;
        Operands operands(plan);
        for (int64_t rows = 1; rows <= kMaxRowsBeside; ++rows) {
          for (int64_t panels = 1; panels <= kPanels; ++panels) {
            ASSERT_EQ(multiply(plan, packed, operands.rows.data(), rows, panels, false),
                      multiply(plan, packed, operands.rows.data(), rows, panels, true))
                << to_string(isa) << " " << testing::name_of(scheme) << ", " << rows << " rows, "
                << panels << " panels";
          }
        }
      }
    }
  }
}

/// Products of other rows, or of panels at uneven distances, keep their own sums.
TEST(PanelsBeside, OnlyWhatLiesEvenlyAndSharesItsRows) {
  for (const CpuIsa isa : available_cpu_isas()) {
    Packed packed(WeightScheme{WeightFormat::mxfp4});
    ProductPlan plan = ProductPlan::of(isa, packed.spec, ActivationScheme{ActivationFormat::bf16});
    Kernels eager = *plan.kernels;
    eager.prefers_beside = true;
    plan.kernels = &eager;
    Operands operands(plan);
    const Buffer scratch(kScratchBytes);
    struct Choice {
      int64_t panel;
      size_t row;
    };
    for (const std::vector<Choice>& choices : {std::vector<Choice>{{0, 0}, {1, 1}, {2, 0}, {3, 1}},
                                               {{0, 0}, {1, 0}, {3, 0}, {4, 0}},
                                               {{5, 2}, {3, 2}, {1, 2}, {0, 2}},
                                               {{0, 0}, {1, 0}, {2, 0}, {3, 2}}}) {
      std::vector<float> alone(static_cast<size_t>(kPanels * kSumsOfPanel));
      std::vector<float> together = alone;
      std::vector<Product> products;
      for (size_t i = 0; i < choices.size(); ++i) {
        const auto place = static_cast<int64_t>(i) * kSumsOfPanel;
        Product p = Product::of(plan, packed.at(choices[i].panel), packed.at(6),
                                &operands.rows[choices[i].row], alone.data() + place);
        multiply_panel(p, 1, scratch.data());
        p.c = together.data() + place;
        products.push_back(p);
      }
      multiply_panels(products, 1, scratch.data());
      ASSERT_EQ(alone, together) << to_string(isa);
    }
  }
}

}  // namespace
}  // namespace moekit::linear
