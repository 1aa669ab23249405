// Tools: what programs around a layer share: tensor files by name, layers spread over in-process
// ranks, comparison of back-ends, planning without weights, timing. The moekit program is a thin
// shell over these.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "moekit/checkpoint.h"
#include "moekit/export.h"
#include "moekit/layer.h"
#include "moekit/machine.h"
#include "moekit/placement.h"
#include "moekit/plan.h"
#include "moekit/tensor.h"

namespace moekit {

MOEKIT_API const char* version();

enum class LogLevel : uint8_t { debug, info, warning, off };

struct LogOptions {
  LogLevel console = LogLevel::off;  ///< lowest level that goes to stderr
  std::string file;                  ///< appended with everything; empty: none
};

/// The library says nothing until this is called. Throws invalid_argument for a file that can't be
/// opened.
MOEKIT_API void configure_log(const LogOptions& options);

// Names as files, flags and JSON spell them.
MOEKIT_API std::string scheme_name(
    const WeightScheme& scheme);  ///< "int4_g128" for grouped integers
MOEKIT_API std::string weights_name(
    const MoeConfig& config);  ///< "fp8_block", or "gate_up/down" where they differ
MOEKIT_API std::string activations_name(
    const MoeConfig& config);  ///< of both expert matrices likewise
MOEKIT_API std::string activation_name(const ActivationSpec& spec);  ///< "silu", ...

/// A tensor that owns its memory (or the mapped file that holds it).
struct OwnedTensor {
  TensorView view;
  std::shared_ptr<const void> storage;
};

/// Reads "FILE" or "FILE:NAME" (.npy, .safetensors) into aligned memory, row-major. `flag` names
/// the command-line value in errors. Throws invalid_argument for a wrong path or name, corrupt_file
/// for a malformed file.
MOEKIT_API OwnedTensor load_tensor(const std::string& reference, const std::string& flag);

// Inputs of a layer from files: invalid_argument when shape, dtype or ids do not fit.
MOEKIT_API OwnedTensor load_hidden(const std::string& reference, int64_t hidden);
MOEKIT_API OwnedTensor load_token_ids(const std::string& reference, int64_t num_tokens);
MOEKIT_API OwnedTensor load_topk_ids(const std::string& reference, int64_t num_tokens,
                                     int64_t top_k, int64_t num_experts);
MOEKIT_API OwnedTensor load_topk_weights(const std::string& reference, int64_t num_tokens,
                                         int64_t top_k);
/// Any number of rows of ids, as i32.
MOEKIT_API OwnedTensor load_routing(const std::string& reference, int64_t top_k,
                                    int64_t num_experts);
/// [T, hidden] as f32.
MOEKIT_API OwnedTensor load_golden(const std::string& reference, int64_t num_tokens,
                                   int64_t hidden);

// Inputs from the counter-based generator: the same on every machine.
MOEKIT_API OwnedTensor random_hidden(int64_t num_tokens, int64_t hidden,
                                     uint64_t seed);  ///< bf16, unit variance
MOEKIT_API OwnedTensor random_token_ids(int64_t num_tokens, int64_t vocabulary, uint64_t seed);

/// A layer and what to call it.
struct LayerSource {
  std::shared_ptr<const CanonicalLayer>
      canonical;  ///< without weight data where only a plan is wanted
  MoeConfig config;
  std::string model;  ///< directory or SPEC
  std::string family;
  int layer = -1;
  int64_t hash_rows = 0;  ///< token ids that hash routing knows
};
MOEKIT_API LayerSource open_source(const std::string& model_dir, int layer);

/// Tensors of all ranks' tokens, [T, ...]; empty where not given.
struct RankedInputs {
  TensorView hidden, token_ids, topk_ids, topk_weights;
};

struct RankedOutputs {
  std::vector<float> output;         ///< [T, hidden]
  std::vector<int32_t> topk_ids;     ///< [T, k]
  std::vector<float> topk_weights;   ///< [T, k]
  std::vector<float> router_logits;  ///< [T, E]; empty when the router did not run
  int64_t dropped = 0;
  std::vector<double> time_us;  ///< one a repeat: from the first rank's start to the last one's end
};

/// How RankedLayer::run runs a call.
struct RunOptions {
  int repeat = 1;
  int warmups = 0;  ///< untimed calls before
  bool want_routing = true;
  int microbatches = 1;       ///< parts of each rank's rows, whose exchanges and experts overlap
  bool skip_experts = false;  ///< times the exchange alone; the output is unspecified
};

/// One layer on R ranks. In this process, a thread and a Layer each; or, where options.comm is the
/// end of a group of R processes, the rank of that group: every process then calls the same, with
/// the inputs of all ranks, and gets the outputs of all. Rank r takes a contiguous share of the
/// tokens; shares differ by at most one.
class MOEKIT_API RankedLayer {
 public:
  /// Capacity for `total_tokens` (>= 0) over all ranks. options.max_tokens is set here.
  RankedLayer(const LayerSource& source, const PlanOptions& options, int num_ranks,
              int64_t total_tokens);
  ~RankedLayer();
  RankedLayer(RankedLayer&&) noexcept;

