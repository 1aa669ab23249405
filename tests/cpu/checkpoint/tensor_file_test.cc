// FILE[:NAME]: .npy and .safetensors in, .npy and .safetensors out.
#include "moekit/tensor_file.h"

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "checkpoint_writer.h"

namespace moekit {
namespace {

std::string npy(int version, std::string dict, const std::string& data) {
  std::string out = "\x93NUMPY";
  out += static_cast<char>(version);
  out += '\0';
  dict += '\n';
  for (int i = 0; i < (version == 1 ? 2 : 4); ++i) {
    out += static_cast<char>((dict.size() >> (8 * i)) & 255);
  }
  return out + dict + data;
}

template <typename T>
std::string bytes_of_values(const std::vector<T>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}

template <typename T>
std::vector<T> values_of(const FileTensor& t) {
  EXPECT_EQ(reinterpret_cast<uintptr_t>(t.view.data) % sizeof(T), 0u);
  EXPECT_TRUE(t.view.is_contiguous());
  const T* p = static_cast<const T*>(t.view.data);
  return {p, p + t.view.num_elements()};
}

constexpr char kF4[] = "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }";
const std::vector<float> kSix = {0, 1, 2, 3, 4, 5};

TEST(Npy, ReadsAllVersionsAtAnyAlignment) {
  for (const int version : {1, 2, 3}) {
    for (size_t pad = 0; pad < 8; ++pad) {
      const TempDir dir;
      put_text(dir.file("x.npy"), npy(version, kF4 + std::string(pad, ' '), bytes_of_values(kSix)));
      const FileTensor t = read_tensor(dir.file("x.npy"));
      EXPECT_EQ(t.view.dtype, DType::f32);
      EXPECT_EQ(t.view.shape[0], 2);
      EXPECT_EQ(values_of<float>(t), kSix);
    }
  }
}

TEST(Npy, TurnsFortranOrder) {
  const TempDir dir;
  const std::vector<int64_t> columns = {0, 3, 1, 4, 2, 5};
  put_text(dir.file("x.npy"), npy(1, "{'descr': '<i8', 'fortran_order': True, 'shape': (2, 3)}",
                                  bytes_of_values(columns)));
  EXPECT_EQ(values_of<int64_t>(read_tensor(dir.file("x.npy"))),
            (std::vector<int64_t>{0, 1, 2, 3, 4, 5}));
}

TEST(Npy, ScalarsAndEmptyArrays) {
  const TempDir dir;
  put_text(dir.file("s.npy"), npy(1, "{'descr': '<f8', 'fortran_order': False, 'shape': ()}",
                                  bytes_of_values<double>({2.5})));
  EXPECT_EQ(values_of<double>(read_tensor(dir.file("s.npy"))), std::vector<double>{2.5});
  put_text(dir.file("e.npy"),
           npy(1, "{'descr': '<f2', 'fortran_order': False, 'shape': (0, 128)}", ""));
  EXPECT_EQ(read_tensor(dir.file("e.npy")).view.num_elements(), 0);
}

TEST(Npy, MalformedFilesAreRefused) {
  const std::string data = bytes_of_values(kSix);
  const std::vector<std::pair<std::string, std::string>> faults = {
      {"", "corrupt_file"},
      {"NUMPY", "corrupt_file"},
      {npy(4, kF4, data), "corrupt_file"},
      {npy(1, kF4, data + "x"), "corrupt_file"},
      {npy(1, kF4, data.substr(1)), "corrupt_file"},
      {npy(1, kF4, "").substr(0, 20), "corrupt_file"},
      {npy(1, "{'descr': '<f4', 'shape': (2, 3)}", data), "corrupt_file"},
      {npy(1, "{'descr': '<f4', 'fortran_order': Maybe, 'shape': (2, 3)}", data), "corrupt_file"},
      {npy(1, "{'descr': '<f4', 'fortran_order': False, 'shape': (-2, 3)}", data), "corrupt_file"},
      {npy(1, "{'descr': '<f4', 'fortran_order': False, 'shape': (2.0, 3)}", data), "corrupt_file"},
      {npy(1, "{'descr': '<f4', 'fortran_order': False, 'shape': (4611686018427387904, 4)}", data),
       "corrupt_file"},
      {npy(1, "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3)", data), "corrupt_file"},
      {npy(1, "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3)} + 1", data),
       "corrupt_file"},
      {npy(1, "{'descr': '<f4', 'descr': '<f4', 'fortran_order': False, 'shape': (2, 3)}", data),
       "corrupt_file"},
      {npy(1, "{'descr': '>f4', 'fortran_order': False, 'shape': (2, 3)}", data), "unsupported"},
      {npy(1, "{'descr': '|O', 'fortran_order': False, 'shape': (2, 3)}", data), "unsupported"},
  };
  for (const auto& [bytes, code] : faults) {
    const TempDir dir;
    put_text(dir.file("x.npy"), bytes);
    expect_error([&] { read_tensor(dir.file("x.npy")); }, code, {"x.npy"});
  }
}

TEST(TensorFiles, NamesFollowTheLastColon) {
  const TempDir dir;
  const std::string path = dir.file("a:b.safetensors");
  float one = 1, two = 2;
  const std::vector<NamedTensor> tensors = {{"x", TensorView::contiguous(&one, DType::f32, {1})},
                                            {"y:z", TensorView::contiguous(&two, DType::f32, {1})}};
  write_safetensors(path, tensors);
  EXPECT_EQ(values_of<float>(read_tensor(path + ":x")), std::vector<float>{1});
  expect_error([&] { read_tensor(path); }, "invalid_argument", {"FILE:NAME", "x", "y:z"});
  expect_error([&] { read_tensor(path + ":q"); }, "invalid_argument", {"tensor q", "x"});
  expect_error([&] { read_tensor(dir.file("none.npy")); }, "invalid_argument", {"none.npy"});
  put_text(dir.file("t.txt"), "x");
  expect_error([&] { read_tensor(dir.file("t.txt")); }, "invalid_argument",
               {".npy or .safetensors"});
  write_npy(dir.file("n.npy"), tensors[0].view);
  expect_error([&] { read_tensor(dir.file("n.npy") + ":x"); }, "invalid_argument", {"unnamed"});
  EXPECT_EQ(read_tensors(path).size(), 2u);
}

TEST(TensorFiles, AloneATensorNeedsNoName) {
  const TempDir dir;
  int32_t ids[] = {3, 1};
  const std::vector<NamedTensor> tensors = {
      {"ids", TensorView::contiguous(ids, DType::i32, {2, 1})}};
  write_safetensors(dir.file("x.safetensors"), tensors);
  const FileTensor t = read_tensor(dir.file("x.safetensors"));
  EXPECT_EQ(t.name, "ids");
  EXPECT_EQ(values_of<int32_t>(t), (std::vector<int32_t>{3, 1}));
}

TEST(TensorFiles, UnalignedTensorsAreCopied) {
  const TempDir dir;
  const std::string header = R"({"u":{"dtype":"U8","shape":[5],"data_offsets":[0,5]},)"
                             R"("f":{"dtype":"F32","shape":[6],"data_offsets":[5,29]}})";
  put_text(dir.file("x.safetensors"), raw_safetensors(header, "12345" + bytes_of_values(kSix)));
  EXPECT_EQ(values_of<float>(read_tensor(dir.file("x.safetensors") + ":f")), kSix);
}

TEST(TensorFiles, NpyRoundTripOfStridedRows) {
  const TempDir dir;
  std::vector<float> padded = {0, 1, 2, -1, 3, 4, 5, -1};
  TensorView view = TensorView::contiguous(padded.data(), DType::f32, {2, 3});
  view.strides[0] = 4;
  write_npy(dir.file("x.npy"), view);
  const FileTensor t = read_tensor(dir.file("x.npy"));
  EXPECT_EQ(values_of<float>(t), kSix);
  std::ifstream in(dir.file("x.npy"), std::ios::binary);
  const std::string bytes((std::istreambuf_iterator<char>(in)), {});
  EXPECT_EQ((bytes.size() - 24) % 64, 0u) << "data starts at a multiple of 64";
  expect_error(
      [&] { write_npy(dir.file("y.npy"), TensorView::contiguous(padded.data(), DType::i32, {2})); },
      "invalid_argument", {"f32"});
}

}  // namespace
}  // namespace moekit
