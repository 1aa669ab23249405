// Problem: everything that decides a plan and the bits of its result. Knobs, which change speed
// only, are not in it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "device/gpu.h"
#include "moekit/config.h"
#include "moekit/tensor.h"
#include "problem/node_map.h"
#include "problem/placement.h"

namespace moekit {

/// What happens when more rows arrive than capacity allows.
enum class CapacityPolicy : uint8_t { exact, refuse, drop };

struct Capacity {
  CapacityPolicy policy = CapacityPolicy::exact;
  int64_t max_rows =
      0;  ///< per rank, for refuse and drop; 0 with exact: the worst case is allocated
  friend bool operator==(const Capacity&, const Capacity&) = default;
};

struct Problem {
  MoeConfig config;        ///< activation schemes are resolved: no "checkpoint" left
  int64_t max_tokens = 0;  ///< capacity of one call, tokens of this rank
  int num_ranks = 1;       ///< that share the experts out and exchange rows
  int rank = 0;
  int tp_size = 1;  ///< slices of each expert; config.inter is this rank's slice
  int tp_rank = 0;
  NodeMap nodes;                                     ///< of the ranks that exchange rows
  std::shared_ptr<const ExpertPlacement> placement;  ///< never null once planned
  int64_t slots_per_rank = 0;  ///< most experts of a rank in any later placement; 0: it is fixed
  int64_t staging_slots = 0;   ///< most of them that one change brings to a rank
  Combine combine = Combine::slots;
  DType combine_dtype = DType::f32;  ///< f32 or bf16: rows on their way back
  Wire wire = Wire::automatic;
  bool batch_invariant = true;
  Capacity capacity{};
  Device device{};
  device::GpuTarget gpu{};  ///< where `device` is a CUDA device
  DType hidden_dtype =
      DType::f32;  ///< of the calls to come where known: bf16 lets rows travel as bf16
  /// One static gate/up input scale for all experts, so that the source may quantize (value: a
  /// multiplier).
  bool one_static_input_scale = false;
  float static_input_scale = 1.0f;
  bool checked = true;  ///< ids out of range are errors (else they count as dropped)

  int64_t num_local_experts() const {
    return static_cast<int64_t>(placement->experts_of(rank).size());
  }
};

}  // namespace moekit
