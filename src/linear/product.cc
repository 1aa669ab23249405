#include "linear/product.h"

#include <algorithm>
#include <iterator>

namespace moekit::linear {

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
