// Turns the structs of c_api.h into the types of the C++ API and back. Knows nothing of handles.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>

#include "base/check.h"
#include "moekit/c_api.h"
#include "moekit/layer.h"

namespace moekit::c {

/// A struct of an older caller is shorter, of a newer one longer; nobody has one of this size.
inline constexpr uint32_t kLargestStruct = 1u << 16;

/// The struct as this library knows it: what an older caller lacks keeps `defaults`. Refuses a
/// missing struct_size, and bytes that only a newer library would understand.
template <typename S>
S read_struct(const S* given, const S& defaults, const char* name) {
  MOEKIT_CHECK(given != nullptr, "expected a {}, got NULL", name);
  const uint32_t size = given->struct_size;
  MOEKIT_CHECK(size > sizeof(uint32_t) && size <= kLargestStruct,
               "{}.struct_size is {}; set it to sizeof({}) ({} here) or call its _init function",
               name, size, name, sizeof(S));
  const auto* bytes = reinterpret_cast<const unsigned char*>(given);
  for (size_t i = sizeof(S); i < size; ++i) {
    MOEKIT_CHECK_AS(ErrorCode::unsupported, bytes[i] == 0,
                    "{} comes from a newer header ({} bytes, {} known here) and uses what this "
                    "library does not know; leave the new fields zero or load a newer libmoekit",
                    name, size, sizeof(S));
  }
  S result = defaults;
  std::memcpy(static_cast<void*>(&result), given, size < sizeof(S) ? size : sizeof(S));
  result.struct_size = sizeof(S);
  return result;
}

/// Fills a caller's struct of `size` bytes; what only the caller knows becomes zero.
template <typename S>
void write_struct(S* target, uint32_t size, const S& value, const char* name) {
  MOEKIT_CHECK(target != nullptr, "expected a {} to fill, got NULL", name);
  MOEKIT_CHECK(size > sizeof(uint32_t) && size <= kLargestStruct,
               "the size of {} is given as {}; pass sizeof({}) ({} here)", name, size, name,
               sizeof(S));
  const size_t known = size < sizeof(S) ? size : sizeof(S);
  std::memcpy(static_cast<void*>(target), &value, known);
  std::memset(reinterpret_cast<unsigned char*>(target) + known, 0, size - known);
  target->struct_size = size;
}

/// Memory from the caller's callbacks.
class CallbackAllocator final : public Allocator {
 public:
  explicit CallbackAllocator(const moekit_allocator& callbacks);
  void* allocate(size_t bytes, size_t alignment) override;
  void deallocate(void* data, size_t bytes) noexcept override;

 private:
  moekit_allocator callbacks_;
};

moekit_config default_config();
moekit_config to_c(const MoeConfig& config);
MoeConfig from_c(const moekit_config& config);

moekit_plan_options default_plan_options();
WeightScheme scheme_from_c(const moekit_weight_scheme& scheme);

/// Everything but group and allocator, which are handles.
/// Throws invalid_argument for lists that don't ascend.
Placement from_c(const moekit_placement& placement);
/// One block of malloc.
moekit_placement* to_c(const Placement& placement);
RebalanceOptions from_c(const moekit_rebalance_options& options);
/// Fills counts; arrays of another length are refused.
void to_c(const LoadStatistics& statistics, moekit_load* load);
PlanOptions from_c(const moekit_plan_options& options);

/// NULL becomes the empty view. `name` is used in messages.
TensorView view_of(const moekit_tensor* tensor, const char* name);
LayerTensors from_c(const moekit_layer_tensors& tensors, const MoeConfig& config);
/// Everything but the stream and the workspace.
LayerArgs from_c(const moekit_run_args& args);

}  // namespace moekit::c
