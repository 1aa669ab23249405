// A small safetensors reader for the golden files of tests/fixtures, written apart from the
// library's own so that one mistake can't hide in both.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace moekit::test {

struct GoldenTensor {
  std::string dtype;  ///< as the file spells it: "F32", "I32", "BF16", ...
  std::vector<int64_t> shape;
  std::vector<std::byte> bytes;

  int64_t num_elements() const;
  std::vector<float> f32() const;     ///< F32 only
  std::vector<int32_t> i32() const;   ///< I32 only
  std::vector<uint16_t> u16() const;  ///< BF16 and F16, as bits
};

/// Whole file in memory. Throws std::runtime_error when it is not what the header says.
std::map<std::string, GoldenTensor> read_safetensors(const std::string& path);

}  // namespace moekit::test
