// Makes descriptors, picks the instance, launches.
#include "kernels/common/launch.h"

#include <algorithm>

#include "kernels/common/limits.h"
#include "kernels/common/tensor_map.h"
#include "kernels/sm90_grouped_gemm/src/instances.h"

namespace moekit::kernels::sm90_grouped_gemm {

struct Launch::Prepared {
  KernelArgs args;
  Instance instance;
  int num_blocks = 0;
};

Launch::Launch() = default;
Launch::Launch(Launch&&) noexcept = default;
Launch& Launch::operator=(Launch&&) noexcept = default;
Launch::~Launch() = default;

namespace {

std::span<const Instance> instances_of(const Shape& shape) {
  switch (shape.format) {
    case Format::mxfp4: return mxfp4_instances();
    case Format::nvfp4: return nvfp4_instances();
    case Format::mxfp8: return mxfp8_instances();
    default: break;
  }
  const bool bf16 = shape.format == Format::bf16;
  switch (shape.phase) {
    case Phase::gate_up: return bf16 ? bf16_gate_up_instances() : fp8_gate_up_instances();
    case Phase::up: return bf16 ? bf16_up_instances() : std::span<const Instance>{};
    case Phase::down: return bf16 ? bf16_down_instances() : fp8_down_instances();
  }
  return {};
}

const Instance* find_panel_instance(const Shape& shape, int32_t cluster) {
  for (const Instance& candidate : instances_of(shape)) {
    if (candidate.knobs.gated() == (shape.phase == Phase::gate_up) &&
        candidate.knobs.cluster == cluster &&
        candidate.knobs.tile() == tile_size(candidate.knobs.phase, shape.short_tasks)) {
      return &candidate;
    }
  }
  return nullptr;
}

/// The instance that reads rows as they are given, with this cluster size if there is one.
const Instance* find_instance(const Args& args, int32_t cluster) {
  if (in_panels(args.shape.format)) return find_panel_instance(args.shape, cluster);
  const bool gathers = args.shape.phase != Phase::down && args.row_index != nullptr;
  const Instance* found = nullptr;
  for (const Instance& candidate : instances_of(args.shape)) {
    if (candidate.knobs.gathers() != gathers) continue;
    if (found == nullptr || candidate.knobs.cluster == cluster) found = &candidate;
  }
  return found;
}

TensorMapSpec weights_map(const Args& args, const Knobs& knobs) {
  TensorMapSpec spec;
  spec.base = args.weights.base;
  spec.element = knobs.element_bytes() == 2 ? TileElement::b16 : TileElement::b8;
  spec.rank = 4;
  const auto columns = static_cast<uint64_t>(args.shape.columns);
  const auto row_bytes = static_cast<uint64_t>(args.weights.row_bytes);
  spec.dims = {static_cast<uint64_t>(args.shape.depth), columns, knobs.gated() ? 2u : 1u,
               static_cast<uint64_t>(args.shape.num_experts)};
  spec.strides = {row_bytes,
                  knobs.gated() ? static_cast<uint64_t>(args.weights.half_bytes) : row_bytes,
                  static_cast<uint64_t>(args.weights.expert_bytes)};
  spec.box = {static_cast<uint32_t>(knobs.block_depth()), static_cast<uint32_t>(knobs.box_rows()),
              knobs.gated() ? 2u : 1u, 1};
  return spec;
}

TensorMapSpec rows_map(const Args& args, const Knobs& knobs) {
  TensorMapSpec spec;
  spec.base = args.rows;
  spec.element = knobs.element_bytes() == 2 ? TileElement::b16 : TileElement::b8;
  spec.rank = 2;
  spec.dims = {static_cast<uint64_t>(args.shape.depth), static_cast<uint64_t>(args.max_rows)};
  spec.strides = {static_cast<uint64_t>(args.row_bytes)};
  spec.box = {static_cast<uint32_t>(knobs.block_depth()), 64};
  return spec;
}

}  // namespace

const char* refusal(const Shape& shape) {
  if (shape.num_experts <= 0 || shape.columns <= 0 || shape.depth <= 0) {
    return "sizes must be positive";
  }
  constexpr Limits kLimits = kGroupedGemmLimits;
  static_assert(kLimits.size_multiple == 32);
  if (shape.columns % kLimits.size_multiple != 0 || shape.depth % kLimits.size_multiple != 0) {
    return "columns and depth must be multiples of 32";
  }
  if (shape.num_experts > kLimits.max_experts) return "at most 4096 experts fit";
  if (shape.short_tasks && !has_short_tasks(shape.format)) return "no instance for short tasks";
  if (!kLimits.fp8_without_gate && shape.format == Format::fp8_block && shape.phase == Phase::up) {
    return "fp8 without a gate has no instance";
  }
  return nullptr;
}

cudaError_t Launch::make(const Args& args, int num_sms, bool cluster, Launch* launch) {
  if (refusal(args.shape) != nullptr || args.row_bytes % 16 != 0 || args.out_row_bytes % 16 != 0 ||
      num_sms < 2) {
    return cudaErrorInvalidValue;
  }
  const Instance* instance = find_instance(args, cluster ? 2 : 1);
  if (instance == nullptr) return cudaErrorNotSupported;
  auto prepared = std::make_unique<Prepared>();
  prepared->instance = *instance;
  prepared->args.args = args;
  prepared->num_blocks = num_sms / 2 * 2;
  cudaError_t status = cudaSuccess;
  if (!in_panels(args.shape.format)) {
    status = encode_tensor_map(weights_map(args, instance->knobs), &prepared->args.weights);
  }
  const bool in_order =
      in_panels(args.shape.format) ? args.row_index == nullptr : !instance->knobs.gathers();
  if (status == cudaSuccess && in_order) {
    status = encode_tensor_map(rows_map(args, instance->knobs), &prepared->args.rows);
  }
  if (status == cudaSuccess) {
    status = cudaFuncSetAttribute(instance->kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  instance->shared_bytes);
  }
  if (status == cudaSuccess) launch->prepared_ = std::move(prepared);
  return status;
}

cudaError_t Launch::run(cudaStream_t stream, bool overlap, const void* rows) const {
  const Prepared& p = *prepared_;
  const int threads = 128 * (p.instance.knobs.groups + 1);
  const LaunchShape shape{dim3(p.num_blocks),
                          dim3(threads),
                          static_cast<size_t>(p.instance.shared_bytes),
                          stream,
                          overlap,
                          static_cast<unsigned>(p.instance.knobs.cluster)};
  KernelArgs args = p.args;
  if (rows != nullptr) args.args.rows = rows;
  void* arguments[] = {&args};
  return launch_raw(p.instance.kernel, shape, arguments);
}

}  // namespace moekit::kernels::sm90_grouped_gemm
