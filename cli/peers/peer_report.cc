#include "peers/peer_report.h"

#include <fmt/format.h>

#include "peers/onednn_peer.h"
#include "peers/torch_peer.h"
#include "report.h"

namespace moekit::cli {

std::vector<std::shared_ptr<BenchPeer>> make_peers(const std::string& dnnl,
                                                   const std::string& python, bool on_gpu) {
  if (on_gpu) return {make_torch_peer(python)};
  return {make_onednn_peer(dnnl), make_torch_peer(python)};
}

OrderedJson to_json(const PeerTime& peer, double own_us) {
  const bool timed = peer.reason.empty();
  const auto number = [&](double value) { return timed ? OrderedJson(value) : OrderedJson(); };
  const auto text = [](const std::string& value) {
    return value.empty() ? OrderedJson() : OrderedJson(value);
  };
  return {{"name", peer.name},
          {"version", text(peer.identity.version)},
          {"dtype", text(peer.identity.dtype)},
          {"implementation", text(peer.identity.implementation)},
          {"time_us", number(peer.median_us)},
          {"p5_us", number(peer.p5_us)},
          {"p95_us", number(peer.p95_us)},
          {"repeat", peer.repeat},
          {"ratio", number(peer.median_us / own_us)},
          {"rel_rms", peer.rel_rms < 0 ? OrderedJson() : OrderedJson(peer.rel_rms)},
          {"reason", text(peer.reason)}};
}

std::vector<std::string> peer_header() {
  return {"tokens", "peer", "type", "median", "p5", "p95", "calls", "times ours", "rel rms", "how"};
}

std::vector<std::string> peer_row(const BenchPoint& point, const PeerTime& peer) {
  std::vector<std::string> row = {std::to_string(point.tokens), peer.name};
  if (!peer.reason.empty()) {
    row.insert(row.end(), 7, "-");
    row.push_back("not timed: " + peer.reason);
    return row;
  }
  row[1] += " " + peer.identity.version;
  row.insert(row.end(), {peer.identity.dtype, time_text(peer.median_us), time_text(peer.p5_us),
                         time_text(peer.p95_us), std::to_string(peer.repeat),
                         fmt::format("{:.2f}", peer.median_us / point.median_us),
                         fmt::format("{:.1e}", peer.rel_rms), peer.identity.implementation});
  return row;
}

}  // namespace moekit::cli
