#include "device/cuda/tools.h"

#include <algorithm>

#include "base/check.h"
#include "device/cuda/device.h"
#include "device/cuda/read_probe.h"

namespace moekit::device {
namespace {

// Long enough that the ends of a launch do not count (2 ms at 4.6 TB/s), larger than any cache.
constexpr int64_t kProbeBytes = int64_t{8} << 30;
constexpr int64_t kLeastProbeBytes = int64_t{64} << 20;
// Blocks a multiprocessor: which one is fastest differs between GPUs.
constexpr int kProbeGrids[] = {2, 4, 8, 32};
constexpr int kProbeLaunches = 5;

class Memory final : public DeviceMemory {
 public:
  explicit Memory(int64_t bytes) : buffer_(bytes) {}
  void* data() const override { return buffer_.data(); }
  void upload(const void* host, int64_t bytes) override { buffer_.upload(host, bytes); }
  void download(void* host, int64_t bytes) const override { buffer_.download(host, bytes); }

 private:
  DeviceBuffer buffer_;
};

/// What a function enqueues, captured and ready to be launched.
class Graph {
 public:
  Graph(cudaStream_t stream, FunctionRef<void(void* stream)> enqueue) {
    // Other threads may allocate meanwhile.
    check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
    try {
      enqueue(stream);
    } catch (...) {
      cudaStreamEndCapture(stream, &graph_);
      clear();
      throw;
    }
    check_cuda(cudaStreamEndCapture(stream, &graph_), "end of capture");
    const cudaError_t status = cudaGraphInstantiate(&launch_, graph_, 0);
    if (status != cudaSuccess) clear();
    check_cuda(status, "cudaGraphInstantiate");
  }
  ~Graph() { clear(); }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  void launch(cudaStream_t stream) const {
    check_cuda(cudaGraphLaunch(launch_, stream), "cudaGraphLaunch");
  }

 private:
  void clear() {
    if (launch_ != nullptr) cudaGraphExecDestroy(launch_);
    if (graph_ != nullptr) cudaGraphDestroy(graph_);
    launch_ = nullptr;
    graph_ = nullptr;
    cudaGetLastError();  // of a capture that failed
  }

  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t launch_ = nullptr;
};

class Tools final : public GpuTools {
 public:
  std::unique_ptr<DeviceMemory> allocate(int device, int64_t bytes) const override {
    const OnDevice on(device);
    return std::make_unique<Memory>(bytes);
  }

  int64_t free_bytes(int device) const override {
    const OnDevice on(device);
    size_t free = 0, total = 0;
    check_cuda(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
    return static_cast<int64_t>(free);
  }

  int64_t l2_bytes(int device) const override { return properties(device).l2_bytes; }

  std::vector<double> time_graph(int device, Replays replays,
                                 FunctionRef<void(void* stream)> enqueue) const override {
    const OnDevice on(device);
    const Stream stream;
    const Graph graph(stream.get(), enqueue);
    const Event start, stop;
    std::vector<double> times;
    for (int i = 0; i < replays.untimed + replays.timed; ++i) {
      start.record(stream.get());
      graph.launch(stream.get());
      stop.record(stream.get());
      stop.synchronize();
      if (i >= replays.untimed) times.push_back(stop.us_since(start));
    }
    return times;
  }

  double read_gbs(int device) const override {
    const OnDevice on(device);
    const int64_t bytes = std::min(kProbeBytes, free_bytes(device) / 2) & ~int64_t{255};
    MOEKIT_CHECK_AS(ErrorCode::out_of_memory, bytes >= kLeastProbeBytes,
                    "probe of the GPU's memory: expected {} bytes of it to be free, {} are",
                    2 * kLeastProbeBytes, free_bytes(device));
    const Stream stream;
    const DeviceBuffer memory(bytes), sink(256);
    check_cuda(fill_all(memory.data(), bytes, stream.get()), "filling the probe's memory");
    const Event start, stop;
    const int num_sms = properties(device).num_sms;
    double least_us = 0;
    for (const int grid : kProbeGrids) {
      for (int i = 0; i <= kProbeLaunches; ++i) {
        start.record(stream.get());
        check_cuda(
            read_all(memory.data(), bytes, grid * num_sms, sink.as<uint32_t>(), stream.get()),
            "reading the probe's memory");
        stop.record(stream.get());
        stop.synchronize();
        const double us = stop.us_since(start);
        if (i > 0)
          least_us = least_us == 0 ? us : std::min(least_us, us);  // the first one warms up
      }
    }
    return static_cast<double>(bytes) / least_us / 1e3;
  }
};

}  // namespace

const GpuTools& cuda_tools() {
  static const Tools tools;
  return tools;
}

}  // namespace moekit::device
