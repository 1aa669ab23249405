#include "experts/cuda/decode_layer.h"

#include "base/check.h"
#include "base/math.h"
#include "device/cuda/device.h"
#include "experts/cuda/stage_clock.h"
#include "problem/workspace_layout.h"

namespace moekit::experts::cuda {

namespace decode = kernels::smxx_decode;
namespace rows = kernels::smxx_moe;
using device::check_cuda;
using trace::Stage;

namespace {

struct Regions {
  Region inter, inter_values, inter_scales, out_rows;
  WorkspaceLayout layout;
  explicit Regions(const SplitLayerSpec& spec) {
    const int64_t slots = spec.max_tokens * spec.top_k;
    const bool fp8 = spec.format == kernels::OperandFormat::fp8_block;
    const bool panels = kernels::in_panels(spec.format);
    inter = layout.add(slots * (panels ? kernels::panel_row_elements(spec.inter) : spec.inter),
                       fp8 ? 1 : 2);
    if (fp8) {
      inter_values = layout.add(slots * spec.inter, 4);
      inter_scales = layout.add(slots * ceil_div(spec.inter, 128), 4);
    }
    out_rows = layout.add(slots * spec.hidden, 4);
  }
};

decode::Args args_of(const SplitLayerSpec& spec) {
  decode::Args args;
  args.format = spec.format;
  args.num_tokens = static_cast<int32_t>(spec.max_tokens);
  args.top_k = spec.top_k;
  args.num_experts = spec.num_experts;
  args.hidden = spec.hidden;
  args.inter = spec.inter;
  args.gated = spec.activation.gated;
  args.activation = kernels::epilogue_activation(spec.activation);
  args.num_sms = spec.num_sms;
  return args;
}

}  // namespace

const char* DecodeLayer::refusal(const SplitLayerSpec& spec) {
  if (spec.num_experts < 1 || spec.top_k < 1 || spec.max_tokens < 1)
    return "sizes must be positive";
  if (spec.max_tokens > decode::kMaxTokens) return "decode takes 1 to 8 tokens and up to 64 slots";
  return decode::refusal(args_of(spec));
}

int64_t DecodeLayer::workspace_bytes(const SplitLayerSpec& spec) {
  return Regions(spec).layout.total();
}

DecodeLayer::DecodeLayer(const SplitLayerSpec& spec, const SplitLayerWeights& weights,
                         void* workspace)
    : spec_(spec), args_(args_of(spec)) {
  const char* reason = refusal(spec);
  MOEKIT_CHECK_AS(ErrorCode::unsupported, reason == nullptr, "decode layer: {}", reason);
  const Regions r(spec);
  auto* base = static_cast<std::byte*>(workspace);
  args_.gate_up = weights.gate_up;
  args_.down = weights.down;
  args_.gate_bias = weights.gate_bias;
  args_.up_bias = weights.up_bias;
  args_.down_bias = weights.down_bias;
  args_.h = r.inter.in<void>(base);
  args_.y = r.out_rows.in<float>(base);
  if (spec.format == kernels::OperandFormat::fp8_block) {
    args_.h_values = r.inter_values.in<float>(base);
    args_.h_scales = r.inter_scales.in<float>(base);
  }
}

void DecodeLayer::run(const void* hidden, const int32_t* ids, const float* weights,
                      int64_t num_tokens, const int32_t* live_tokens, void* out,
                      cudaStream_t stream, rows::RowType out_type, StageClock* clock) const {
  MOEKIT_CHECK(num_tokens >= 0 && num_tokens <= spec_.max_tokens,
               "a call of {} tokens on a layer planned for {}", num_tokens, spec_.max_tokens);
  if (num_tokens == 0) return;
  decode::Args args = args_;
  args.num_tokens = static_cast<int32_t>(num_tokens);
  args.live_tokens = live_tokens;
  args.ids = ids;
  args.x = hidden;
  if (decode::owns_columns(args)) {
    args.out = out;
    args.out_f32 = out_type == rows::RowType::f32;
    args.weights = weights;
  }
  check_cuda(decode::gate_up(args, stream, spec_.overlap), "decode gate_up");
  mark(clock, Stage::gemm1);
  check_cuda(decode::down(args, stream, spec_.overlap), "decode down");
  mark(clock, Stage::gemm2);
  if (args.out != nullptr) return;
  check_cuda(rows::combine_rows(args.y, rows::RowType::f32, ids, weights, num_tokens, live_tokens,
                                spec_.top_k, spec_.num_experts, spec_.hidden, out_type, out, stream,
                                spec_.overlap),
             "combine kernel");
  mark(clock, Stage::sum);
}

}  // namespace moekit::experts::cuda
