#include "linear/row_operand.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <limits>

#include "base/math.h"
#include "quant/block.h"
#include "quant/fp8.h"
#include "quant/mx.h"
#include "quant/nvfp4.h"
#include "quant/row_codec.h"
#include "tensor/float_formats.h"
#include "tensor/float_tables.h"

namespace moekit::linear {

ProductPlan ProductPlan::of(CpuIsa isa, const PanelSpec& spec, const ActivationScheme& input) {
  ProductPlan plan;
  plan.input = input;
  plan.segment = segment_of(spec, input.format);
  plan.sums = spec.zeros;
  // Quantized inputs are exact in bf16: codes of at most 4 significant bits times block scales of
  // at most 4. f16 and f32 weights are not, nor are f32 block scales, which permuted values take
  // in.
  const bool takes_scales = spec.is_sorted() && input.format == ActivationFormat::fp8_block;
  const bool pairs = input.format != ActivationFormat::f32 && spec.code != Code::f16 &&
                     spec.code != Code::f32 && !takes_scales;
  plan.kernels = &linear::kernels(isa, pairs);
  if (plan.kernels->pairs) {
    plan.store = StoreAs::bf16;
  } else if (input.format == ActivationFormat::bf16) {
    plan.store = StoreAs::f32_of_bf16;
  }
  plan.code = spec.code;
  plan.k_padded = spec.k_padded();
  plan.panel_bytes = spec.panel_bytes();
  plan.scale_offset = spec.scale_offset();
  plan.zero_offset = spec.zero_offset();
  plan.terms_offset = spec.column_scale_offset();
  plan.panel.last_k = plan.k_padded;
  plan.panel.half_bytes = spec.half_bytes();
  plan.panel.group = spec.group;
  plan.panel.segment = static_cast<int32_t>(plan.segment);
  plan.panel.scale = spec.scale;
  return plan;
}

int64_t operand_stride(int64_t cols) { return round_up(cols, kBlockK) * 4 + 64; }

int64_t operand_extras(int64_t cols, ActivationFormat input, bool sums) {
  int64_t floats = input == ActivationFormat::fp8_block ? ceil_div(cols, int64_t{128}) : 0;
  if (sums) floats += round_up(cols, kBlockK) / 16;
  return round_up(floats, 16);
}

namespace {

/// A row's values and a zero behind them, which places without a column take.
int64_t values_bytes(int64_t cols) { return round_up((cols + 1) * 4, 64); }

}  // namespace

int64_t prepare_scratch_bytes(int64_t cols, int64_t places) {
  return values_bytes(cols) + round_up(places * 4, 64);
}

namespace {

/// Values of a record without what goes to the epilogue or the segments.
void decode_record(const RowFormat& f, const std::byte* record, float* x, RowOperand& row,
                   float* extras) {
  const auto* codes = reinterpret_cast<const uint8_t*>(record);
  const auto* scales = reinterpret_cast<const uint8_t*>(record + f.scale_offset);
  switch (f.format) {
    case ActivationFormat::f32:
    case ActivationFormat::bf16: return;
    case ActivationFormat::fp8_tensor:
    case ActivationFormat::fp8_token:
      for (int64_t i = 0; i < f.width; ++i) x[i] = kE4m3Values[codes[i]];
      std::memcpy(&row.scale, scales, 4);
      return;
    case ActivationFormat::fp8_block:
      for (int64_t i = 0; i < f.width; ++i) x[i] = kE4m3Values[codes[i]];
      std::memcpy(extras, scales, static_cast<size_t>(f.scale_bytes));
      row.block_scales = extras;
      return;
    case ActivationFormat::mxfp8:
      for (int64_t i = 0; i < f.width; ++i) {
        x[i] = kE4m3Values[codes[i]] * e8m0_to_f32(scales[i / 32]);
      }
      return;
    case ActivationFormat::mxfp4:
      for (int64_t i = 0; i < f.width; ++i) {
        x[i] = kE2m1Values[codes[i / 2] >> (i % 2 * 4) & 15] * e8m0_to_f32(scales[i / 32]);
      }
      return;
    case ActivationFormat::nvfp4:
      for (int64_t i = 0; i < f.width; ++i) {
        x[i] = kE2m1Values[codes[i / 2] >> (i % 2 * 4) & 15] * kE4m3Values[scales[i / 16]];
      }
      std::memcpy(&row.scale, record + f.scale_offset + f.scale_bytes - 4, 4);
      return;
  }
}

/// One block under an e8m0 scale: the values that its codes and scale stand for, exact in bf16.
void quantize_mx_block(const Kernels& k, quant::MxElement element, float* x, int64_t n) {
  const uint8_t scale = quant::mx_scale(k.abs_max(x, n), element);
  const float factor = e8m0_to_f32(scale);
  if (scale == 255) {
    std::fill_n(x, n, factor);  // 0 * NaN
    return;
  }
  (element == quant::MxElement::e4m3 ? k.round_e4m3 : k.round_e2m1)(x, n, factor);
  k.scale_values(x, n, factor);
}

/// One block of nvfp4: code values times block scale; the global stays apart.
void quantize_nvfp4_block(const Kernels& k, ScaleSense sense, float global, float* x, int64_t n) {
  const float amax = k.abs_max(x, n);
  if (quant::is_nan(amax) || quant::is_nan(global)) {
    std::fill_n(x, n, quant::quiet_nan());
    return;
  }
  float scale;
  if (sense == ScaleSense::divisor) {
    scale = kE4m3Values[f32_to_e4m3(amax / quant::kE2m1Max * global)];
    if (scale == 0.0f) scale = 0.125f;
    k.scale_values(x, n, global / scale);
    k.round_e2m1(x, n, 1.0f);
  } else {
    scale = kE4m3Values[f32_to_e4m3(amax / quant::kE2m1Max / global)];
    k.round_e2m1(x, n, scale == 0.0f ? std::numeric_limits<float>::infinity() : scale * global);
  }
  k.scale_values(x, n, scale);
}

/// What encode_row and decode_record make of x, without the codes in between. Scalar arithmetic of
/// the scales is the codec's own; tests hold the two to the same bits.
void quantize_values(const Kernels& k, const ActivationScheme& scheme, float static_scale, float* x,
                     int64_t n, RowOperand& row, float* extras) {
  const auto fp8 = [&](float* values, int64_t count, float scale) {
    if (quant::is_nan(scale)) {
      std::fill_n(values, count, 0.0f);
    } else {
      k.round_e4m3(values, count, scale);
    }
  };
  switch (scheme.format) {
    case ActivationFormat::f32:
    case ActivationFormat::bf16: return;
    case ActivationFormat::fp8_tensor:
      row.scale = quant::multiplier_of(scheme.sense, static_scale);
      fp8(x, n, row.scale);
      return;
    case ActivationFormat::fp8_token:
      row.scale = quant::fp8_scale(k.abs_max(x, n), scheme.ue8m0_scale);
      fp8(x, n, row.scale);
      return;
    case ActivationFormat::fp8_block:
      for (int64_t i = 0; i < n; i += 128) {
        const int64_t count = std::min<int64_t>(128, n - i);
        extras[i / 128] = quant::fp8_scale(k.abs_max(x + i, count), scheme.ue8m0_scale);
        fp8(x + i, count, extras[i / 128]);
      }
      row.block_scales = extras;
      return;
    case ActivationFormat::mxfp8:
    case ActivationFormat::mxfp4: {
      const auto element = scheme.format == ActivationFormat::mxfp8 ? quant::MxElement::e4m3
                                                                    : quant::MxElement::e2m1;
      for (int64_t i = 0; i < n; i += 32) {
        quantize_mx_block(k, element, x + i, std::min<int64_t>(32, n - i));
      }
      return;
    }
    case ActivationFormat::nvfp4: {
      const ScaleSense sense = scheme.static_scale ? scheme.sense : ScaleSense::multiplier;
      const float global =
          scheme.static_scale ? static_scale : quant::nvfp4_global(k.abs_max(x, n));
      row.scale = quant::multiplier_of(sense, global);
      for (int64_t i = 0; i < n; i += 16) {
        quantize_nvfp4_block(k, sense, global, x + i, std::min<int64_t>(16, n - i));
      }
      return;
    }
  }
}

bool is_plain(ActivationFormat f) {
  return f == ActivationFormat::f32 || f == ActivationFormat::bf16;
}

}  // namespace

RowOperand prepare_row(const ProductPlan& plan, const RowRecord& record, std::byte* operand,
                       float* extras, std::byte* scratch) {
  const Kernels& k = *plan.kernels;
  const int64_t n = record.format->width;
  auto* x = reinterpret_cast<float*>(scratch);
  RowOperand row;
  row.x = operand;
  const ActivationFormat arrived = record.format->format;
  if (arrived == ActivationFormat::f32) {
    k.load_f32(reinterpret_cast<const float*>(record.data), record.weight, n, x);
  } else if (arrived == ActivationFormat::bf16) {
    k.load_bf16(reinterpret_cast<const uint16_t*>(record.data), record.weight, n, x);
  } else if (arrived == plan.input.format) {
    decode_record(*record.format, record.data, x, row, extras);
  } else {  // the wire's own format: values like any others
    quant::decode_row(*record.format, record.data, x);
    k.scale_values(x, n, record.weight);
  }
  if (arrived != plan.input.format && !is_plain(plan.input.format)) {
    quantize_values(k, plan.input, record.static_scale, x, n, row, extras);
  }
  int64_t count = n;
  if (record.order != nullptr) {
    if (row.block_scales != nullptr) {
      for (int64_t i = 0; i < n; ++i) x[i] *= row.block_scales[i / 128];
      row.block_scales = nullptr;
    }
    x[n] = 0.0f;
    auto* permuted = reinterpret_cast<float*>(scratch + values_bytes(n));
    k.permute(x, record.order, record.places, permuted);
    x = permuted;
    count = record.places;
  }
  const int64_t padded = round_up(count, kBlockK);
  k.store_operand(x, count, padded, plan.store, operand);
  if (plan.sums) {
    float* sums = extras;
    if (plan.input.format == ActivationFormat::fp8_block) sums += ceil_div(n, int64_t{128});
    k.segment_sums(operand, plan.store, padded, plan.segment, sums);
    row.segment_sums = sums;
  }
  return row;
}

Product Product::of(const ProductPlan& plan, const std::byte* data, const std::byte* next,
                    const RowOperand* rows, float* c) {
  Panel panel = plan.panel;
  panel.codes = data;
  panel.scales = data + plan.scale_offset;
  panel.terms = data + plan.terms_offset;
  panel.next = next;
  if (plan.sums) panel.zeros = reinterpret_cast<const int8_t*>(data + plan.zero_offset);
  return {plan.kernels, plan.code, panel, plan.k_padded, rows, c};
}

namespace {

/// Whether many rows multiply codes from scratch.
bool decodes_first(const Product& p) {
  return p.kernels->decode[static_cast<int>(p.code)] != nullptr;
}

/// K that a product of many rows takes at a time.
int64_t chunk_k(const Product& p, int64_t num_rows) {
  // Half a scratch leaves room beside it in a first cache of 32 KiB; segments stay whole.
  if (decodes_first(p)) {
    return p.panel.segment <= kScratchK / 2 ? kScratchK / 2 : kScratchK;
  }
  return num_rows < kManyRows ? kScratchK : kChunkK;
}

/// A few rows read the codes once, in one stream. More rows would read them again and again: chunks
/// that stay in L1, decoded first where that costs instructions.
bool reads_once(const Product& p, int64_t num_rows) { return num_rows <= p.kernels->direct_rows; }

/// Panels that so many rows are multiplied with side by side.
int64_t panels_beside(const Product& p, int64_t num_rows) {
  if (!takes_panels_beside(*p.kernels, p.code)) return 1;
  if (num_rows == 1) return kMaxPanelsBeside;
  // Totals of four rows lie beside their sums, which is too much where segments end so often: nvfp4
  // took 12 % longer, all else 10 to 17 % less (Xeon, 2026-12).
  const int64_t most = p.panel.segment == 16 ? kMaxRowsBeside - 1 : kMaxRowsBeside;
  return num_rows <= most ? 2 : 1;
}

/// Codes of [k0, k1).
std::span<const std::byte> codes_of(const Product& p, int64_t k0, int64_t k1) {
  const int64_t block_bytes = 2 * p.panel.half_bytes;
  return {p.panel.codes + k0 / kBlockK * block_bytes,
          static_cast<size_t>((k1 - k0) / kBlockK * block_bytes)};
}

/// The chunk [k0, k1); `soon` is decoded next.
void multiply_chunk(const Product& p, int64_t k0, int64_t k1, int64_t num_rows,
                    std::span<const std::byte> soon, std::byte* scratch) {
  const Kernels& k = *p.kernels;
  const int code = static_cast<int>(p.code);
  Panel chunk = p.panel;
  if (chunk.segment > 0) {
    auto* wide_scales = reinterpret_cast<float*>(scratch + kScratchCodeBytes);
    k.widen_scales(p.panel, k0, k1, wide_scales);
    chunk.wide_scales = wide_scales;
    chunk.wide_k = k0;
  }
  if (!decodes_first(p)) {
    k.multiply[code](chunk, k0, k1, p.rows, num_rows, p.c);
    return;
  }
  k.decode[code](p.panel, k0, k1, scratch);
  chunk.codes = scratch;
  chunk.half_bytes = k.scratch_half_bytes;
  chunk.first_k = k0;
  chunk.next = nullptr;
  chunk.soon = soon.data();
  chunk.soon_bytes = static_cast<int64_t>(soon.size());
  k.scratch_multiply(chunk, k0, k1, p.rows, num_rows, p.c);
}

/// Whether the first two share their chunks and have rows enough.
bool in_turns(std::span<const Product> products, int64_t num_rows) {
  if (products.size() < 2) return false;
  const Product& a = products[0];
  const Product& b = products[1];
  return decodes_first(a) && decodes_first(b) && !reads_once(a, num_rows) &&
         !reads_once(b, num_rows) && a.k_padded == b.k_padded &&
         chunk_k(a, num_rows) == chunk_k(b, num_rows);
}

bool same_rows(const RowOperand* a, const RowOperand* b, int64_t num_rows) {
  return a == b || std::equal(a, a + num_rows, b, [](const RowOperand& x, const RowOperand& y) {
           return x.x == y.x && x.block_scales == y.block_scales &&
                  x.segment_sums == y.segment_sums;
         });
}

/// Bytes from one pointer to another, which need not be of one array.
int64_t distance(const void* from, const void* to) {
  return static_cast<int64_t>(reinterpret_cast<uintptr_t>(to) - reinterpret_cast<uintptr_t>(from));
}

/// Whether `b`, the i-th after `a`, has its codes, scales and sums i steps from a's.
bool lies_beside(const Product& a, const Product& b, int64_t i, int64_t step, int64_t c_step,
                 int64_t num_rows) {
  const Panel& p = a.panel;
  const Panel& q = b.panel;
  return a.kernels == b.kernels && a.code == b.code && a.k_padded == b.k_padded &&
         p.group == q.group && p.segment == q.segment && p.scale == q.scale &&
         distance(p.codes, q.codes) == i * step && distance(p.scales, q.scales) == i * step &&
         distance(p.terms, q.terms) == i * step &&
         (p.zeros == nullptr ? q.zeros == nullptr : distance(p.zeros, q.zeros) == i * step) &&
         b.c - a.c == i * c_step && same_rows(a.rows, b.rows, num_rows);
}

/// How many of the first products are multiplied side by side; fewer than 2: none.
int64_t count_beside(std::span<const Product> products, int64_t num_rows) {
  const Product& first = products[0];
  int64_t n = std::min<int64_t>(std::ssize(products), panels_beside(first, num_rows));
  n = n / 2 * 2;  // four or two
  if (n < 2 || first.panel.next == nullptr) return 0;
  const int64_t step = distance(first.panel.codes, products[1].panel.codes);
  const int64_t c_step = products[1].c - first.c;
  for (int64_t i = 1; i < n; ++i) {
    if (!lies_beside(first, products[i], i, step, c_step, num_rows)) return i >= 2 ? 2 : 0;
  }
  return n;
}

/// `next` of the last one says what is read after all of them.
void multiply_side_by_side(std::span<const Product> products, int64_t num_rows) {
  const Product& first = products[0];
  Panel p = first.panel;
  p.stride = distance(p.codes, products[1].panel.codes);
  p.next = products.back().panel.next;
  first.kernels->multiply_beside[static_cast<int>(first.code)](
      p, std::ssize(products), first.rows, num_rows, first.c, products[1].c - first.c);
}

/// All chunks, those of the products in turns.
void multiply_chunks(std::span<const Product> products, int64_t num_rows, std::byte* scratch) {
  const int64_t k_padded = products[0].k_padded;
  const int64_t step = chunk_k(products[0], num_rows);
  for (int64_t k0 = 0; k0 < k_padded; k0 += step) {
    const int64_t k1 = std::min(k0 + step, k_padded);
    for (size_t i = 0; i < products.size(); ++i) {
      std::span<const std::byte> soon;
      if (i + 1 < products.size()) {
        soon = codes_of(products[i + 1], k0, k1);
      } else if (k1 < k_padded) {
        soon = codes_of(products[0], k1, std::min(k1 + step, k_padded));
      } else if (products[i].panel.next != nullptr) {
        soon = {products[i].panel.next, codes_of(products[0], 0, std::min(step, k_padded)).size()};
      }
      multiply_chunk(products[i], k0, k1, num_rows, soon, scratch);
    }
  }
}

}  // namespace

bool takes_panels_beside(const Kernels& k, Code code) {
  return k.prefers_beside && k.multiply_beside[static_cast<int>(code)] != nullptr;
}

void multiply_panel(const Product& product, int64_t num_rows, std::byte* scratch) {
  if (reads_once(product, num_rows)) {
    product.kernels->multiply[static_cast<int>(product.code)](product.panel, 0, product.k_padded,
                                                              product.rows, num_rows, product.c);
    return;
  }
  multiply_chunks({&product, 1}, num_rows, scratch);
}

void multiply_panels(std::span<const Product> products, int64_t num_rows, std::byte* scratch) {
  while (!products.empty()) {
    size_t done = 1;
    if (const int64_t n = count_beside(products, num_rows); n > 1) {
      done = static_cast<size_t>(n);
      multiply_side_by_side(products.first(done), num_rows);
    } else if (in_turns(products, num_rows)) {
      done = 2;
      multiply_chunks(products.first(done), num_rows, scratch);
    } else {
      multiply_panel(products[0], num_rows, scratch);
    }
    products = products.subspan(done);
  }
}

ColumnTerms column_terms(const ProductPlan& plan, const std::byte* data) {
  ColumnTerms t;
  t.scale = reinterpret_cast<const float*>(data + plan.terms_offset);
  t.bias = t.scale + kPanelCols;
  t.factor = plan.kernels->factor[static_cast<int>(plan.code)];
  return t;
}

}  // namespace moekit::linear
