#include "peers/torch_peer.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <vector>

#include "moekit/error.h"
#include "moekit/tools.h"
#include "peers/child_process.h"
#include "peers/expert_rows.h"
#include "peers/torch_experts.h"

namespace moekit::cli {
namespace {

using nlohmann::json;
using namespace std::chrono_literals;

// Importing torch from a cold disk; weights of tens of GB; a turn of calls that take many seconds.
constexpr auto kStartDeadline = 120s, kDeadline = 600s;

[[noreturn]] void refuse(const std::string& reason) { throw Error(ErrorCode::unsupported, reason); }

json activation_of(const ActivationSpec& spec) {
  json activation = {{"kind", activation_name(spec)},
                     {"gated", spec.gated},
                     {"limit", nullptr},
                     {"alpha", spec.alpha},
                     {"beta", spec.beta}};
  if (std::isfinite(spec.limit)) activation["limit"] = spec.limit;
  return activation;
}

class TorchPeer final : public BenchPeer {
 public:
  explicit TorchPeer(std::string python) : python_(std::move(python)) {}

  std::string name() const override { return "torch"; }
  void open(const PeerLayer& layer) override;
  void add_expert(int64_t expert, const PeerExpert& weights) override;
  void set_copies(int count) override;
  void set_calls(std::span<const PeerCall> calls) override;
  void run(std::span<float> output) override;
  std::vector<double> time(std::span<const PeerTurn> turns) override;
  std::vector<double> time_graph(std::span<const PeerTurn> turns, int untimed, int timed) override;
  double dense_tflops(bool fp8) override;
  PeerIdentity identity() const override { return {version_, dtype(), implementation_}; }

 private:
  json start(const std::string& python);
  void write_matrix(std::span<const float> values, int64_t at);
  void send_weights();
  json ask(json question) { return child_->ask(question, kDeadline); }
  bool on_gpu() const { return layer_.device.type == DeviceType::cuda; }
  const char* dtype() const { return type_ == RowType::bf16 ? "bf16" : "f32"; }
  int64_t gate_up_bytes() const { return columns_ * width_ * bytes_of(type_); }
  int64_t down_bytes() const { return width_ * inter_ * bytes_of(type_); }
  int64_t weights_bytes() const { return experts_ * (gate_up_bytes() + down_bytes()); }

