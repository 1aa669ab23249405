#include "support/safetensors_reader.h"

#include <cstring>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <stdexcept>

namespace moekit::test {
namespace {

template <typename T>
std::vector<T> copy_as(const GoldenTensor& tensor) {
  std::vector<T> values(tensor.bytes.size() / sizeof(T));
  if (static_cast<int64_t>(values.size()) != tensor.num_elements()) {
    throw std::runtime_error("tensor has " + std::to_string(tensor.bytes.size()) +
                             " bytes, which its shape does not explain");
  }
  std::memcpy(values.data(), tensor.bytes.data(), tensor.bytes.size());
  return values;
}

void require_dtype(bool condition, const GoldenTensor& tensor) {
  if (!condition) throw std::runtime_error("unexpected dtype " + tensor.dtype);
}

}  // namespace

int64_t GoldenTensor::num_elements() const {
  int64_t n = 1;
  for (int64_t s : shape) n *= s;
  return n;
}

std::vector<float> GoldenTensor::f32() const {
  require_dtype(dtype == "F32", *this);
  return copy_as<float>(*this);
}
std::vector<int32_t> GoldenTensor::i32() const {
  require_dtype(dtype == "I32", *this);
  return copy_as<int32_t>(*this);
}
std::vector<uint16_t> GoldenTensor::u16() const {
  require_dtype(dtype == "BF16" || dtype == "F16", *this);
  return copy_as<uint16_t>(*this);
}

std::map<std::string, GoldenTensor> read_safetensors(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  const std::vector<char> all{std::istreambuf_iterator<char>(file), {}};
  uint64_t header_bytes = 0;
  if (all.size() < sizeof(header_bytes)) throw std::runtime_error("cannot read " + path);
  std::memcpy(&header_bytes, all.data(), sizeof(header_bytes));
  if (header_bytes > all.size() - sizeof(header_bytes)) {
    throw std::runtime_error(path + ": header runs past the end");
  }
  const size_t data_start = sizeof(header_bytes) + header_bytes;
  const auto header = nlohmann::json::parse(all.begin() + sizeof(header_bytes),
                                            all.begin() + static_cast<int64_t>(data_start));
  std::map<std::string, GoldenTensor> tensors;
  for (const auto& [name, entry] : header.items()) {
    if (name == "__metadata__") continue;
    const auto begin = entry["data_offsets"][0].get<size_t>() + data_start;
    const auto end = entry["data_offsets"][1].get<size_t>() + data_start;
    if (begin > end || end > all.size())
      throw std::runtime_error(path + ": " + name + " is cut off");
    GoldenTensor t{entry["dtype"], entry["shape"].get<std::vector<int64_t>>(), {}};
    t.bytes.resize(end - begin);
    std::memcpy(t.bytes.data(), all.data() + begin, t.bytes.size());
    tensors.emplace(name, std::move(t));
  }
  return tensors;
}

}  // namespace moekit::test
