// The bench of a plan for a GPU: the routed experts as independent calls in one graph, each with
// its own rows, routing and the next copy of all weights.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "api/bench_peers.h"
#include "device/cuda_plugin.h"
#include "device/gpu_tools.h"
#include "engine/plan.h"
#include "engine/synthetic.h"
#include "moekit/bench.h"

namespace moekit::api {

class GpuBench {
 public:
  /// Plans for the largest point and copies the weights to the device. Throws as Layer does, and
  /// unsupported for what is not timed on a GPU.
  GpuBench(const BenchRequest& request, const std::function<void(const std::string&)>& progress);

  BenchPoint point(int64_t tokens);

 private:
  /// One call's tensors in device memory.
  struct Call {
    std::unique_ptr<device::DeviceMemory> rows, ids, weights, out;
  };
  /// All calls of a point.
  struct Calls {
    int64_t tokens = 0;
    OwnedTensor hidden;  ///< [tokens + number of calls, width] bf16: call i begins at row i
    std::vector<engine::SyntheticRouting> routings;
    std::vector<Call> on_device;

    const engine::SyntheticRouting& routing(size_t i) const {
      return routings[i % routings.size()];
    }
  };

  void check_request() const;
  void make_plan();
  int choose_copies() const;
  Calls make_calls(int64_t tokens) const;
  RankedInputs inputs_of(const Calls& calls, size_t i) const;
  device::ExpertsCall args_of(const Calls& calls, size_t i) const;
  void run(const Calls& calls, size_t i, void* stream) const;
  /// Runs every call once, and holds rows of the first one to the reference. The error.
  double try_out(const Calls& calls) const;
  void describe_work(const Calls& calls, BenchPoint& p) const;
  void time(const Calls& calls, BenchPoint& p);
  void find_floor(BenchPoint& p);
  std::unique_ptr<device::DeviceMemory> upload(const void* host, int64_t bytes) const;
  bool f32_rows() const;
  void tell(const std::string& what) const {
    if (progress_) progress_(what);
  }

  const BenchRequest& request_;
  LayerSource source_;
  const std::function<void(const std::string&)>& progress_;
  PlanOptions options_;
  Explanation explanation_;
  std::unique_ptr<engine::Plan> plan_;
  const device::CudaPlugin* plugin_ = nullptr;
  std::vector<std::unique_ptr<device::DeviceExperts>> copies_;
  std::vector<std::unique_ptr<device::ExpertsWorkspace>> workspaces_;  ///< one a copy
  std::unique_ptr<PeerBench> peers_;                                   ///< null: none are asked for
  ProbeResult probe_;
};

}  // namespace moekit::api
