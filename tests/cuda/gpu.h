// What the GPU tests share: skipping, arrays on the device, random numbers.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "device/cuda/device.h"
#include "tensor/float_formats.h"

namespace moekit::testing {

#define MOEKIT_NEEDS_GPU(minimum)                                                             \
  do {                                                                                        \
    if (::moekit::device::device_count() == 0) GTEST_SKIP() << "no GPU";                      \
    if (::moekit::device::properties(0).arch.number() < (minimum)) GTEST_SKIP() << "old GPU"; \
  } while (0)

/// An array on the device. Fresh ones are poisoned: every byte 0xff, NaN in all our float formats.
template <typename T>
class DeviceArray {
 public:
  explicit DeviceArray(size_t count)
      : buffer_(static_cast<int64_t>(count * sizeof(T))), count_(count) {
    if (count > 0)
      device::check_cuda(cudaMemset(buffer_.data(), 0xff, count * sizeof(T)), "memset");
  }
  explicit DeviceArray(const std::vector<T>& host) : DeviceArray(host.size()) { set(host); }
  void set(const std::vector<T>& host) const {
    buffer_.upload(host.data(), static_cast<int64_t>(host.size() * sizeof(T)));
  }
  std::vector<T> get() const {
    device::check_cuda(cudaDeviceSynchronize(), "kernel");
    std::vector<T> host(count_);
    buffer_.download(host.data(), static_cast<int64_t>(count_ * sizeof(T)));
    return host;
  }
  T* data() const { return buffer_.as<T>(); }

 private:
  device::DeviceBuffer buffer_;
  size_t count_;
};

/// splitmix64; values are the same on every host.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15u + 1) {}
  uint64_t next() {
    uint64_t z = (state_ += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  int64_t below(int64_t n) { return static_cast<int64_t>(next() % static_cast<uint64_t>(n)); }
  float uniform() { return static_cast<float>(next() >> 40) * 0x1p-24f; }
  /// About normal: mean 0, variance 1.
  float normal() {
    float sum = 0.0f;
    for (int i = 0; i < 12; ++i) sum += uniform();
    return sum - 6.0f;
  }

 private:
  uint64_t state_;
};

/// bf16 values of about the given size, as bits.
inline std::vector<uint16_t> random_bf16(size_t count, float size, Random& random) {
  std::vector<uint16_t> v(count);
  for (auto& x : v) x = f32_to_bf16(size * random.normal());
  return v;
}

}  // namespace moekit::testing
