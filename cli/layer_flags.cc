#include "layer_flags.h"

#include <fmt/format.h>

#include <limits>

#include "moekit/error.h"

namespace moekit::cli {

void add_layer_flag(CLI::App& verb, int& layer) {
  verb.add_option("--layer", layer,
                  "Decoder layer, counted as the checkpoint does (default: the first MoE layer)")
      ->check(CLI::Range(0, std::numeric_limits<int>::max()).description(""))
      ->type_name("N");
}

void InputFlags::add_to(CLI::App& verb) {
  const std::string group = "Input";
  auto* file =
      verb.add_option("--tokens", tokens, "Hidden states [T, H] from a .npy or .safetensors file")
          ->type_name("FILE[:NAME]")
          ->group(group);
  verb.add_option("--random", random, "T random tokens, the same on every machine")
      ->capture_default_str()
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 40).description(""))
      ->excludes(file)
      ->type_name("T")
      ->group(group);
  verb.add_option("--token-ids", token_ids, "Token ids [T], for hash routing")
      ->type_name("FILE[:NAME]")
      ->group(group);
  auto* ids =
      verb.add_option("--topk-ids", topk_ids, "Experts [T, k]; skips the router; -1: no expert")
          ->type_name("FILE[:NAME]")
          ->group(group);
  auto* weights = verb.add_option("--topk-weights", topk_weights, "Weights [T, k] of --topk-ids")
                      ->type_name("FILE[:NAME]")
                      ->group(group);
  ids->needs(weights);
  weights->needs(ids);
}

Inputs InputFlags::load(const LayerSource& source, uint64_t seed) const {
  const MoeConfig& config = source.config;
  Inputs inputs;
  inputs.hidden = tokens.empty() ? random_hidden(random, config.hidden, seed)
                                 : load_hidden(tokens, config.hidden);
  const int64_t count = inputs.num_tokens();
  if (!topk_ids.empty()) {
    inputs.topk_ids = load_topk_ids(topk_ids, count, config.top_k, config.num_experts);
    inputs.topk_weights = load_topk_weights(topk_weights, count, config.top_k);
  }
  if (!token_ids.empty()) {
    if (!config.router.hash_routing) {
      throw Error(
          ErrorCode::invalid_argument,
          fmt::format("--token-ids: expected a layer that routes by token id, got layer {} of "
                      "{}, whose router reads hidden states alone; leave the flag out",
                      source.layer, source.family));
    }
    inputs.token_ids = load_token_ids(token_ids, count);
  } else if (config.router.hash_routing && topk_ids.empty()) {
    if (!tokens.empty()) {
      throw Error(ErrorCode::invalid_argument,
                  "--token-ids: this layer routes by token id, so --tokens needs them beside it");
    }
    inputs.token_ids = random_token_ids(count, source.hash_rows, seed);
  }
  return inputs;
}

}  // namespace moekit::cli
