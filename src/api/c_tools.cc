// The functions of the C ABI that need no layer: routing, and number formats to and fro.
#include <algorithm>
#include <cstring>
#include <vector>

#include "api/c_convert.h"
#include "api/c_guard.h"
#include "api/memory_layer.h"
#include "base/buffer.h"
#include "base/math.h"
#include "base/openmp_threads.h"
#include "base/thread_pool.h"
#include "quant/stored_codec.h"
#include "quant/weight_codec.h"
#include "router/router.h"
#include "tensor/convert.h"
#include "tensor/view_check.h"

namespace {

using moekit::ceil_div;
using moekit::DType;
using moekit::TensorView;
using moekit::ThreadPool;
namespace c = moekit::c;

ThreadPool make_threads(int32_t num_threads, int64_t num_tasks) {
  MOEKIT_CHECK(num_threads >= 0 && num_threads <= 4096,
               "num_threads is {}, expected 0 (automatic) to 4096", num_threads);
  const int64_t wanted = num_threads > 0 ? num_threads : moekit::usable_cpus();
  return ThreadPool(static_cast<int>(std::clamp<int64_t>(num_tasks, 1, wanted)));
}

/// A tensor of the CPU, contiguous, of one of two types, in the shape given.
TensorView checked(const moekit_tensor* tensor, const char* name, int64_t rows, int64_t cols,
                   DType dtype, DType or_dtype) {
  MOEKIT_CHECK(tensor != nullptr, "{} is NULL", name);
  const TensorView v = c::view_of(tensor, name);
  MOEKIT_CHECK(v.device.type == moekit::DeviceType::cpu, "{} must lie in host memory", name);
  MOEKIT_CHECK(v.dtype == dtype || v.dtype == or_dtype, "{} must be {} or {}, got {}", name,
               to_string(dtype), to_string(or_dtype), to_string(v.dtype));
  const bool vector = v.rank == 1 && v.shape[0] == rows * cols && (rows == 1 || cols == 1);
  MOEKIT_CHECK(vector || (v.rank == 2 && v.shape[0] == rows && v.shape[1] == cols),
               "{} must be [{}, {}], got rank {} [{}, {}]", name, rows, cols, v.rank, v.shape[0],
               v.shape[1]);
  MOEKIT_CHECK(v.is_contiguous(), "{} must be contiguous", name);
  return v;
}

TensorView matrix_view(const moekit_tensor* tensor, const char* name) {
  MOEKIT_CHECK(tensor != nullptr, "{} is NULL", name);
  const TensorView v = c::view_of(tensor, name);
  const bool real = v.dtype == DType::f32 || v.dtype == DType::bf16 || v.dtype == DType::f16;
  MOEKIT_CHECK(v.device.type == moekit::DeviceType::cpu, "{} must lie in host memory", name);
  MOEKIT_CHECK(v.rank == 2 && real, "{} must be f32, bf16 or f16 with two axes, got {} with {}",
               name, to_string(v.dtype), v.rank);
  return v;
}

std::vector<float> rows_of(const TensorView& v) {
  std::vector<float> values(static_cast<size_t>(v.shape[0] * v.shape[1]));
  for (int64_t r = 0; r < v.shape[0]; ++r) {
    moekit::load_row_f32(v, r, values.data() + r * v.shape[1]);
  }
  return values;
}

void route(const moekit_route_args& a) {
  moekit::MoeConfig config =
      c::from_c(c::read_struct(a.config, c::default_config(), "moekit_config"));
  config.router.has_selection_bias = a.selection_bias != nullptr;
  const TensorView logits = matrix_view(a.logits, "logits");
  const int64_t tokens = logits.shape[0], experts = config.num_experts, k = config.top_k;
  MOEKIT_CHECK(logits.shape[1] == experts, "logits must be [T, num_experts = {}], got [{}, {}]",
               experts, tokens, logits.shape[1]);
  moekit::router::validate(config.router, experts, k);
  const std::vector<float> values = rows_of(logits);

  moekit::router::Args args;
  args.spec = &config.router;
  args.num_tokens = tokens;
  args.num_experts = experts;
  args.top_k = k;
  args.logits = values.data();
  if (a.selection_bias != nullptr) {
    args.selection_bias = static_cast<const float*>(
        checked(a.selection_bias, "selection_bias", 1, experts, DType::f32, DType::f32).data);
  }
  if (config.router.hash_routing) {
    const TensorView table = c::view_of(&c::required(a.hash_table, "hash_table"), "hash_table");
    args.hash_rows = table.shape[0];
    args.hash_table = static_cast<const int64_t*>(
        checked(a.hash_table, "hash_table", args.hash_rows, k, DType::i64, DType::i64).data);
    args.token_ids = static_cast<const int64_t*>(
        checked(a.token_ids, "token_ids", 1, tokens, DType::i64, DType::i64).data);
  }
  args.ids = static_cast<moekit::GlobalExpert*>(
      checked(a.out_topk_ids, "out_topk_ids", tokens, k, DType::i32, DType::i32).data);
  args.weights = static_cast<float*>(
      checked(a.out_topk_weights, "out_topk_weights", tokens, k, DType::f32, DType::f32).data);
  if (tokens == 0) return;
  ThreadPool threads = make_threads(a.num_threads, ceil_div(tokens, int64_t{64}));
  args.threads = &threads;
  const moekit::router::Router& router = *moekit::router::registry().front();
  const moekit::Buffer workspace(
      router.workspace_bytes(config.router, experts, k, threads.num_threads()));
  args.workspace = workspace.data();
  router.run(args);
}

/// Type of the scales of a scheme: what the caller's tensor says, with bytes for e8m0 and e4m3.
moekit::quant::EncodedLayout layout_for(const moekit_quantize_args& a,
                                        const moekit::WeightScheme& scheme, int64_t rows,
                                        int64_t cols) {
  moekit::quant::EncodeOptions options;
  options.global_sense = a.global_sense == MOEKIT_SCALE_DIVIDES ? moekit::ScaleSense::divisor
                                                                : moekit::ScaleSense::multiplier;
  if (a.scales != nullptr) {
    const DType given = c::view_of(a.scales, "scales").dtype;
    if (given != DType::u8) options.scale_dtype = given;
  }
  return moekit::quant::EncodedLayout::of(scheme, rows, cols, options);
}

void copy_out(const moekit_tensor* tensor, const char* name, int64_t rows, int64_t cols,
              DType dtype, const std::byte* from, int64_t row_bytes, int64_t stride) {
  const TensorView v = checked(tensor, name, rows, cols, dtype, DType::u8);
  auto* to = static_cast<std::byte*>(v.data);
  for (int64_t r = 0; r < rows; ++r) {
    std::memcpy(to + r * row_bytes, from + r * stride, static_cast<size_t>(row_bytes));
  }
}

void quantize(const moekit_quantize_args& a) {
  const moekit::WeightScheme scheme = c::scheme_from_c(a.scheme);
  const TensorView weights = matrix_view(a.weights, "weights");
  const int64_t rows = weights.shape[0], cols = weights.shape[1];
  const auto layout = layout_for(a, scheme, rows, cols);
  const bool plain = layout.scale_rows == 0;
  MOEKIT_CHECK((a.scales == nullptr) == plain && (a.zeros != nullptr) == scheme.zero_points &&
                   (a.global != nullptr) == (scheme.format == moekit::WeightFormat::nvfp4),
               "scales, zeros and global must be there where {} has them, and NULL elsewhere",
               to_string(scheme.format));
  const std::vector<float> w = rows_of(weights);
  const moekit::Buffer storage = moekit::Buffer::zeroed(layout.total_bytes);
  ThreadPool threads = make_threads(a.num_threads, ceil_div(rows, int64_t{128}));
  const moekit::StoredMatrix m =
      moekit::quant::encode_weights(layout, w.data(), storage.data(), &threads);

  const bool words = m.codes.unit == DType::i32;  // integers: the caller sees their bytes
  const int codes_a_byte = m.codes.pack == 2 || m.codes.pack == 8 ? 2 : 1;
  const int64_t code_cols = ceil_div(cols, int64_t{codes_a_byte});
  const DType code_type = words ? DType::u8 : m.codes.unit;
  copy_out(a.codes, "codes", rows, code_cols, code_type, storage.data(),
           code_cols * bytes_of(code_type), layout.code_row_bytes);
  if (!plain) {
    const int64_t row_bytes = layout.scale_cols * bytes_of(layout.scale_unit);
    copy_out(a.scales, "scales", layout.scale_rows, layout.scale_cols, layout.scale_unit,
             storage.data() + layout.scales_offset, row_bytes, row_bytes);
  }
  if (scheme.zero_points) {
    copy_out(a.zeros, "zeros", layout.scale_rows, layout.scale_cols, DType::u8,
             storage.data() + layout.zeros_offset, layout.scale_cols, layout.scale_cols);
  }
  if (a.global != nullptr) {
    const TensorView v = checked(a.global, "global", 1, 1, DType::f32, DType::f32);
    std::memcpy(v.data, &m.global, sizeof(float));
  }
}

void dequantize(const moekit_quantize_args& a) {
  const moekit::WeightScheme scheme = c::scheme_from_c(a.scheme);
  const TensorView out = matrix_view(a.weights, "weights");
  moekit::check_written_view(out, "weights");
  const int64_t rows = out.shape[0], cols = out.shape[1];
  moekit::MatrixTensors tensors;
  tensors.codes = c::view_of(a.codes, "codes");
  tensors.scales = c::view_of(a.scales, "scales");
  tensors.zeros = c::view_of(a.zeros, "zeros");
  tensors.global = c::view_of(a.global, "global");
  for (const TensorView* v : {&tensors.codes, &tensors.scales, &tensors.zeros, &tensors.global}) {
    MOEKIT_CHECK(v->device.type == moekit::DeviceType::cpu,
                 "codes and scales must lie in host memory");
  }
  const moekit::StoredMatrix m = moekit::api::matrix_from_tensors(
      tensors, scheme, rows, cols,
      a.global_sense == MOEKIT_SCALE_DIVIDES ? moekit::ScaleSense::divisor
                                             : moekit::ScaleSense::multiplier);
  std::vector<float> row(static_cast<size_t>(cols));
  for (int64_t r = 0; r < rows; ++r) {
    moekit::quant::decode_weights(m, r, 0, cols, row.data());
    moekit::store_row_f32(out, r, row.data());
  }
}

moekit_quantize_args read_args(const moekit_quantize_args* args) {
  return c::read_struct(args, moekit_quantize_args{}, "moekit_quantize_args");
}

}  // namespace

extern "C" {

moekit_status moekit_route(const moekit_route_args* args) {
  return c::guarded([&] { route(c::read_struct(args, moekit_route_args{}, "moekit_route_args")); });
}

moekit_status moekit_quantize(const moekit_quantize_args* args) {
  return c::guarded([&] { quantize(read_args(args)); });
}

moekit_status moekit_dequantize(const moekit_quantize_args* args) {
  return c::guarded([&] { dequantize(read_args(args)); });
}

moekit_status moekit_use_openmp(int32_t on) {
  return c::guarded([&] {
    MOEKIT_CHECK_AS(moekit::ErrorCode::unsupported, moekit::use_openmp_threads(on != 0),
                    "the program has loaded no OpenMP with GOMP_parallel into its global scope; "
                    "calls go on with moekit's own threads");
  });
}

}  // extern "C"
