// Steps of weight panels in rings: strips of 16 weight rows, expanded to bf16 in registers.
#pragma once

#include "kernels/common/expand.cuh"
#include "kernels/smxx_decode/src/operands.cuh"
#include "kernels/smxx_decode/src/ring_units.cuh"

namespace moekit::kernels::smxx_decode {

/// A step of a warp takes two strips of 16 rows and 64 columns: those of gate and up in one block
/// (kPair), or one matrix's in two blocks that follow each other. In shared memory: the codes of
/// both, then the scales of both.
template <OperandFormat kFormat>
struct StepLayout {
  static constexpr PanelFormat kPanel = PanelFormat::of(kFormat);
  static constexpr int kCodeBytes = kPanel.strip_bytes();
  static constexpr int kScaleBytes = kStripRows * kPanel.row_scales();
  static constexpr int kBytes = 2 * (kCodeBytes + kScaleBytes);
};

/// sums += the products of strip `j` (0, 1) of a step that lies at `slot` in shared memory, with
/// the lane's B operands of its 64 columns.
template <OperandFormat kFormat>
__device__ __forceinline__ void multiply_strip(const uint8_t* slot, int j, int lane,
                                               const uint4 (&tokens)[2], float (&sums)[4]) {
  using Layout = StepLayout<kFormat>;
  StripWords<kFormat> words;
  words.load(slot + j * Layout::kCodeBytes, slot + 2 * Layout::kCodeBytes + j * Layout::kScaleBytes,
             lane);
#pragma unroll
  for (int step = 0; step < kPanelDepth / 16; ++step) {
    uint32_t a[4];
    words.expand(step, a);
    const uint4& token = tokens[step / 2];
    mma_bf16(sums, a[0], a[1], a[2], a[3], step % 2 == 0 ? token.x : token.z,
             step % 2 == 0 ? token.y : token.w);
  }
}

/// Steps of panels. kPair: a strip of gate and one of up.
template <OperandFormat kFormat, bool kPair>
class PanelSource {
  using Layout = StepLayout<kFormat>;
  static constexpr int kBlockBytes = Layout::kPanel.block_bytes();
  static constexpr int kScaleLanes = Layout::kScaleBytes / 16;  // lanes that copy a strip's scales

 public:
  static constexpr int kBytes = Layout::kBytes;
  static constexpr int kSums = kPair ? 2 : 1;
  static constexpr int kStepBlocks = kPair ? 1 : 2;

  __device__ __forceinline__ explicit PanelSource(const WeightView& view) : view_(view) {}

  __device__ __forceinline__ void start(int32_t expert, int32_t strip, int32_t block,
                                        int32_t blocks) {
    constexpr int kPerTile = kPanelRows / kStripRows;
    const int lane = threadIdx.x % 32;
    const uint8_t* base = static_cast<const uint8_t*>(view_.base) + expert * view_.expert_bytes +
                          int64_t{strip / kPerTile * blocks + block} * kBlockBytes;
    codes_ = base + strip % kPerTile * Layout::kCodeBytes + lane * 16;
    scales_ = base + Layout::kPanel.code_bytes() + strip % kPerTile * Layout::kScaleBytes +
              lane % kScaleLanes * 16;
    if (lane >= kScaleLanes) scales_ += kPair ? view_.half_bytes : int64_t{kBlockBytes};
    offset_ = 0;
  }

  __device__ __forceinline__ void copy(uint32_t slot, int lane, int32_t left) {
    const uint8_t* codes = codes_ + offset_;
    const uint8_t* second = codes + (kPair ? view_.half_bytes : int64_t{kBlockBytes});
    const bool both = kPair || left > 1;
#pragma unroll
    for (int i = 0; i < Layout::kCodeBytes; i += 512) {
      const uint32_t to = slot + i + lane * 16;
      copy_async_stream_16(to, codes + i, true);
      copy_async_stream_16(to + Layout::kCodeBytes, second + i, both);
    }
    if (lane < 2 * kScaleLanes) {
      copy_async_stream_16(slot + 2 * Layout::kCodeBytes + lane * 16, scales_ + offset_,
                           both || lane < kScaleLanes);
    }
    offset_ += kStepBlocks * kBlockBytes;
  }

  /// `words` are the lane's B operands of 64 columns, those of the first block.
  template <typename Tokens>
  __device__ static __forceinline__ void multiply(const uint8_t* slot, int lane, uint4 (&words)[2],
                                                  Tokens& tokens, float (&sums)[kSums][4]) {
    multiply_strip<kFormat>(slot, 0, lane, words, sums[0]);
    if constexpr (!kPair) tokens.load(words);
    multiply_strip<kFormat>(slot, 1, lane, words, sums[kSums - 1]);
  }

 private:
  const WeightView& view_;
  int32_t offset_ = 0;               // bytes of depth behind
  const uint8_t* codes_ = nullptr;   // what the lane copies of the pass's first block, first strip
  const uint8_t* scales_ = nullptr;  // the same of scales, either strip
};

}  // namespace moekit::kernels::smxx_decode
