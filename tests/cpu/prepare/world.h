// A world of ranks that runs whole calls through one prepare/finalize member with experts of its
// own: f_e(x) is a formula, so that the expected output is known bit for bit.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "moekit/error.h"
#include "prepare/prepare_finalize.h"

namespace moekit::prepare {

struct World {
  const PrepareFinalize* member = nullptr;
  int ranks = 1;
  int nodes = 1;
  std::vector<int> node_of;  ///< what the plan knows of nodes; empty: shares
  int64_t experts = 8;
  int64_t top_k = 2;
  int64_t width = 40;
  std::vector<int64_t> tokens;                       ///< of each rank
  int64_t max_tokens = 0;                            ///< 0: the largest of `tokens`, at least 1
  std::shared_ptr<const ExpertPlacement> placement;  ///< null: linear
  Combine combine = Combine::slots;
  DType combine_dtype = DType::f32;
  DType hidden_dtype = DType::f32;
  int64_t row_gap = 0;       ///< elements between rows of the caller's tensor
  int64_t element_step = 1;  ///< stride of a row's elements
  QuantDuty quant_duty = QuantDuty::none;
  ActivationFormat input = ActivationFormat::f32;  ///< config.gate_up_input
  ActivationFormat wire = ActivationFormat::f32;
  bool pass_records = false;  ///< the caller brings quantized rows
  ReduceDuty duty{};          ///< order is set from `combine`
  Capacity capacity{};
  bool checked = true;
  int threads = 1;  ///< of each rank's pool
  int calls = 1;
  int64_t seed = 1;
  bool far_peers = false;   ///< heaps give no address of peers on other nodes
  bool one_stream = false;  ///< rows, ids and weights depend on the token's number over all ranks
  int spoiled_rank = -1;    ///< its first id is out of range in call 0
  bool go_on = false;       ///< after an error, make the next call all the same
  std::chrono::nanoseconds deadline = std::chrono::seconds(60);
  /// Id of (rank, token, slot). Null: random in [-1, experts).
  std::function<int32_t(int rank, int64_t token, int64_t slot)> id;
  /// Number of a rank's first call. Null: 0.
  std::function<int(int rank)> first_call;
  /// Called on every rank's thread before each step of a call; may sleep or throw.
  std::function<void(int rank, int step)> before;
  /// Called with what prepare delivered.
  std::function<void(int rank, const ExpertRows& rows)> look;
};

struct RankResult {
  std::vector<float> out;  ///< [tokens, width]
  int64_t dropped = -1;
  int64_t allocations = 0;  ///< of the calling thread inside the member, all calls
  int errors = 0;           ///< calls that threw; code and error are the last one's
  ErrorCode code = ErrorCode::ok;
  std::string error;
};

Problem problem_of(const World& world, int rank);
/// Every output starts as NaN; so do the workspace and the experts' output.
std::vector<RankResult> run_world(const World& world);
/// What the definition gives: slots summed in slot order, or rank sums in rank order.
std::vector<std::vector<float>> expected_outputs(const World& world);
/// Runs and compares bit for bit; reports the first difference of each rank.
std::vector<RankResult> expect_exact(const World& world);

float weight_of(const World& world, int rank, int64_t token, int64_t slot);
int32_t id_of(const World& world, int rank, int64_t token, int64_t slot);

}  // namespace moekit::prepare
