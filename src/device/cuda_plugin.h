// What libmoekit_cuda.so hands to libmoekit: the GPUs of this machine, and the routed experts of a
// layer on one of them. Both sides are built from one source tree (see the version below); errors
// are thrown as moekit::Error.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "device/arch.h"
#include "moekit/config.h"
#include "trace/stage.h"

namespace moekit::device {

/// Which kernels serve a layer's experts.
enum class ExpertKernels : int32_t { sm90, decode, reference };

/// What weights and workspaces on the device are made for.
struct ExpertsSpec {
  ExpertKernels kernels = ExpertKernels::reference;
  int32_t device = 0;
  MoeConfig config;                                    ///< activation schemes are resolved
  int64_t num_experts = 0;                             ///< on this device
  int64_t max_tokens = 0;                              ///< of one call
  ScaleSense gate_up_global = ScaleSense::multiplier;  ///< of nvfp4
  ScaleSense down_global = ScaleSense::multiplier;
};

/// Knobs of members that have two chains of launches: for a handful of tokens, and for any number.
inline constexpr std::string_view kDecodeChain = "chain=decode";
inline constexpr std::string_view kSplitChain = "chain=split";

enum class RowType : int32_t { f32, bf16 };

/// A step of a call as the device's clock saw it, from the start of the call's first step.
struct DeviceSpan {
  trace::Stage stage = trace::Stage::index;
  double begin_us = 0, end_us = 0;
};

/// One call. Pointers are host memory, or with `on_device` the device's.
struct ExpertsCall {
  int64_t num_tokens = 0;
  const void* rows = nullptr;  ///< [num_tokens, routed_width]
  RowType row_type = RowType::bf16;
  int64_t row_bytes = 0;           ///< from row to row
  const int32_t* ids = nullptr;    ///< [num_tokens, top_k], local; others have no expert
  const float* weights = nullptr;  ///< [num_tokens, top_k]
  void* out = nullptr;             ///< [num_tokens, routed_width], weighted and summed
  RowType out_type = RowType::f32;
  std::string_view knobs;  ///< kDecodeChain where the launches for few tokens serve
  bool on_device = false;
  /// cudaStream_t. Null: the default stream, or for host memory the workspace's own.
  void* stream = nullptr;
  /// Not null: replaced by the steps of this call, which then allocates, and runs its steps one
  /// after the other where they would overlap. On host memory only.
  std::vector<DeviceSpan>* spans = nullptr;
};

/// Everything mutable of one call in flight. Allocates when it is made, never later.
class ExpertsWorkspace {
 public:
  virtual ~ExpertsWorkspace() = default;
  /// On the device's memory: enqueues and returns. On host memory: returns when `out` is written.
  virtual void run(const ExpertsCall& call) = 0;
};

/// The packed weights of a layer's experts in the memory of one device.
class DeviceExperts {
 public:
  virtual ~DeviceExperts() = default;
  /// Copies the image (experts/gpu/expert_image.h) of an expert; returns when `image` may go.
  virtual void upload(int64_t expert, const std::byte* image) = 0;
  /// After the last upload.
  virtual void finish() = 0;
  /// Keeps the weights in use: must not outlive them.
  virtual std::unique_ptr<ExpertsWorkspace> make_workspace() const = 0;
};

class GpuTools;

struct GpuFacts {
  std::string name;
  Arch arch;
  int64_t memory_bytes = 0;
};

class CudaPlugin {
 public:
  virtual ~CudaPlugin() = default;
  /// "CUDA 13.0".
  virtual std::string library() const = 0;
  /// Targets of the compiled kernels: "80,90a,100a,120a".
  virtual std::string targets() const = 0;
  /// GPUs that can be used; 0 without a driver.
  virtual int num_gpus() const = 0;
  virtual GpuFacts gpu(int index) const = 0;
  /// Device memory of one workspace. Needs no GPU.
  virtual int64_t workspace_bytes(const ExpertsSpec& spec) const = 0;
  virtual std::unique_ptr<DeviceExperts> make_experts(const ExpertsSpec& spec) const = 0;
  /// device/gpu_tools.h.
  virtual const GpuTools& tools() const = 0;
};

/// Raised whenever something above or in device/gpu_tools.h changes.
inline constexpr uint32_t kCudaPluginInterface = 2;
inline constexpr const char* kCudaPluginEntry = "moekit_cuda_plugin";
/// The only symbol of the plug-in. Null where it was built for another interface or version
/// (MOEKIT_VERSION) of moekit. Lives as long as the process.
using CudaPluginEntry = const CudaPlugin*(uint32_t interface, const char* version);

}  // namespace moekit::device
