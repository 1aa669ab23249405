#include "tensor/view_check.h"

#include <algorithm>
#include <cstdlib>
#include <numeric>

#include "base/check.h"

namespace moekit {
namespace {

constexpr int64_t kMostBytes = int64_t{1} << 47;  // what a process can address

/// An axis along which the view has more than one element.
struct Axis {
  int64_t length;
  int64_t step;  ///< |stride|
};

bool overlaps_itself(const TensorView& view) {
  std::array<Axis, kMaxRank> axes{};  // by ascending step
  size_t n = 0;
  for (int i = 0; i < view.rank; ++i) {
    if (view.shape[i] <= 1) continue;
    const Axis axis{view.shape[i], std::abs(view.strides[i])};
    size_t at = n++;
    for (; at > 0 && axes[at - 1].step > axis.step; --at) axes[at] = axes[at - 1];
    axes[at] = axis;
  }
  if (n > 0 && axes[0].step == 0) return true;
  if (n == 2) {
    // Elements meet where one axis walks a multiple of the other's step.
    const int64_t common = std::gcd(axes[0].step, axes[1].step);
    return axes[1].step / common < axes[0].length && axes[0].step / common < axes[1].length;
  }
  // With more axes each must step over all of the smaller ones.
  int64_t span = 0;
  for (size_t i = 0; i < n; ++i) {
    const Axis& axis = axes[i];
    if (axis.step <= span) return true;
    span += (axis.length - 1) * axis.step;
  }
  return false;
}

}  // namespace

void check_view(const TensorView& view, const char* name) {
  MOEKIT_CHECK(view.rank >= 0 && view.rank <= kMaxRank, "{}: rank is {}, expected 0 to {}", name,
               view.rank, kMaxRank);
  if (view.empty()) return;
  int64_t elements = 1, span = 1;
  for (int i = 0; i < view.rank; ++i) {
    const int64_t length = view.shape[i];
    MOEKIT_CHECK(length >= 0, "{}: shape[{}] is {}, expected 0 or more", name, i, length);
    // Counted without the axes of length 0, so that products over part of the axes fit as well.
    MOEKIT_CHECK(!__builtin_mul_overflow(span, std::max<int64_t>(1, length), &span),
                 "{}: its shape has more elements than 64 bits count", name);
    elements *= length;
  }
  if (elements == 0) return;
  MOEKIT_CHECK(view.data != nullptr, "{}: data is null but the shape has elements", name);
  const int64_t most = kMostBytes * 8 / bits_of(view.dtype);  // elements either way
  int64_t low = 0, high = 0;
  for (int i = 0; i < view.rank; ++i) {
    int64_t reach = 0;
    const bool fits = !__builtin_mul_overflow(view.shape[i] - 1, view.strides[i], &reach) &&
                      reach >= -most && reach <= most;
    (reach < 0 ? low : high) += fits ? reach : 0;
    MOEKIT_CHECK(
        fits && low >= -most && high <= most,
        "{}: stride {} over {} elements of axis {} leaves the address space; strides count "
        "elements",
        name, view.strides[i], view.shape[i], i);
  }
  const auto at = reinterpret_cast<uintptr_t>(view.data);
  const auto before = static_cast<uintptr_t>(-low * bits_of(view.dtype) / 8);
  const auto after = static_cast<uintptr_t>((high + 1) * bits_of(view.dtype) / 8);
  MOEKIT_CHECK(at >= before && at <= UINTPTR_MAX - after,
               "{}: its strides lead out of the address space, from {} bytes before its data to {} "
               "bytes behind",
               name, before, after);
}

void check_written_view(const TensorView& view, const char* name) {
  check_view(view, name);
  if (view.empty() || view.num_elements() == 0) return;
  MOEKIT_CHECK(
      !overlaps_itself(view),
      "{}: elements of it share memory (shape and strides overlap), which can't be written; "
      "pass one place for each",
      name);
}

}  // namespace moekit
