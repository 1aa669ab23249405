// Derivation. u = 2^-24. Two fp32 evaluations of a dot product of length K whose partial sums grow
// like a random walk differ by about u * sqrt(K / 2) of the result's typical size; a handful of
// further roundings (scales, bias, activation function to 4 ulp) add a constant. kSafety = 4 covers
// the activation function's condition number (at most 2 where it matters) and the square root of
// two evaluations.
//
// The intermediate is then rounded to the down projection's input format. Two values that differ by
// a relative d fall on different sides of a rounding boundary with probability d / s, where s is
// the format's relative spacing, and then differ by s: E[error^2] = s * d. In one row of I
// elements, n = I * d / s flips are expected; the bound allows n + 4 sqrt(n) (Poisson) spread
// evenly, and 3 more of them in elements that each carry kPeak / I of the row's energy (products of
// two Gaussians are heavy-tailed). In block formats a scale may flip too: one block of `group`
// elements changes by `scale_step`.
//
// Four-bit elements are so coarse that this would promise nothing for small I, and their few values
// allow more. A flip happens at the middle of two neighbours, where the step is at most 0.4 of the
// value (midpoints 1.25, 2.5 and 5; below 1 the step is 0.5 where the block's largest value is 3.5
// or more: at most 2 % of the block's energy). So flips change at most 0.16 of the energy that they
// touch, however many there are. In nvfp4 the largest value of a block lies at 6 (1 +- 1/16), away
// from every midpoint, and the flipped one at 5 or less: it holds at most 25 / (25 + 5.6^2) of its
// block, and one flip changes 0.07 of the row's energy. A scale that flips changes less: a block is
// rounded anew (measured: 0.09 of the row's norm for nvfp4 and 0.19 for mxfp4 where one block is
// the whole row, 0.3 and 0.48 in one of 10^4 rows). Two such events in one row have a probability
// of n^2, below 10^-6. Elements with a large part of the row's energy are rare in long rows: the
// flipped one is taken to hold at most kPeakShare / I of it. What one element of I changes in the
// output depends on its column of weights and on how slots cancel: kSpread = 1.5 covers all but
// 10^-5 of the flips in random layers of I = 32 ... 512.
//
// A layer with latent projections quantizes a computed input: its flips count as well, in gate and
// in up (square root of two). The intermediate follows such a change and is rounded anew: two
// independent roundings differ by step^2 / 6 on average, taken twice. A flip of its own at the same
// time would be the second event of the row.
//
// Rows that travel back as bf16 are rounded once more: the same reasoning over the row's width,
// with the bound so far as the difference.
#include "problem/error_bound.h"

#include <algorithm>
#include <cmath>

namespace moekit {
namespace {

constexpr double kUnit = 5.9604644775390625e-8;  // 2^-24
constexpr double kSafety = 4.0;
constexpr double kPeak = 16.0;
constexpr double kPeakShare = 128.0;
constexpr double kSpread = 1.5;

struct Spacing {
  double step = 0;        ///< largest relative distance of neighbours; FP4: seen from their middle
  double group = 0;       ///< elements a discrete block scale, 0 = none
  double scale_step = 0;  ///< relative change of a block whose scale flips
  double peak = 0;        ///< FP4: largest part of a row's energy that one flip changes
};

Spacing spacing_of(ActivationFormat format) {
  switch (format) {
    case ActivationFormat::f32: return {};
    case ActivationFormat::bf16: return {0x1p-7, 0, 0};
    case ActivationFormat::fp8_tensor:
    case ActivationFormat::fp8_token:
    case ActivationFormat::fp8_block: return {0x1p-3, 0, 0};
    case ActivationFormat::mxfp8: return {0x1p-3, 32, 0x1p-4};
    case ActivationFormat::mxfp4: return {0.4, 32, 0, 0.16};
    case ActivationFormat::nvfp4: return {0.4, 16, 0, 0.07};
  }
  return {};
}

double sum_error(double length) { return kSafety * kUnit * (std::sqrt(length) + 4.0); }

/// Squared relative error of the output that rounding an intermediate of `inter` elements adds.
double flip_error(ActivationFormat format, double inter, double difference) {
  const Spacing s = spacing_of(format);
  if (s.step == 0) return 0;
  const double flips = inter * difference / s.step;
  const double usual = (flips + 4.0 * std::sqrt(flips)) / inter;
  if (s.peak > 0) {
    const double changed =
        s.step * s.step * std::min(1.0, usual) + s.peak * std::min(1.0, kPeakShare / inter);
    return kSpread * kSpread * std::min(changed, s.step * s.step);
  }
  double error = s.step * s.step * std::min(1.0, usual + 3.0 * kPeak / inter);
  if (s.group > 0) error += s.scale_step * s.scale_step * std::min(1.0, 2.0 * s.group / inter);
  return 4.0 * error;
}

/// Of one MLP over rows of `width` that may differ by `input` already.
double part(ActivationFormat down_input, double width, double inter, double input) {
  const double first = sum_error(width);
  const double second = sum_error(inter);
  const double sums = 4.0 * (first * first + second * second);
  const double step = spacing_of(down_input).step;
  const double followed = 2.0 * input * input + kSpread * kSpread * step * step / 3.0;
  const double flipped = flip_error(down_input, inter, first);
  return std::sqrt(sums + (input > 0 ? std::max(flipped, followed) : flipped));
}

}  // namespace

double row_error_bound(const MoeConfig& config, DType combine_dtype) {
  const auto width = static_cast<double>(config.routed_width());
  double input = 0;
  if (config.latent > 0) {
    const double projected = sum_error(static_cast<double>(config.hidden));
    input = std::sqrt(4.0 * projected * projected +
                      flip_error(config.gate_up_input.format, width, projected));
  }
  double bound = part(config.down_input.format, width, static_cast<double>(config.inter), input);
  if (config.shared.inter > 0) {
    bound =
        std::max(bound, part(config.shared.down_input.format, static_cast<double>(config.hidden),
                             static_cast<double>(config.shared.inter), 0));
  }
  if (combine_dtype == DType::bf16) {
    bound = std::sqrt(bound * bound + flip_error(ActivationFormat::bf16, width, bound) / 4.0);
  }
  return bound;
}

double gpu_row_error_bound(const MoeConfig& config, DType combine_dtype) {
  const bool fp8 = config.gate_up_weights.format == WeightFormat::fp8_block;
  return (fp8 ? 2.0 : 1.0) * row_error_bound(config, combine_dtype) + 0x1p-8;
}

}  // namespace moekit
