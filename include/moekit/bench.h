// Timing of one layer against the roofs of the machine, with cold weights.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "moekit/bench_peer.h"
#include "moekit/export.h"
#include "moekit/machine.h"
#include "moekit/tools.h"

namespace moekit {

/// One direction of the exchange.
struct ExchangeWay {
  double bytes = -1, own_bytes = -1;  ///< as those of ExchangeTime
  double us = 0;                      ///< part of a call, of the slowest rank

  /// Bytes that reached their rank, own ones included, a second.
  double delivered_gbs() const { return bytes < 0 ? 0 : (bytes + own_bytes) / us / 1e3; }
};

/// Dispatch and combine alone, experts left out, against copying as many bytes.
struct ExchangeTime {
  double bytes = -1;  ///< for other ranks in a call, all ranks together, as counted in a call and
                      ///< in the format in which rows travel, also where a rank reads a peer's f32
                      ///< results in place; -1 where the prepare member does not say
  double own_bytes = -1;  ///< rows that a rank sends to itself
  double plan_bytes = 0;  ///< what the plans say of `bytes`: every slot remote, load balanced
  double median_us = 0, p5_us = 0, p95_us = 0;  ///< of a call, from the first rank's start to the
                                                ///< last one's end
  int64_t repeat = 0;
  ExchangeWay dispatch, combine;
  double memcpy_gbs = 0;  ///< of the same threads and run; each byte counts once
  double local_us = 0;    ///< the same steps on one rank with a local prepare, same tokens a rank

  double floor_us() const { return bytes < 0 ? 0 : bytes / memcpy_gbs / 1e3; }
  double floor_fraction() const { return floor_us() / median_us; }
  /// Bytes that reached their rank, own ones included, a second.
  double delivered_gbs() const { return bytes < 0 ? 0 : (bytes + own_bytes) / median_us / 1e3; }
  double overhead_us() const { return median_us - local_us; }
};

/// Packing one rank's experts.
struct PackingTime {
  int64_t bytes = 0;            ///< packed
  double seconds = 0;           ///< into memory that was touched before
  double memcpy_gbs = 0;        ///< of the same threads and run
  double fault_us_per_mib = 0;  ///< first touch of fresh memory

  double gbs() const { return static_cast<double>(bytes) / seconds / 1e9; }
};

/// A peer at one point: its time, or the reason why it has none.
struct PeerTime {
  std::string name;
  PeerIdentity identity;
  std::string reason;   ///< empty: timed
  double rel_rms = -1;  ///< of its output against the reference's with f32 activations; -1 unknown
  double median_us = 0, p5_us = 0, p95_us = 0;
  int64_t repeat = 0;
};

/// How a point on a GPU was timed: independent calls, one after the other in one graph.
struct GpuTiming {
  std::string device;       ///< the GPU's name
  std::string knobs;        ///< the chain of launches that ran
  int calls = 0;            ///< of the graph; a time is that of a launch over this many
  int copies = 0;           ///< of all weights, which the calls take in turn
  double launch_us = 0;     ///< what the floor adds to the time of the bytes
  int64_t cache_bytes = 0;  ///< L2 of the GPU
  double rel_rms = -1;      ///< of the first rows against the reference; -1: not compared
};

struct BenchRequest {
  LayerSource source;  ///< with weights
  PlanOptions options;
  int num_ranks = 1;
  std::vector<int64_t> tokens;      ///< of one rank, a point each
  std::string routing = "uniform";  ///< uniform, zipf:S, hot, one_rank, or a file of top-k ids
  bool include_router = false;      ///< the layer's own router chooses; `routing` is then ignored
  bool include_shared = false;
  bool exchange_only = false;  ///< times dispatch and combine alone; needs no expert weights
  uint64_t seed = 0;
  double min_seconds = 1.5;                       ///< of timed calls a point
  std::vector<std::shared_ptr<BenchPeer>> peers;  ///< timed in turns with the layer, on one rank
};

struct BenchPoint {
  PlanSummary plan;
  int64_t tokens = 0;        ///< of one rank
  int64_t tokens_total = 0;  ///< of all ranks
  std::string routing;
  double median_us = 0, p5_us = 0, p95_us = 0;
  int64_t repeat = 0;
  double flops = 0;
  double weights_bytes = 0;  ///< of the experts that a call touches, as stored; mean over routings
  double activations_bytes = 0;   ///< hidden rows in, output rows out
  double wire_bytes = 0;          ///< sent between ranks
  double active_experts = 0;      ///< mean over routings
  int64_t working_set_bytes = 0;  ///< weights between two uses of the same ones
  bool cold = false;              ///< the working set exceeds the last-level cache
  double floor_us = 0;  ///< max(bytes / bandwidth, flops / matrix peak); on a GPU launch_us more
                        ///< for the bytes
  std::optional<ExchangeTime> exchange;  ///< of two ranks and more
  std::optional<PackingTime> packing;    ///< none with exchange_only and on a GPU
  std::optional<GpuTiming> gpu;          ///< where the plan is for one
  ProbeResult probe;                     ///< measured before, between and after the calls
  std::vector<PeerTime> peers;           ///< one a peer of the request, in its order

  double total_bytes() const { return weights_bytes + activations_bytes + wire_bytes; }
  double tflops() const { return flops / median_us / 1e6; }
  double gbs() const { return total_bytes() / median_us / 1e3; }
  double floor_fraction() const { return floor_us / median_us; }
};

/// Calls `report` after each point. Times (hidden, ids, weights) -> output unless the request
/// includes more. On a GPU it times the routed experts alone, rows in device memory. Throws
/// invalid_argument for a routing that does not fit, unsupported when no back-end takes the layer
/// or a GPU cannot do what the request includes.
MOEKIT_API void run_bench(const BenchRequest& request,
                          const std::function<void(const BenchPoint&)>& report,
                          const std::function<void(const std::string&)>& progress = {});

}  // namespace moekit
