// The CUDA side of the device layer: errors, stream, memory, properties of a GPU. Everything throws
// Error{cuda} (out_of_memory where the device has no room) naming the call.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "device/arch.h"

namespace moekit::device {

/// Throws unless `status` is success. A sticky error of the context stays: the caller's process has
/// to give the device up.
void check_cuda(cudaError_t status, const char* what);

/// Properties that kernels are chosen and sized by.
struct Properties {
  int index = 0;
  Arch arch;
  std::string name;
  int num_sms = 0;
  int64_t l2_bytes = 0;
  int64_t memory_bytes = 0;
  int64_t shared_bytes_per_block = 0;  ///< largest dynamic shared memory after opting in
};

/// Number of usable devices; 0 without a driver, never throws for that.
int device_count();
Properties properties(int index);

/// Makes a device current, and gives the caller's back.
class OnDevice {
 public:
  explicit OnDevice(int index);
  ~OnDevice();
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  int before_ = 0;
};

/// Owns an event that takes times.
class Event {
 public:
  Event();
  Event(Event&& other) noexcept : event_(std::exchange(other.event_, nullptr)) {}
  Event& operator=(Event&& other) noexcept {
    std::swap(event_, other.event_);
    return *this;
  }
  ~Event();
  void record(cudaStream_t stream) const;
  void synchronize() const;
  /// Microseconds from `earlier` to this one; both have happened.
  double us_since(const Event& earlier) const;

 private:
  cudaEvent_t event_ = nullptr;
};

/// Owns a non-blocking stream of the current device.
class Stream {
 public:
  Stream();
  Stream(Stream&& other) noexcept : stream_(std::exchange(other.stream_, nullptr)) {}
  Stream& operator=(Stream&& other) noexcept {
    std::swap(stream_, other.stream_);
    return *this;
  }
  ~Stream();
  cudaStream_t get() const { return stream_; }
  void synchronize() const;

 private:
  cudaStream_t stream_ = nullptr;
};

/// Owns device memory of the current device, aligned to 256 bytes. Contents are uninitialised.
class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  explicit DeviceBuffer(int64_t bytes);
  DeviceBuffer(DeviceBuffer&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
  }
  ~DeviceBuffer();
  void* data() const { return data_; }
  int64_t size() const { return size_; }
  template <typename T>
  T* as() const {
    return static_cast<T*>(data_);
  }
  /// Synchronous copies of size() bytes at most.
  void upload(const void* host, int64_t bytes) const;
  void download(void* host, int64_t bytes) const;

 private:
  void* data_ = nullptr;
  int64_t size_ = 0;
};

}  // namespace moekit::device
