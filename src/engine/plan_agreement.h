// Plan agreement: what the plans of all ranks must have in common, as text, and the exchange that
// compares it when a layer is made. A difference is refused on every rank, by the name of the first
// field that differs, before any row moves.
#pragma once

#include <cstdint>
#include <exception>
#include <span>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "problem/canonical_layer.h"

namespace moekit::engine {

struct Plan;

/// One thing on which all ranks must agree.
struct PlanField {
  std::string name;
  std::string value;
};

/// In a fixed order; the same on all ranks of one plan. What a rank may decide alone (threads,
/// allocator, its own number, the tokens of its calls, knobs that change speed only) is not in it.
std::vector<PlanField> plan_fields(const CanonicalLayer& layer, const Plan& plan);

/// Adds what a rank's plan says of its slice only: the parts of `whole` that a slice changes.
void add_sliced_parts(const MoeConfig& whole, std::vector<PlanField>& fields);

/// 64 bits over all names and values; the same on every machine.
uint64_t hash_of(std::span<const PlanField> fields);
std::string hash_text(uint64_t hash);  ///< 16 hex digits

/// Collective: the first step of making layer number `layer`. The largest of the ranks'
/// `max_tokens`: each rank's buffers must hold what any other may send.
int64_t agree_on_capacity(comm::Communicator& comm, int64_t layer, int64_t max_tokens);

/// Collective, the step after. Returns when all ranks have the same fields. Throws invalid_argument
/// on all ranks where two differ, naming the first field that does, both ranks and both values.
/// `layer` is the layer's number in the group. `failure` is why this rank has no plan, or null: it
/// is thrown here, and every other rank gets `comm` with its text. The group stays usable after
/// either.
void agree_on_plan(comm::Communicator& comm, int64_t layer, std::span<const PlanField> fields,
                   std::exception_ptr failure);

/// For a rank that fails before it has weights to plan for: takes its part in both steps, so that
/// peers that make the layer don't wait for it. Collective, and throws `failure`. `comm` may be
/// null.
[[noreturn]] void refuse_layer(comm::Communicator* comm, std::exception_ptr failure);

}  // namespace moekit::engine
