#include "prepare/row_reader.h"

#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "prepare/parallel_rows.h"
#include "quant/row_codec.h"
#include "tensor/bf16_rows.h"
#include "tensor/convert.h"

namespace moekit::prepare {
namespace {

/// The format that holds the caller's values as they are. f16 needs f32: no record format keeps it.
ActivationFormat natural_format(DType dtype) {
  return dtype == DType::bf16 ? ActivationFormat::bf16 : ActivationFormat::f32;
}

int64_t element_bytes(ActivationFormat format) { return format == ActivationFormat::bf16 ? 2 : 4; }

void check_hidden(const PrepareArgs& args, int64_t width) {
  const TensorView& hidden = args.hidden;
  MOEKIT_CHECK(
      hidden.rank == 2 && hidden.shape[0] == args.routing.num_tokens && hidden.shape[1] == width,
      "prepare needs rows [{}, {}], got rank {} shape [{}, {}]", args.routing.num_tokens, width,
      hidden.rank, hidden.shape[0], hidden.shape[1]);
  MOEKIT_CHECK(
      hidden.dtype == DType::f32 || hidden.dtype == DType::bf16 || hidden.dtype == DType::f16,
      "prepare takes f32, bf16 or f16 rows, got {}", to_string(hidden.dtype));
}

}  // namespace

RowPath::RowPath(const PrepareArgs& args, bool moves_rows) : args_(args), delivered_(args.wire) {
  const int64_t width = args.problem->config.routed_width();
  const ActivationScheme& input = args.problem->config.gate_up_input;
  MOEKIT_CHECK(args.wire.width == width, "rows of {} elements need a wire format as wide, got {}",
               width, args.wire.width);
  // The static scale is one for all experts only where the duty says so; a wire format that the
  // user chose has dynamic scales.
  const bool has_duty =
      args.quant_duty == QuantDuty::source || args.quant_duty == QuantDuty::destination;
  const bool same = input.format == args.wire.format && (has_duty || !input.static_scale);
  scheme_ = same ? input : ActivationScheme{args.wire.format};
  if (args.records != nullptr) {
    MOEKIT_CHECK(args.wire == RowFormat::of(input.format, width),
                 "quantized rows come as {}, but the plan's rows travel as {}",
                 to_string(input.format), to_string(args.wire.format));
    travelling_ = delivered_;
    in_place_ = true;
    rows_ = args.records;
    row_stride_ = delivered_.record_bytes;
    return;
  }
  if (args.routing.num_tokens > 0) check_hidden(args, width);
  const ActivationFormat natural = natural_format(args.hidden.dtype);
  if (is_quantized(args.wire.format)) {
    const bool later = moves_rows && args.quant_duty == QuantDuty::destination;
    travelling_ = later ? RowFormat::of(natural, width) : delivered_;
    return;
  }
  // bf16 values need no more room than they have; f32 values become bf16 only where the plan says
  // so.
  travelling_ = args.hidden.dtype == DType::bf16 ? RowFormat::of(natural, width) : args.wire;
  delivered_ = travelling_;
  const bool adjacent = args.hidden.strides[1] == 1 || width == 1;
  if (args.hidden.dtype != DType::f16 && adjacent && travelling_.format == natural) {
    in_place_ = true;
    rows_ = static_cast<const std::byte*>(args.hidden.data);
    row_stride_ = args.hidden.strides[0] * element_bytes(natural);
  }
}

void RowPath::write(int64_t token, float* scratch, std::byte* record) const {
  const int64_t width = travelling_.width;
  if (in_place_) {
    const int64_t bytes = travelling_.row_bytes();
    std::memcpy(record, rows_ + token * row_stride_, static_cast<size_t>(bytes));
    std::memset(record + bytes, 0, static_cast<size_t>(travelling_.record_bytes - bytes));
    return;
  }
  const float* row = scratch;
  if (args_.hidden.dtype == DType::f32 && args_.hidden.strides[1] == 1) {
    row = static_cast<const float*>(args_.hidden.data) + token * args_.hidden.strides[0];
  } else {
    load_row_f32(args_.hidden, token, scratch);
  }
  const ActivationScheme scheme =
      is_quantized(travelling_.format) ? scheme_ : ActivationScheme{travelling_.format};
  quant::encode_row(scheme, args_.input_scale, row, width, record);
}

void RowPath::requantize(const RowFormat& from_format, const std::byte* from, float* scratch,
                         std::byte* to) const {
  const float* row = reinterpret_cast<const float*>(from);
  if (from_format.format == ActivationFormat::bf16) {
    bf16_to_f32_row(reinterpret_cast<const uint16_t*>(from), from_format.width, scratch);
    row = scratch;
  }
  quant::encode_row(scheme_, args_.input_scale, row, delivered_.width, to);
}

int64_t RowPath::max_travelling_bytes(const RowFormat& wire, QuantDuty quant_duty) {
  const int64_t f32_bytes = RowFormat::of(ActivationFormat::f32, wire.width).record_bytes;
  if (!is_quantized(wire.format)) return wire.record_bytes;
  return quant_duty == QuantDuty::destination ? f32_bytes : wire.record_bytes;
}

Region RowPath::add_scratch(WorkspaceLayout& layout, int64_t width) {
  return layout.add(checked_mul(kMaxTasks, width, "row scratch"), sizeof(float));
}

bool quantizes_here(const PrepareArgs& args, const RowFormat& from) {
  return is_quantized(args.wire.format) && args.quant_duty == QuantDuty::destination &&
         !is_quantized(from.format);
}

ExpertRows quantize_rows(const PrepareArgs& args, const ExpertRows& rows, float* scratch,
                         std::byte* records) {
  const RowPath path(args, true);
  const RowFormat to = path.delivered();
  const auto piece = [&](int64_t begin, int64_t end, int64_t task) {
    for (int64_t n = begin; n < end; ++n) {
      path.requantize(rows.format, rows.record(n), scratch + task * to.width,
                      records + n * to.record_bytes);
    }
  };
  parallel_rows(args.threads, rows.num_rows, 8 * to.width, piece);
  ExpertRows out = rows;
  out.format = to;
  out.records = records;
  out.record_stride = to.record_bytes;
  out.record_index = nullptr;
  return out;
}

}  // namespace moekit::prepare
