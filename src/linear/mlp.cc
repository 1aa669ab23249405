#include "linear/mlp.h"

#include "linear/cpu_isa.h"
#include "linear/grouped_mlp.h"

namespace moekit::linear {
namespace {

MlpLayout layout_of(const StoredExpert* expert) {
  const StoredExpert* experts[1] = {expert};
  return plan_mlp(experts);
}

MlpShape shape_of(const StoredExpert& e, const ActivationSpec& activation,
                  const ActivationScheme& gate_up_input, const ActivationScheme& down_input) {
  return {.width = e.up.cols,
          .inter = e.up.rows,
          .top_k = 1,
          .activation = activation,
          .gate_up_input = gate_up_input,
          .down_input = down_input,
          .zero_points = may_have_zeros(e.up.scheme) || may_have_zeros(e.down.scheme)};
}

}  // namespace

bool Mlp::supports() const {
  const StoredExpert& e = *expert_;
  const bool gate_fits =
      !activation_.gated || (e.gate.rows == e.up.rows && e.gate.cols == e.up.cols);
  return gate_fits && e.up.rows > 0 && e.up.cols > 0 && e.down.cols == e.up.rows &&
         e.down.rows == e.up.cols;
}

int64_t Mlp::packed_bytes() const { return layout_of(expert_).total_bytes(); }

void Mlp::pack(std::byte* blob, ThreadPool& threads) const {
  const StoredExpert* experts[1] = {expert_};
  pack_mlp(experts, plan_mlp(experts), blob, threads);
}

int64_t Mlp::workspace_bytes(int64_t max_rows, int num_threads) const {
  return mlp_workspace_bytes(shape_of(*expert_, activation_, gate_up_input_, down_input_),
                             layout_of(expert_).places(), RowsLayout::standard, 1, max_rows,
                             num_threads);
}

void Mlp::run(const Args& args) const {
  const MlpShape shape = shape_of(*expert_, activation_, gate_up_input_, down_input_);
  MlpArgs mlp;
  mlp.isa = default_isa();
  mlp.shape = &shape;
  mlp.blob = args.blob;
  mlp.in.format = RowFormat::of(ActivationFormat::f32, shape.width);
  mlp.in.records = reinterpret_cast<const std::byte*>(args.x);
  mlp.in.record_stride = args.x_stride * int64_t{sizeof(float)};
  mlp.in.num_rows = args.num_rows;
  mlp.in.top_k = 1;  // and no ids: every row goes to expert 0
  mlp.output = MlpOutput::summed;
  mlp.out = args.y;
  mlp.workspace = args.workspace;
  mlp.threads = args.threads;
  mlp.stages = {trace::Stage::shared_gemm1, trace::Stage::shared_gemm2, trace::Stage::shared_sum};
  run_mlp(mlp);
}

}  // namespace moekit::linear
