// Inputs of a layer from tensor files and from the counter-based generator, checked against the
// layer's shapes.
#include <algorithm>
#include <vector>

#include "base/buffer.h"
#include "base/check.h"
#include "base/math.h"
#include "engine/synthetic.h"
#include "moekit/tools.h"
#include "tensor/convert.h"
#include "tensor/rng.h"

namespace moekit {
namespace {

// Stream of the generator that token ids come from.
constexpr uint64_t kTokenIdStream = 0x746f6b656e;

std::string shape_text(const TensorView& view) {
  std::string text = "[";
  for (int i = 0; i < view.rank; ++i) text += fmt::format("{}{}", i > 0 ? ", " : "", view.shape[i]);
  return text + "]";
}

/// A row-major tensor with memory of its own.
OwnedTensor make_tensor(DType dtype, std::initializer_list<int64_t> shape) {
  int64_t count = 1;
  for (int64_t extent : shape) count = checked_mul(count, extent, "tensor");
  auto buffer =
      std::make_shared<Buffer>(std::max<int64_t>(1, checked_mul(count, bytes_of(dtype), "tensor")));
  OwnedTensor tensor;
  tensor.view = TensorView::contiguous(buffer->data(), dtype, shape);
  tensor.storage = std::move(buffer);
  return tensor;
}

constexpr const char* kRowsOfLayer = "give a tensor of this layer's width and of one row a token";
constexpr const char* kSlotsOfTokens =
    "give a row for each token and a column for each of the experts a token gets";

/// [rows, columns] of some dtype; -1 matches any extent. `advice` says what to give instead.
void check_matrix(const TensorView& view, const std::string& flag, const std::string& reference,
                  int64_t rows, int64_t columns, const char* advice) {
  auto fits = [](int64_t wanted, int64_t got) { return wanted < 0 || wanted == got; };
  auto name = [](int64_t extent) { return extent < 0 ? std::string("T") : std::to_string(extent); };
  MOEKIT_CHECK(view.rank == 2 && fits(rows, view.shape[0]) && fits(columns, view.shape[1]),
               "{} {}: expected shape [{}, {}], got {} {}; {}", flag, reference, name(rows),
               name(columns), to_string(view.dtype), shape_text(view), advice);
}

bool is_float(DType t) {
  return t == DType::f16 || t == DType::bf16 || t == DType::f32 || t == DType::f64;
}

OwnedTensor as_f32(const OwnedTensor& from, const std::string& flag, const std::string& reference) {
  MOEKIT_CHECK(is_float(from.view.dtype), "{} {}: expected f16, bf16, f32 or f64, got {}", flag,
               reference, to_string(from.view.dtype));
  const int64_t rows = from.view.shape[0], width = from.view.shape[1];
  OwnedTensor to = make_tensor(DType::f32, {rows, width});
  auto* out = static_cast<float*>(to.view.data);
  for (int64_t row = 0; row < rows; ++row) load_row_f32(from.view, row, out + row * width);
  return to;
}

int64_t int_at(const TensorView& view, int64_t i) {
  return view.dtype == DType::i64 ? static_cast<const int64_t*>(view.data)[i]
                                  : static_cast<const int32_t*>(view.data)[i];
}

void check_int(const OwnedTensor& tensor, const std::string& flag, const std::string& reference) {
  MOEKIT_CHECK(tensor.view.dtype == DType::i32 || tensor.view.dtype == DType::i64,
               "{} {}: expected ids as i32 or i64, got {}", flag, reference,
               to_string(tensor.view.dtype));
}

/// Ids in [-1, num_experts) as i32; a wrong one is named with its row and slot.
OwnedTensor as_expert_ids(const OwnedTensor& from, const std::string& flag,
                          const std::string& reference, int64_t num_experts) {
  check_int(from, flag, reference);
  const int64_t rows = from.view.shape[0], top_k = from.view.shape[1];
  OwnedTensor to = make_tensor(DType::i32, {rows, top_k});
  auto* out = static_cast<int32_t*>(to.view.data);
  for (int64_t i = 0; i < rows * top_k; ++i) {
    const int64_t id = int_at(from.view, i);
    MOEKIT_CHECK(
        id >= -1 && id < num_experts,
        "{} {}: row {}, slot {}: expected an expert id in [0, {}) or -1 for no expert, got {}",
        flag, reference, i / top_k, i % top_k, num_experts, id);
    out[i] = static_cast<int32_t>(id);
  }
  return to;
}

}  // namespace

OwnedTensor load_hidden(const std::string& reference, int64_t hidden) {
  const std::string flag = "--tokens";
  OwnedTensor file = load_tensor(reference, flag);
  check_matrix(file.view, flag, reference, -1, hidden, kRowsOfLayer);
  MOEKIT_CHECK(is_float(file.view.dtype), "{} {}: expected f16, bf16, f32 or f64, got {}", flag,
               reference, to_string(file.view.dtype));
  if (file.view.dtype == DType::f64) return as_f32(file, flag, reference);
  return file;
}

OwnedTensor load_token_ids(const std::string& reference, int64_t num_tokens) {
  const std::string flag = "--token-ids";
  const OwnedTensor file = load_tensor(reference, flag);
  MOEKIT_CHECK(file.view.rank == 1 && file.view.shape[0] == num_tokens,
               "{} {}: expected one id a token, shape [{}], got {}", flag, reference, num_tokens,
               shape_text(file.view));
  check_int(file, flag, reference);
  OwnedTensor ids = make_tensor(DType::i64, {num_tokens});
  for (int64_t t = 0; t < num_tokens; ++t) {
    static_cast<int64_t*>(ids.view.data)[t] = int_at(file.view, t);
  }
  return ids;
}

OwnedTensor load_topk_ids(const std::string& reference, int64_t num_tokens, int64_t top_k,
                          int64_t num_experts) {
  const std::string flag = "--topk-ids";
  const OwnedTensor file = load_tensor(reference, flag);
  check_matrix(file.view, flag, reference, num_tokens, top_k, kSlotsOfTokens);
  return as_expert_ids(file, flag, reference, num_experts);
}

OwnedTensor load_topk_weights(const std::string& reference, int64_t num_tokens, int64_t top_k) {
  const std::string flag = "--topk-weights";
  const OwnedTensor file = load_tensor(reference, flag);
  check_matrix(file.view, flag, reference, num_tokens, top_k, kSlotsOfTokens);
  return as_f32(file, flag, reference);
}

OwnedTensor load_routing(const std::string& reference, int64_t top_k, int64_t num_experts) {
  const std::string flag = "--routing";
  const OwnedTensor file = load_tensor(reference, flag);
  check_matrix(file.view, flag, reference, -1, top_k, kSlotsOfTokens);
  return as_expert_ids(file, flag, reference, num_experts);
}

OwnedTensor load_golden(const std::string& reference, int64_t num_tokens, int64_t hidden) {
  const std::string flag = "--golden";
  const OwnedTensor file = load_tensor(reference, flag);
  check_matrix(file.view, flag, reference, num_tokens, hidden,
               "give the output of the rows of --tokens, in their order");
  return as_f32(file, flag, reference);
}

OwnedTensor random_hidden(int64_t num_tokens, int64_t hidden, uint64_t seed) {
  OwnedTensor tensor = make_tensor(DType::bf16, {num_tokens, hidden});
  for (int64_t t = 0; t < num_tokens; ++t) {
    const std::vector<float> row = engine::make_hidden(1, hidden, seed, t);
    store_row_f32(tensor.view, t, row.data());
  }
  return tensor;
}

OwnedTensor random_token_ids(int64_t num_tokens, int64_t vocabulary, uint64_t seed) {
  MOEKIT_CHECK(vocabulary >= 1, "token ids: expected a table of one row or more, got {}",
               vocabulary);
  OwnedTensor tensor = make_tensor(DType::i64, {num_tokens});
  const Rng rng(seed, kTokenIdStream);
  for (int64_t t = 0; t < num_tokens; ++t) {
    static_cast<int64_t*>(tensor.view.data)[t] = static_cast<int64_t>(
        rng.below(static_cast<uint64_t>(t), static_cast<uint64_t>(vocabulary)));
  }
  return tensor;
}

}  // namespace moekit
