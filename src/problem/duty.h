// ReduceDuty and QuantDuty: who weights, who sums, who quantizes. Closed enums, negotiated once at
// plan time; a pair whose members cannot agree is refused there, never ignored.
#pragma once

#include <cstdint>

namespace moekit {

/// Who multiplies by the router weight.
enum class Weigher : uint8_t {
  input,  ///< the weight scales the experts' input (top_k == 1 only); the rows that come out are
          ///< final
  experts,
  combine,  ///< finalize or its WeightAndReduce member
};

/// Who sums over top-k.
enum class Summer : uint8_t {
  experts,  ///< experts write [rows, width]
  reduce,   ///< a WeightAndReduce member on the rank that ran the experts
  combine,  ///< finalize on the token's owner
};

/// The order of the sum.
enum class SumOrder : uint8_t { slots, rank_sums };

struct ReduceDuty {
  Weigher weigher = Weigher::combine;
  Summer summer = Summer::combine;
  SumOrder order = SumOrder::slots;
  friend bool operator==(const ReduceDuty&, const ReduceDuty&) = default;
};

/// Who quantizes the experts' input.
enum class QuantDuty : uint8_t {
  none,         ///< the GEMM reads f32 or bf16
  source,       ///< before dispatch, on the token's owner
  destination,  ///< by prepare, after dispatch
  experts,      ///< inside the experts
};

constexpr const char* to_string(Weigher w) {
  return w == Weigher::input ? "input" : w == Weigher::experts ? "experts" : "combine";
}
constexpr const char* to_string(Summer s) {
  return s == Summer::experts ? "experts" : s == Summer::reduce ? "reduce" : "combine";
}
constexpr const char* to_string(SumOrder o) { return o == SumOrder::slots ? "slots" : "rank_sums"; }
constexpr const char* to_string(QuantDuty q) {
  return q == QuantDuty::none          ? "none"
         : q == QuantDuty::source      ? "source"
         : q == QuantDuty::destination ? "destination"
                                       : "experts";
}

}  // namespace moekit
