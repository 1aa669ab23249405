// The public functions of moekit/tensor_file.h.
#include "moekit/tensor_file.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>

#include "base/buffer.h"
#include "base/check.h"
#include "base/file.h"
#include "base/math.h"
#include "checkpoint/npy.h"
#include "checkpoint/safetensors.h"
#include "tensor/view_check.h"

namespace moekit {
namespace {

using checkpoint::SafetensorsFile;
using checkpoint::TensorEntry;

constexpr ErrorCode kInvalid = ErrorCode::invalid_argument;

/// A row-major view of `data`.
TensorView make_view(const std::byte* data, DType dtype, const std::vector<int64_t>& shape,
                     const std::string& what) {
  MOEKIT_CHECK_AS(ErrorCode::unsupported, shape.size() <= kMaxRank,
                  "{}: tensors of at most {} axes are covered, came {}", what, kMaxRank,
                  shape.size());
  TensorView view;
  view.data = const_cast<std::byte*>(data);
  view.dtype = dtype;
  view.rank = static_cast<int32_t>(shape.size());
  int64_t stride = 1;
  for (int i = view.rank - 1; i >= 0; --i) {
    view.shape[static_cast<size_t>(i)] = shape[static_cast<size_t>(i)];
    view.strides[static_cast<size_t>(i)] = stride;
    stride *= std::max<int64_t>(1, shape[static_cast<size_t>(i)]);
  }
  return view;
}

FileTensor from_safetensors(const std::shared_ptr<const SafetensorsFile>& file,
                            const TensorEntry& entry) {
  FileTensor tensor;
  tensor.name = entry.name;
  const std::byte* data = file->data(entry);
  tensor.keep_alive = file;
  const auto alignment = static_cast<uintptr_t>(std::max(1, bytes_of(entry.dtype)));
  if (reinterpret_cast<uintptr_t>(data) % alignment != 0) {
    // The format aligns nothing; callers of the view do expect alignment.
    auto copy = std::make_shared<Buffer>(entry.bytes());
    std::memcpy(copy->data(), data, static_cast<size_t>(entry.bytes()));
    data = copy->data();
    tensor.keep_alive = copy;
  }
  tensor.view = make_view(data, entry.dtype, entry.shape, file->path() + ":" + entry.name);
  return tensor;
}

FileTensor from_npy(const std::string& path) {
  const auto map = std::make_shared<MappedFile>(path, kInvalid);
  const checkpoint::NpyHeader header = checkpoint::parse_npy(*map);
  FileTensor tensor;
  const std::byte* data = map->data() + header.data_offset;
  const int64_t bytes = header.num_elements * bytes_of(header.dtype);
  const auto alignment = static_cast<uintptr_t>(bytes_of(header.dtype));
  const bool transposed = header.fortran_order && header.shape.size() > 1;
  if (!transposed && reinterpret_cast<uintptr_t>(data) % alignment == 0) {
    tensor.keep_alive = map;
    tensor.view = make_view(data, header.dtype, header.shape, path);
    return tensor;
  }
  auto copy = std::make_shared<Buffer>(bytes);
  tensor.view = make_view(copy->data(), header.dtype, header.shape, path);
  if (transposed) {
    checkpoint::copy_fortran_order(header, data, copy->data());
  } else {
    std::memcpy(copy->data(), data, static_cast<size_t>(bytes));
  }
  tensor.keep_alive = copy;
  return tensor;
}

/// The elements of a view in row-major order.
std::vector<std::byte> gather(const TensorView& view, const std::string& name) {
  check_view(view, name.c_str());
  const int64_t unit = bytes_of(view.dtype);
  MOEKIT_CHECK(view.device.type == DeviceType::cpu && unit > 0,
               "expected a CPU tensor of whole-byte elements to write, came {}",
               to_string(view.dtype));
  std::vector<std::byte> out(
      static_cast<size_t>(checked_mul(view.num_elements(), unit, name.c_str())));
  if (out.empty()) return out;
  const auto* base = static_cast<const std::byte*>(view.data);
  if (view.is_contiguous()) {
    std::memcpy(out.data(), base, out.size());
    return out;
  }
  std::array<int64_t, kMaxRank> at{};
  for (size_t i = 0; i < out.size(); i += static_cast<size_t>(unit)) {
    int64_t offset = 0;
    for (size_t a = 0; a < static_cast<size_t>(view.rank); ++a) offset += at[a] * view.strides[a];
    std::memcpy(out.data() + i, base + offset * unit, static_cast<size_t>(unit));
    for (int a = view.rank - 1; a >= 0; --a) {
      const auto axis = static_cast<size_t>(a);
      if (++at[axis] < view.shape[axis]) break;
      at[axis] = 0;
    }
  }
  return out;
}

std::vector<int64_t> shape_of(const TensorView& view) {
  return {view.shape.begin(), view.shape.begin() + view.rank};
}

}  // namespace

std::vector<FileTensor> read_tensors(const std::string& path) {
  MOEKIT_CHECK(is_file(path), "{}: expected a tensor file, found none", path);
  std::vector<FileTensor> tensors;
  if (path.ends_with(".npy")) {
    tensors.push_back(from_npy(path));
    return tensors;
  }
  MOEKIT_CHECK(path.ends_with(".safetensors"),
               "{}: expected a tensor file that ends in .npy or .safetensors", path);
  const auto file = SafetensorsFile::open(path, kInvalid);
  for (const TensorEntry& entry : file->entries()) tensors.push_back(from_safetensors(file, entry));
  return tensors;
}

FileTensor read_tensor(const std::string& file_and_name) {
  std::string path = file_and_name;
  std::string name;
  const size_t colon = file_and_name.rfind(':');
  if (!is_file(path) && colon != std::string::npos) {
    path = file_and_name.substr(0, colon);
    name = file_and_name.substr(colon + 1);
  }
  MOEKIT_CHECK(is_file(path), "{}: expected a tensor file (FILE or FILE:NAME), found none",
               file_and_name);
  if (path.ends_with(".npy")) {
    MOEKIT_CHECK(name.empty(), "{}: a .npy file holds one unnamed tensor, so no NAME may follow",
                 file_and_name);
    return from_npy(path);
  }
  MOEKIT_CHECK(path.ends_with(".safetensors"),
               "{}: expected a tensor file that ends in .npy or .safetensors", path);
  const auto file = SafetensorsFile::open(path, kInvalid);
  const TensorEntry* entry = nullptr;
  if (!name.empty()) {
    entry = file->find(name);
  } else if (file->entries().size() == 1) {
    entry = &file->entries().front();
  }
  if (entry == nullptr) {
    std::vector<std::string_view> names;
    for (const TensorEntry& e : file->entries()) {
      if (names.size() < 8) names.push_back(e.name);
    }
    fail(kInvalid, "{}: expected {} among the {} tensors of the file, e.g. {}", file_and_name,
         name.empty() ? "a choice FILE:NAME" : "tensor " + name, file->entries().size(),
         fmt::join(names, ", "));
  }
  return from_safetensors(file, *entry);
}

void write_npy(const std::string& path, const TensorView& tensor) {
  MOEKIT_CHECK(tensor.dtype == DType::f32, "{}: .npy output is f32, came {}", path,
               to_string(tensor.dtype));
  const std::vector<std::byte> data = gather(tensor, path);
  AtomicFile file(path);
  file.write(checkpoint::npy_header_f32(shape_of(tensor)));
  file.write(data.data(), static_cast<int64_t>(data.size()));
  file.commit();
}

void write_safetensors(const std::string& path, std::span<const NamedTensor> tensors,
                       std::span<const std::pair<std::string, std::string>> metadata) {
  std::vector<std::vector<std::byte>> data;
  std::vector<checkpoint::TensorSource> sources;
  for (const NamedTensor& t : tensors) data.push_back(gather(t.view, t.name));
  for (size_t i = 0; i < tensors.size(); ++i) {
    const NamedTensor& t = tensors[i];
    sources.push_back({t.name, t.view.dtype, shape_of(t.view), data[i]});
  }
  checkpoint::write_safetensors(path, sources, metadata);
}

void write_text(const std::string& path, std::string_view text) {
  write_file_atomically(path, text);
}

}  // namespace moekit
