// GpuTools: what a bench needs of a GPU beside the kernels of a layer: memory of its own, times of
// a graph, the speed at which memory is read. Part of the plug-in's interface
// (device/cuda_plugin.h).
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "base/thread_pool.h"  // FunctionRef

namespace moekit::device {

/// Owns memory of one device, aligned to 256 bytes.
class DeviceMemory {
 public:
  virtual ~DeviceMemory() = default;
  virtual void* data() const = 0;
  /// Synchronous; from or to the start of this memory.
  virtual void upload(const void* host, int64_t bytes) = 0;
  virtual void download(void* host, int64_t bytes) const = 0;
};

/// How often a captured graph is launched, back to back.
struct Replays {
  int untimed = 3;
  int timed = 25;
};

/// Devices are numbered as by CudaPlugin::gpu. Throws Error{cuda}, Error{out_of_memory} where the
/// device has no room.
class GpuTools {
 public:
  virtual ~GpuTools() = default;
  virtual std::unique_ptr<DeviceMemory> allocate(int device, int64_t bytes) const = 0;
  virtual int64_t free_bytes(int device) const = 0;
  virtual int64_t l2_bytes(int device) const = 0;
  /// Captures what `enqueue` puts on the stream that it is given (cudaStream_t) into one graph and
  /// launches that. Microseconds of each timed launch, by the device's events.
  virtual std::vector<double> time_graph(int device, Replays replays,
                                         FunctionRef<void(void* stream)> enqueue) const = 0;
  /// 1e9 bytes a second, best of several launches that read memory which no cache holds: 8 GiB, or
  /// half of what is free where that is less.
  virtual double read_gbs(int device) const = 0;
};

}  // namespace moekit::device
