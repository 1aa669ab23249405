// PlanOptions: what a caller decides about how a layer runs. Explanation: what was decided and why.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "moekit/allocator.h"
#include "moekit/communicator.h"
#include "moekit/config.h"
#include "moekit/tensor.h"
#include "moekit/trace.h"

namespace moekit {

/// Policy for rows beyond capacity: exact allocates the worst case; refuse and drop bound a rank's
/// rows at `max_rows`.
enum class CapacityMode : uint8_t { exact, refuse, drop };

/// Everything has a working default; a named back-end that refuses is an `unsupported` error with
/// all its reasons.
struct PlanOptions {
  std::string backend;  ///< experts (or mega) member by name; empty: automatic
  std::string prepare;  ///< prepare/finalize member by name; empty: automatic
  Device device{};      ///< the CPU has index 0 only
  std::string arch;     ///< "90a", ...: plan for a GPU that is not here (explain only)
  std::optional<ActivationFormat> activations;  ///< nullopt: what the checkpoint says, per matrix
  DType hidden_dtype = DType::f32;  ///< of the calls to come; bf16 lets rows travel as bf16
  int64_t max_tokens = 0;           ///< tokens of one call on this rank; 0 is refused
  CommunicatorHandle comm{};        ///< empty: one rank
  int num_nodes = 1;
  /// Tensor-parallel size: `tp` neighbouring ranks of `comm` hold slices of the same experts and
  /// are given the same tokens; the other ranks share the experts out (comm->size() / tp ranks of
  /// the placement). Every rank gets the whole output.
  int tp = 1;
  std::string placement = "linear";  ///< "linear", "round_robin", or a file (docs/formats.md)
  /// Most experts and replicas that Layer::set_placement may give a rank: memory for them is
  /// planned and allocated with the layer. 0: the placement is fixed.
  int64_t slots_per_rank = 0;
  /// With slots_per_rank: most experts that one set_placement may bring to a rank anew; they are
  /// packed beside the old ones until all ranks are ready. 0: slots_per_rank.
  int64_t staging_slots = 0;
  bool load_statistics = true;  ///< count slots per expert and rank in every call
  Combine combine = Combine::slots;
  DType combine_dtype = DType::f32;  ///< f32 or bf16
  Wire wire = Wire::automatic;
  bool batch_invariant = true;
  CapacityMode capacity = CapacityMode::exact;
  int64_t capacity_rows = 0;  ///< of a rank, above 0 where capacity bounds them
  std::chrono::nanoseconds deadline = std::chrono::seconds(30);
  int num_threads = 0;  ///< 0: the CPUs this process may use, divided by the ranks on this host
  bool checked = true;  ///< ids out of range are errors (with row, slot and id); else dropped
  /// Directory of packed weights, made where it is missing: the next process reads them instead of
  /// packing. Found by content, verified, safe with concurrent processes. Empty: none.
  std::string pack_cache;
  Trace trace{};                   ///< where spans of the calls go; empty: none are taken
  Allocator* allocator = nullptr;  ///< null: default_allocator(); must outlive the layer
  /// Told while a layer is made how many bytes of its weights are packed, of how many; by the
  /// thread that makes it (of ranks that are threads: rank 0). Empty: nobody is told.
  std::function<void(int64_t done, int64_t total)> packing_progress{};
};

/// One registered member and its answer.
struct Candidate {
  std::string name;
  std::string kind;  ///< "mega", "prepare" or "experts"
  bool supported = false;
  std::vector<std::string> reasons;  ///< every reason against it
  std::string note;
};

/// One prepare member with one experts member, whatever was asked for by name.
struct PairAnswer {
  std::string prepare, experts;
  bool supported = false;
  bool chosen = false;
  std::vector<std::string> reasons;  ///< every reason of both members and of their joint
  std::string note;                  ///< why a pair that works was not taken
};

struct PlanBucket {
  int64_t max_tokens = 0;
  std::string backend;
  std::string knobs;
};

struct PlanSummary {
  std::string backend, prepare, reduce;
  std::string transport;        ///< "none", "threads", ...
  int64_t weights_bytes = 0;    ///< packed blob of this rank
  int64_t placement_bytes = 0;  ///< beside it, for experts that set_placement may bring
  int64_t workspace_bytes = 0;  ///< one call in flight
  int64_t heap_bytes = 0;       ///< beside it: this rank's part of a symmetric heap
  int64_t wire_bytes = 0;       ///< sent by this rank in a full call
  std::string weight_layout, row_order;
  std::string weigher, summer, sum_order;  ///< reduce duty
  std::string quant_duty, quant_reason;
  std::string wire_format;
  std::string pack_cache;  ///< "off", "hit", "stored", "damaged" or "not_stored"; empty: no layer
                           ///< was made
  std::vector<PlanBucket> buckets;
  std::string hash;  ///< 16 hex digits over everything on which ranks must agree
};

struct Explanation {
  std::vector<Candidate> candidates;  ///< in the order in which they were asked, all of them
  std::vector<PairAnswer> pairs;      ///< every pair, best experts first, then best prepare
  bool chosen = false;
  PlanSummary plan;  ///< meaningful when chosen
};

}  // namespace moekit
