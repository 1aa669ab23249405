// Kernels: what one instruction set offers to the code above it. Everything that touches an element
// goes through this table; the rest of linear/ and experts/cpu is scheduling. Include nothing heavy
// here: the ISA files are compiled with their own flags and must not emit shared inline code.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/cpu_features.h"
#include "linear/codes.h"
#include "moekit/config.h"

namespace moekit::linear {

/// K elements that a decoded scratch holds at most, and between which partial sums of several rows
/// rest in memory.
inline constexpr int64_t kScratchK = 256;
/// The same for kManyRows rows, where codes are read in place: 128 rows gained 3 to 4 % over 256 K;
/// 32 rows, three tiles to hide the next chunk's arrival behind, lost 4 % (Zen 5, 2026-11).
inline constexpr int64_t kChunkK = 512;
inline constexpr int64_t kManyRows = 64;
/// Bytes of scratch for one decoded chunk of a panel (as f32; bf16 takes half), and for a chunk's
/// widened scales behind them: segments are 16 long or longer.
inline constexpr int64_t kScratchCodeBytes = kScratchK * 32 * 4;
inline constexpr int64_t kScratchBytes = kScratchCodeBytes + kChunkK / 16 * 32 * 4;

/// One panel as a kernel sees it. `codes` is where K index `first_k` lies (a multiple of 32); they
/// end with K index `last_k`.
struct Panel {
  const std::byte* codes = nullptr;
  const std::byte* scales = nullptr;
  const int8_t* zeros = nullptr;       ///< null: symmetric
  const std::byte* terms = nullptr;    ///< column scales and bias, f32 [2][32]
  const float* wide_scales = nullptr;  ///< widen_scales(): [segment][32] from wide_k on; or null
  int64_t half_bytes = 0;
  int64_t stride = 0;  ///< bytes to the panel that is multiplied side by side with this one
  int64_t first_k = 0;
  int64_t last_k = 0;
  int64_t wide_k = 0;
  /// Codes that are decoded after these, asked for meanwhile: [soon, soon + soon_bytes).
  const std::byte* soon = nullptr;
  int64_t soon_bytes = 0;
  const std::byte* next = nullptr;  ///< codes that are likely read after these; null: ask for none
  int32_t group = 0;                ///< of scales and zeros; 0: one zero point a column
  int32_t segment = 0;              ///< segment_of(); 0: no scale inside K
  Scale scale = Scale::none;
};

/// One input row, ready for a product: values in the kernel's operand type, padded with zeros to a
/// multiple of 32.
struct RowOperand {
  const void* x = nullptr;              ///< f32, or bf16 when Kernels::pairs
  const float* block_scales = nullptr;  ///< one per 128 K, or null
  const float* segment_sums = nullptr;  ///< sum of x over each segment; only with zero points
  float scale = 1.0f;                   ///< of the whole row, applied in the epilogue
};

/// c[row][32] (+)= rows x panel over [k0, k1): starts from zero when k0 == 0, else continues. k0 is
/// a multiple of 128 and of the segment, k1 too or the end of K. Each row's bits depend on that row
/// alone.
using Multiply = void (*)(const Panel& panel, int64_t k0, int64_t k1, const RowOperand* rows,
                          int64_t num_rows, float* c);
/// The same over all of K for `num_panels` panels Panel::stride bytes apart: c[panel][row][32],
/// with c_stride floats from panel to panel.
using MultiplyBeside = void (*)(const Panel& first, int64_t num_panels, const RowOperand* rows,
                                int64_t num_rows, float* c, int64_t c_stride);
/// Decodes [k0, k1) of a panel into scratch, which scratch_multiply reads.
using Decode = void (*)(const Panel& panel, int64_t k0, int64_t k1, std::byte* scratch);

/// Scales and bias of 32 columns.
struct ColumnTerms {
  const float* scale = nullptr;  ///< [32]
  const float* bias = nullptr;   ///< [32]
  float factor = 1.0f;           ///< exact power of two that belongs to the decoder
};

/// How values leave a kernel.
enum class StoreAs : uint8_t {
  f32,
  f32_of_bf16,  ///< f32 holding a value rounded to bf16
  bf16,
};

struct HiddenArgs {
  const float* gate = nullptr;  ///< [num_rows][32] sums; null without gate
  const float* up = nullptr;
  ColumnTerms gate_terms, up_terms;
  const RowOperand* gate_rows = nullptr;  ///< their scales
  const RowOperand* up_rows = nullptr;
  int64_t num_rows = 0;
  int64_t columns = 32;  ///< valid ones; the rest is stored as zeros
  std::byte* out = nullptr;
  int64_t out_stride = 0;  ///< bytes between rows
};

/// Rows and panels at most that are multiplied side by side.
inline constexpr int64_t kMaxRowsBeside = 4;
inline constexpr int64_t kMaxPanelsBeside = 4;

/// One instruction set with one operand type.
struct Kernels {
  CpuIsa isa = CpuIsa::generic;
  bool pairs = false;       ///< rows are bf16 (dot products of pairs), else f32
  int64_t direct_rows = 0;  ///< up to so many rows decode codes in registers; more go via scratch
  Multiply multiply[kNumCodes] = {};  ///< by Code; null where this operand type can't hold the code
  /// By Code; null: one panel at a time. Four panels with one row, or two with up to
  /// kMaxRowsBeside. The same bits as one panel at a time.
  MultiplyBeside multiply_beside[kNumCodes] = {};
  /// Whether that is how this CPU reads fastest.
  bool prefers_beside = false;
  Decode decode[kNumCodes] = {};  ///< null: multiply reads the codes in place at any row count
  Multiply scratch_multiply = nullptr;
  /// f32 scales of [k0, k1), for Panel::wide_scales.
  void (*widen_scales)(const Panel& panel, int64_t k0, int64_t k1, float* out) = nullptr;
  int64_t scratch_half_bytes = 0;
  float factor[kNumCodes] = {};  ///< by Code: decoded value times factor is the code's value

