// Writes tiny checkpoints for tests: config text, tensors from values, raw safetensors bytes.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "checkpoint/safetensors.h"
#include "moekit/error.h"
#include "tensor/float_formats.h"

namespace moekit {

/// A directory that disappears with the test.
class TempDir {
 public:
  TempDir() {
    std::string pattern = (std::filesystem::temp_directory_path() / "moekit_test_XXXXXX").string();
    path_ = ::mkdtemp(pattern.data());
  }
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;
  ~TempDir() { std::filesystem::remove_all(path_); }
  const std::string& path() const { return path_; }
  std::string file(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

inline void put_text(const std::string& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

/// An 8-byte length, a header as it stands, data as it stands.
inline std::string raw_safetensors(const std::string& header, const std::string& data) {
  std::string out(8, '\0');
  const uint64_t length = header.size();
  std::memcpy(out.data(), &length, 8);
  return out + header + data;
}

/// A tensor with its bytes.
struct TestTensor {
  DType dtype = DType::f32;
  std::vector<int64_t> shape;
  std::vector<std::byte> bytes;
};

template <typename T>
TestTensor tensor_of(DType dtype, std::vector<int64_t> shape, const std::vector<T>& values) {
  TestTensor t{dtype, std::move(shape), std::vector<std::byte>(values.size() * sizeof(T))};
  if (!values.empty()) std::memcpy(t.bytes.data(), values.data(), t.bytes.size());
  return t;
}

inline int64_t count_of(const std::vector<int64_t>& shape) {
  int64_t n = 1;
  for (const int64_t s : shape) n *= s;
  return n;
}

/// BF16 tensor whose element i is f(i).
inline TestTensor bf16(std::vector<int64_t> shape, const std::function<float(int64_t)>& f) {
  std::vector<uint16_t> values;
  for (int64_t i = 0; i < count_of(shape); ++i) values.push_back(f32_to_bf16(f(i)));
  return tensor_of(DType::bf16, std::move(shape), values);
}

/// A deterministic value that differs from element to element and tensor to tensor.
inline float scatter(uint32_t seed, int64_t i) {
  uint32_t x = seed * 2654435761u + static_cast<uint32_t>(i) * 40503u + 12345u;
  x ^= x >> 13;
  x *= 0x5bd1e995u;
  x ^= x >> 15;
  return static_cast<float>(static_cast<int32_t>(x % 251) - 125) / 64.0f;
}

inline TestTensor scattered(std::vector<int64_t> shape, uint32_t seed) {
  return bf16(std::move(shape), [seed](int64_t i) { return scatter(seed, i); });
}

/// A checkpoint in one file; tensors in name order.
struct TestCheckpoint {
  std::string config;
  std::map<std::string, TestTensor> tensors;

  void write(const std::string& dir) const {
    put_text(dir + "/config.json", config);
    std::vector<checkpoint::TensorSource> sources;
    for (const auto& [name, t] : tensors) sources.push_back({name, t.dtype, t.shape, t.bytes});
    checkpoint::write_safetensors(dir + "/model.safetensors", sources);
  }
};

/// Runs f and returns "code: message", or "" when it does not throw.
inline std::string error_of(const std::function<void()>& f) {
  try {
    f();
  } catch (const Error& e) {
    return std::string(to_string(e.code())) + ": " + e.what();
  }
  return "";
}

/// EXPECTs an error of this code whose message holds every one of `parts`.
inline void expect_error(const std::function<void()>& f, const std::string& code,
                         const std::vector<std::string>& parts) {
  const std::string error = error_of(f);
  EXPECT_TRUE(error.starts_with(code + ": ")) << "came: " << error;
  for (const std::string& part : parts) {
    EXPECT_NE(error.find(part), std::string::npos) << "expected '" << part << "' in: " << error;
  }
}

}  // namespace moekit
