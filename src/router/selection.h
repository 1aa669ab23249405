// The total order of experts and the weights of the chosen ones: what every member of the router
// shares, so that members differ only in how fast they find the experts.
#pragma once

#include <cstdint>

#include "moekit/config.h"
#include "problem/expert_id.h"
#include "router/router.h"
#include "tensor/host_device.h"

namespace moekit::router {

/// A candidate or a finished slot: expert number and its value (selection value, or weight).
struct Ranked {
  float value;
  int32_t id;
};

/// Higher value first, then the lower id. NaN counts as below -infinity; NaNs are equal to each
/// other, and so are both zeros. A strict total order on distinct ids.
MOEKIT_HOST_DEVICE inline bool ranks_before(Ranked a, Ranked b) {
  const bool a_nan = a.value != a.value;
  const bool b_nan = b.value != b.value;
  if (a_nan != b_nan) return b_nan;
  if (!a_nan && a.value != b.value) return a.value > b.value;
  return a.id < b.id;
}

/// Whether the scores of all experts have to be known. Where only logits select and weigh, they
/// need not.
MOEKIT_HOST_DEVICE inline bool needs_scores(const RouterSpec& spec) {
  return spec.weight == RouterWeight::scores ||
         (!spec.hash_routing && spec.select_on == SelectOn::scores);
}

MOEKIT_HOST_DEVICE inline bool is_grouped(const RouterSpec& spec) { return spec.num_groups > 1; }

/// Fills slots[0, top_k).value for the chosen ids: raw weights in slot order, renormalised,
/// scaled, then sorts the slots into output order (descending weight, then lower id, NaN last).
/// `scores` may be null unless spec.weight is scores. On entry the slots are in selection order
/// (or in the order of the hash table), which is the order of every sum.
void finish_row(const RouterSpec& spec, const float* logits, const float* scores, Ranked* slots,
                int64_t top_k);

/// Reads row `token` of the hash table, of which check_run has seen that it is good.
void read_hash_row(const Args& args, int64_t token, Ranked* slots);

/// Writes finished slots to row `token` of args.ids and args.weights.
void write_row(const Args& args, int64_t token, const Ranked* slots);

/// Throws invalid_argument for missing pointers, token ids outside the hash table and expert ids
/// outside [0, num_experts) in the rows that are used.
void check_run(const Args& args);

/// Adds to args.nan_rows when `count` rows had NaN logits.
void report_nan_rows(const Args& args, int64_t count);

}  // namespace moekit::router