  int num_ranks() const;
  /// With ranks that are processes: of this process's rank, whatever `rank` is.
  const Explanation& explanation(int rank = 0) const;
  /// Sent by all ranks in a full call.
  int64_t wire_bytes() const;

  /// Runs `repeat` times (after `warmups` untimed calls); results are those of the last. Buffers of
  /// `outputs` are reused. An error of a rank is thrown here with its number; of several, the one
  /// that caused the others.
  void run(const RankedInputs& inputs, RankedOutputs& outputs, int repeat = 1, int warmups = 0,
           bool want_routing = true) const;
  void run(const RankedInputs& inputs, RankedOutputs& outputs, const RunOptions& options) const;

  /// What all calls so far (since the last change of placement) asked of each expert and rank.
  LoadStatistics load_statistics() const;
  Placement placement() const;
  /// Layer::set_placement on every rank; the result sums what the ranks did.
  PlacementChange set_placement(const Placement& placement);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Ranks that are processes: brings the spans of all into the trace of each. Collective; nothing to
/// do for ranks of one process. Clocks agree within a host only.
MOEKIT_API void gather_trace(const Trace& trace, const CommunicatorHandle& ranks);

/// Writes outputs beside `path` and renames: .npy holds the output, .safetensors the routing too.
/// Throws invalid_argument when the path can't be written.
MOEKIT_API void save_outputs(const std::string& path, const RankedOutputs& outputs,
                             int64_t num_tokens, const MoeConfig& config);
/// Throws invalid_argument, naming `flag`, for a path that no file can be written to.
MOEKIT_API void check_writable_path(const std::string& flag, const std::string& path);
/// Throws invalid_argument early for a path that save_outputs would refuse.
MOEKIT_API void check_output_path(const std::string& path);

struct OutputStats {
  double rms = 0, max_abs = 0;  ///< over finite values
  int64_t nan_count = 0, inf_count = 0;
};
MOEKIT_API OutputStats stats_of(const std::vector<float>& output);

/// y against reference, row by row in fp64. Values that are not finite must be the same in both.
struct Errors {
  double max_abs = 0;
  double rel_rms = 0;        ///< sqrt(sum (y - r)^2) / sqrt(sum r^2)
  double worst_row_rms = 0;  ///< the same of the worst row; an exact zero row allows no error
  int64_t worst_row = -1;
  int64_t nonfinite_mismatches = 0;
  int64_t nonfinite_row = -1;  ///< the first row with one
};
MOEKIT_API Errors compare(const float* y, const float* reference, int64_t num_rows, int64_t width);

/// One experts back-end against the reference.
struct CheckResult {
  std::string backend;
  bool supported = false;
  std::vector<std::string> reasons;
  Errors errors;
  double bound = 0;  ///< of worst_row_rms, derived from formats and sizes
  std::optional<Errors> golden_errors;
  std::optional<double> golden_bound;  ///< none where a static scale may saturate
  bool passed = false;
};

/// Every experts member against `ref` with the same settings; `golden` is [T, hidden] f32 or empty.
/// With options.backend set, that member alone (unsupported when it refuses).
MOEKIT_API std::vector<CheckResult> check_layer(
    const LayerSource& source, const PlanOptions& options, int num_ranks,
    const RankedInputs& inputs, const TensorView& golden,
    const std::function<void(const std::string&)>& progress = {});

/// Plans rank 0 of `num_ranks` (with options.comm: this rank of it) without packing, running or
/// touching weights.
MOEKIT_API Explanation explain_plan(const LayerSource& source, const PlanOptions& options,
                                    int num_ranks, int64_t tokens_per_rank);

/// "name, name (kind): reason; reason | ..." of members that refuse alike, or of `name` alone.
MOEKIT_API std::string refusal_of(const Explanation& explanation, const std::string& name = {});

}  // namespace moekit
