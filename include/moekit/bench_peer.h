// BenchPeer: another program's way to compute the same routed experts, timed in turns with ours.
// Peers are the front's business (libraries and programs that may not be there); the bench only
// feeds and calls them.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "moekit/config.h"
#include "moekit/tensor.h"

namespace moekit {

/// What a peer is asked to compute.
struct PeerLayer {
  MoeConfig config;            ///< formats are ours: a peer gets decoded weights
  DType dtype = DType::bf16;   ///< of operands: what our own activations fit in (bf16 or f32)
  int num_threads = 1;         ///< of the rank
  Device device;               ///< where it is to run
  double rows_per_expert = 1;  ///< mean over the largest call: for which weights may be laid out
  /// To be called before memory for weights is taken: throws out_of_memory where it is not there.
  std::function<void(int64_t bytes)> reserve;
};

/// One expert, decoded, row-major: gate and up [inter, width], down [width, inter]. Empty: no gate,
/// no bias. Valid during one call.
struct PeerExpert {
  std::span<const float> gate, up, down, gate_bias, up_bias, down_bias;
};

/// One call of a point: hidden [T, width] bf16 (the same in all), ids [T, k] i32, weights [T, k]
/// f32.
struct PeerCall {
  TensorView hidden, topk_ids, topk_weights;
};

/// Which weights and which call of the point.
struct PeerTurn {
  int copy = 0;
  int call = 0;
};

/// What ran, for whoever reads the figures.
struct PeerIdentity {
  std::string version, dtype, implementation;
};

/// Driven by one thread. Every step throws Error, whose message is the reason why the peer has no
/// time, where something is missing or does not fit.
class BenchPeer {
 public:
  virtual ~BenchPeer() = default;
  virtual std::string name() const = 0;
  /// Finds its library or program. Once, first.
  virtual void open(const PeerLayer& layer) = 0;
  /// All experts, ascending.
  virtual void add_expert(int64_t expert, const PeerExpert& weights) = 0;
  /// From now on so many copies of all weights, in memory of their own (never fewer than before).
  virtual void set_copies(int count) = 0;
  /// The calls of the next point; they stay the caller's and alive until the next set_calls.
  virtual void set_calls(std::span<const PeerCall> calls) = 0;
  /// [T, width] f32 of call 0 with copy 0, into `output`.
  virtual void run(std::span<float> output) = 0;
  /// Microseconds of each turn, from (hidden, ids, weights) to output.
  virtual std::vector<double> time(std::span<const PeerTurn> turns) = 0;
  /// On a GPU, in place of time(): all turns in one graph, launched `untimed` and then `timed`
  /// times; microseconds of each timed launch over the number of turns. Empty: it has no graphs.
  virtual std::vector<double> time_graph(std::span<const PeerTurn>, int /*untimed*/,
                                         int /*timed*/) {
    return {};
  }
  /// On a GPU: a product of 8192 x 8192 matrices in bf16 or fp8, sustained; 1e12 operations a
  /// second. 0: not known.
  virtual double dense_tflops(bool /*fp8*/) { return 0; }
  /// Of the calls set last.
  virtual PeerIdentity identity() const = 0;
};

}  // namespace moekit