  std::string python_;
  PeerLayer layer_;
  RowType type_ = RowType::bf16;
  int64_t experts_ = 0, width_ = 0, inter_ = 0, columns_ = 0;
  std::string version_, implementation_;
  SharedFile weights_, rows_;
  std::unique_ptr<ChildProcess> child_;
  std::vector<uint16_t> rounded_;
  bool sent_ = false;
  int copies_ = 1;
  int64_t output_at_ = 0;
};

json TorchPeer::start(const std::string& python) {
  child_ = std::make_unique<ChildProcess>(std::vector<std::string>{python, "-c", kTorchExperts},
                                          std::vector<const SharedFile*>{&weights_, &rows_});
  json question = {{"do", "start"}, {"threads", layer_.num_threads}, {"gpu", nullptr}};
  if (on_gpu()) question["gpu"] = layer_.device.index;
  return child_->ask(question, kStartDeadline);
}

void TorchPeer::open(const PeerLayer& layer) {
  layer_ = layer;
  const MoeConfig& c = layer.config;
  experts_ = c.num_experts;
  width_ = c.routed_width();
  inter_ = c.inter;
  columns_ = (c.activation.gated ? 2 : 1) * inter_;
  std::vector<std::string> candidates = {python_};
  if (python_.empty()) candidates = {"python3", ".venv/bin/python"};
  std::string refusals;
  json answer;
  for (const std::string& python : candidates) {
    try {
      answer = start(python);
      break;
    } catch (const Error& e) {
      child_.reset();
      refusals += fmt::format("{}{}: {}", refusals.empty() ? "" : "; ", python, e.what());
    }
  }
  if (child_ == nullptr) {
    refuse(fmt::format("no Python with torch{} ({}); name one with --peer-python or MOEKIT_PYTHON",
                       on_gpu() ? " and a GPU" : "", refusals));
  }
  version_ = answer.at("torch").get<std::string>();
  // Without instructions for it, torch's bf16 products are slower than those of f32.
  const bool bf16 = layer.dtype == DType::bf16 && answer.at("bf16").get<bool>();
  type_ = bf16 ? RowType::bf16 : RowType::f32;
  layer_.reserve(2 * weights_bytes());
  weights_.resize(weights_bytes() + experts_ * (columns_ + width_) * 4);
}

void TorchPeer::write_matrix(std::span<const float> values, int64_t at) {
  if (type_ == RowType::f32) {
    weights_.write(values.data(), static_cast<int64_t>(values.size_bytes()), at);
    return;
  }
  rounded_.resize(values.size());
  std::transform(values.begin(), values.end(), rounded_.begin(), bf16_of);
  weights_.write(rounded_.data(), static_cast<int64_t>(values.size()) * 2, at);
}

/// [E, columns, width], [E, width, inter], then f32 biases [E, columns] and [E, width] where the
/// layer has them.
void TorchPeer::add_expert(int64_t expert, const PeerExpert& weights) {
  const MoeConfig& c = layer_.config;
  const int64_t gate_bytes = static_cast<int64_t>(weights.gate.size()) * bytes_of(type_);
  write_matrix(weights.gate, expert * gate_up_bytes());
  write_matrix(weights.up, expert * gate_up_bytes() + gate_bytes);
  write_matrix(weights.down, experts_ * gate_up_bytes() + expert * down_bytes());
  int64_t at = weights_bytes();
  if (c.has_gate_up_bias) {
    const int64_t mine = at + expert * columns_ * 4;
    const auto gate = static_cast<int64_t>(weights.gate_bias.size_bytes());
    weights_.write(weights.gate_bias.data(), gate, mine);
    weights_.write(weights.up_bias.data(), static_cast<int64_t>(weights.up_bias.size_bytes()),
                   mine + gate);
    at += experts_ * columns_ * 4;
  }
  if (c.has_down_bias) {
    weights_.write(weights.down_bias.data(), static_cast<int64_t>(weights.down_bias.size_bytes()),
                   at + expert * width_ * 4);
  }
}

void TorchPeer::send_weights() {
  const MoeConfig& c = layer_.config;
  implementation_ = ask({{"do", "weights"},
                         {"experts", experts_},
                         {"width", width_},
                         {"columns", columns_},
                         {"inter", inter_},
                         {"dtype", dtype()},
                         {"biases", {c.has_gate_up_bias, c.has_down_bias}},
                         {"activation", activation_of(c.activation)}})
                        .at("implementation")
                        .get<std::string>();
  weights_.resize(0);  // the child has its copy
  sent_ = true;
}

void TorchPeer::set_copies(int count) {
  if (!sent_) send_weights();
  if (count <= copies_) return;
  // On a GPU its own allocator says what does not fit.
  if (!on_gpu()) layer_.reserve((count - copies_) * weights_bytes());
  ask({{"do", "set_copies"}, {"count", count}});
  copies_ = count;
}

void TorchPeer::set_calls(std::span<const PeerCall> calls) {
  const TensorView& hidden = calls.front().hidden;
  const int64_t tokens = hidden.shape[0], top_k = calls.front().topk_ids.shape[1];
  const int64_t hidden_bytes = tokens * width_ * 2, slots = tokens * top_k;
  output_at_ = hidden_bytes + static_cast<int64_t>(calls.size()) * slots * 8;
  rows_.resize(output_at_ + tokens * width_ * 4);
  rows_.write(hidden.data, hidden_bytes, 0);
  int64_t at = hidden_bytes;
  for (const PeerCall& call : calls) {
    rows_.write(call.topk_ids.data, slots * 4, at);
    rows_.write(call.topk_weights.data, slots * 4, at + slots * 4);
    at += slots * 8;
  }
  ask({{"do", "calls"}, {"tokens", tokens}, {"top_k", top_k}, {"count", calls.size()}});
}

void TorchPeer::run(std::span<float> output) {
  ask({{"do", "run"}});
  rows_.read(output.data(), static_cast<int64_t>(output.size_bytes()), output_at_);
}

std::vector<double> TorchPeer::time(std::span<const PeerTurn> turns) {
  json list = json::array();
  for (const PeerTurn& turn : turns) list.push_back({turn.copy, turn.call});
  return ask({{"do", "time"}, {"turns", list}}).at("times").get<std::vector<double>>();
}

std::vector<double> TorchPeer::time_graph(std::span<const PeerTurn> turns, int untimed, int timed) {
  if (!on_gpu()) return {};
  json list = json::array();
  for (const PeerTurn& turn : turns) list.push_back({turn.copy, turn.call});
  return ask({{"do", "graph"}, {"turns", list}, {"untimed", untimed}, {"timed", timed}})
      .at("times")
      .get<std::vector<double>>();
}

double TorchPeer::dense_tflops(bool fp8) {
  if (!on_gpu()) return 0;
  return ask({{"do", "dense"}, {"fp8", fp8}}).at("tflops").get<double>();
}

}  // namespace

std::shared_ptr<BenchPeer> make_torch_peer(const std::string& python) {
  return std::make_shared<TorchPeer>(python);
}

}  // namespace moekit::cli