  /// out = act(gate, up) of finished sums.
  void (*hidden)(const ActivationSpec& spec, StoreAs store, const HiddenArgs& args) = nullptr;
  /// out[row][0, columns) = sums * scales + bias, f32.
  void (*finish)(const float* c, const ColumnTerms& terms, const RowOperand* rows, int64_t num_rows,
                 int64_t columns, float* const* out) = nullptr;
  /// out (+)= weight * row over n columns; the product is rounded before it is added.
  void (*accumulate)(const float* row, float weight, bool first, int64_t n, float* out) = nullptr;
  /// x[i] = in[i] (times weight), from f32 or bf16.
  void (*load_f32)(const float* in, float weight, int64_t n, float* x) = nullptr;
  void (*load_bf16)(const uint16_t* in, float weight, int64_t n, float* x) = nullptr;
  /// out[i] = x[order[i]], i in [0, n).
  void (*permute)(const float* x, const int32_t* order, int64_t n, float* out) = nullptr;
  /// Stores n values as an operand and zeros up to n_padded.
  void (*store_operand)(const float* x, int64_t n, int64_t n_padded, StoreAs store,
                        void* operand) = nullptr;
  /// Largest magnitude as a bit pattern: infinity or NaN when one is present (NaN wins).
  float (*abs_max)(const float* x, int64_t n) = nullptr;
  /// x[i] = the e4m3 (e2m1) value nearest to x[i] / divisor, saturating; NaN stays NaN.
  void (*round_e4m3)(float* x, int64_t n, float divisor) = nullptr;
  void (*round_e2m1)(float* x, int64_t n, float divisor) = nullptr;
  /// x[i] = x[i] * factor.
  void (*scale_values)(float* x, int64_t n, float factor) = nullptr;
  /// sums[s] = sum of the operand's values over segment s, K ascending.
  void (*segment_sums)(const void* operand, StoreAs store, int64_t n_padded, int64_t segment,
                       float* sums) = nullptr;
};

/// The table of an ISA. `pairs` asks for the bf16 operand type and is honoured from avx512_bf16 up.
const Kernels& kernels(CpuIsa isa, bool pairs);

/// What the ISA files define.
void fill_generic(Kernels& k);
void fill_avx2(Kernels& k);
void fill_avx512(Kernels& k);
void fill_avx512_bf16(Kernels& k);
void fill_amx(Kernels& k);

}  // namespace moekit::linear
