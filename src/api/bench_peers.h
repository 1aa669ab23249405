// Peers of a bench: fed with the layer's decoded weights, held to the reference before they are
// timed, then timed in turns with the layer's own calls.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "moekit/bench.h"

namespace moekit::api {

/// A dense product's rate, and the peer that measured it; 0: none did.
struct DenseRate {
  double tflops = 0;
  std::string peer;
};

class PeerBench {
 public:
  /// Opens the peers and gives them the layer's weights. What a peer throws becomes its reason.
  PeerBench(const BenchRequest& request, const LayerSource& source, int64_t most_tokens,
            std::function<void(const std::string&)> tell);

  /// Before the timed calls of a point: `calls` are its routings, alive until the next point.
  void begin(const std::vector<RankedInputs>& calls, int num_copies);
  /// Gives each peer that has had less time than `own_seconds` a turn. True when one ran: whoever
  /// is timed next should run once untimed, for the machine has waited meanwhile.
  bool take_turns(double own_seconds);
  /// On a GPU, in place of turns: each peer's calls of the point in one graph.
  void time_graphs(int untimed, int timed);
  /// Turns until every peer has a median, and the results.
  std::vector<PeerTime> finish();
  /// Of a GPU's matrix units with bf16 or fp8 operands. What the first usable peer measures.
  DenseRate dense_rate(bool fp8);

 private:
  struct Contender {
    std::shared_ptr<BenchPeer> peer;
    std::string broken;  ///< reason that holds for all points
    PeerTime result;     ///< of this point
    std::vector<double> times;
    double seconds = 0;       ///< of `times`
    double last_seconds = 0;  ///< of the last call, timed or not
    int64_t turns = 0;        ///< calls so far
    bool active() const { return broken.empty() && result.reason.empty(); }
  };

  void open(const LayerSource& source, const PeerLayer& layer);
  std::vector<float> reference(const RankedInputs& inputs, int64_t rows) const;
  void try_out(Contender& contender, const std::vector<float>& reference, int64_t rows);
  /// Microseconds of the next `count` calls of its rotation.
  std::vector<double> run(Contender& contender, int64_t count);
  /// As the layer's own calls: successive ones touch other weights.
  PeerTurn turn_of(int64_t number) const;
  bool on_gpu() const { return request_.options.device.type == DeviceType::cuda; }
  void take_turn(Contender& contender, double seconds);

  const BenchRequest& request_;
  const LayerSource& source_;
  std::function<void(const std::string&)> tell_;
  int num_calls_ = 0, num_copies_ = 0;
  int64_t num_tokens_ = 0;
  int64_t reserved_ = 0;  ///< by peers that have not taken it yet
  std::vector<Contender> contenders_;
};

}  // namespace moekit::api
