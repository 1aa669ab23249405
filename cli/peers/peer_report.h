// What bench says of its peers: JSON, and rows of a table.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "json_writers.h"
#include "moekit/bench.h"

namespace moekit::cli {

/// The peers that this program knows, or those of them that run on a GPU. Empty names: wherever
/// they are found.
std::vector<std::shared_ptr<BenchPeer>> make_peers(const std::string& dnnl,
                                                   const std::string& python, bool on_gpu);

/// One entry of `peers`; time_us and ratio are null and `reason` says why where it has no time.
OrderedJson to_json(const PeerTime& peer, double own_us);

std::vector<std::string> peer_header();
std::vector<std::string> peer_row(const BenchPoint& point, const PeerTime& peer);

}  // namespace moekit::cli
