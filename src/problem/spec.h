// ProblemSpec: a layer and its load as one line of text,
// "qwen3-30b-a3b:weights=fp8_block,tokens=512" or "E=64,k=8,H=2048,I=1024,weights=nvfp4". What
// benches, combos and explain take and print.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "moekit/config.h"

namespace moekit {

/// How tokens choose experts when no router decides.
enum class RoutingKind : uint8_t {
  uniform,   ///< every expert alike
  zipf,      ///< expert of rank r with probability ~ 1 / (r + 1)^s, ranks in a random order
  hot,       ///< every token has expert 0 in its first slot, the rest is uniform
  one_rank,  ///< all slots on the experts of rank 0, as far as top_k distinct ones exist there
  holes,     ///< uniform, but some slots have no expert, some rows none at all, some one twice
};

struct RoutingPattern {
  RoutingKind kind = RoutingKind::uniform;
  double exponent = 1.0;  ///< zipf
  friend bool operator==(const RoutingPattern&, const RoutingPattern&) = default;
};

struct ProblemSpec {
  std::string name;  ///< of the model that the values came from, else empty
  MoeConfig config;
  int64_t tokens = 16;  ///< of one rank
  RoutingPattern routing;
  std::string placement = "linear";  ///< linear, round_robin or a file
};

/// Throws invalid_argument naming the key, what it takes and what came. The grammar of each key is
/// in describe_spec_keys().
ProblemSpec parse_spec(const std::string& text);

/// A line that parse_spec turns into the same values; weights and tokens are always spelled out.
std::string to_string(const ProblemSpec& spec);

/// Key and value of everything in a spec, in the order in which they are printed.
std::vector<std::pair<std::string, std::string>> spec_values(const ProblemSpec& spec);

/// The models that parse_spec knows by name.
const std::vector<ProblemSpec>& named_problems();

/// One line a key: its values.
std::string describe_spec_keys();

// Values of single keys, as flags take them too. Each throws invalid_argument with the list of what
// it takes.
WeightScheme parse_weight_scheme(const std::string& text);  ///< "int4_g128", "int8_channel_zp", ...
std::string spell(const WeightScheme& scheme);
ActivationScheme parse_activation_scheme(const std::string& text);  ///< "fp8_block_ue8m0", ...
std::string spell(const ActivationScheme& scheme);
RoutingPattern parse_routing(const std::string& text);  ///< "zipf:1.2", ...
std::string spell(const RoutingPattern& routing);

}  // namespace moekit
