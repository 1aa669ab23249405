#include "peers/onednn_peer.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <map>
#include <new>
#include <vector>

#include "peers/expert_rows.h"
#include "peers/onednn_library.h"
#include "peers/refuse.h"

namespace moekit::cli {
namespace {

using onednn::Descriptor;
using onednn::Handle;
using onednn::Library;
using onednn::Matmul;

// Elements from which a loop beside the products is worth a team of threads.
constexpr int64_t kTeamElements = 16384;

/// Aligned memory without values.
class Block {
 public:
  Block() = default;
  explicit Block(int64_t bytes)
      : data_(static_cast<std::byte*>(
            ::operator new(static_cast<size_t>(std::max<int64_t>(bytes, 64)), kAlign))) {}
  std::byte* get() const { return data_.get(); }

 private:
  static constexpr std::align_val_t kAlign{64};
  struct Free {
    void operator()(std::byte* p) const { ::operator delete(p, kAlign); }
  };
  std::unique_ptr<std::byte, Free> data_;
};

/// Weights of one expert in one copy.
struct Packed {
  Block gate_up, down;
  Handle gate_up_memory, down_memory;
};

/// Biases are read by all copies.
struct Biases {
  std::vector<float> gate_up, down;
  Handle gate_up_memory, down_memory;
};

/// Products for a number of rows, with the memory objects whose addresses change from call to call.
struct Shape {
  Matmul gate_up, down;
  Handle x, sums, h, y;
};

class OneDnnPeer final : public BenchPeer {
 public:
  explicit OneDnnPeer(std::string path) : path_(std::move(path)) {}

  std::string name() const override { return "onednn"; }
  void open(const PeerLayer& layer) override;
  void add_expert(int64_t expert, const PeerExpert& weights) override;
  void set_copies(int count) override;
  void set_calls(std::span<const PeerCall> calls) override;
  void run(std::span<float> output) override;
  std::vector<double> time(std::span<const PeerTurn> turns) override;
  PeerIdentity identity() const override;

 private:
  bool choose_layouts(onednn::Type type);
  Packed pack(const std::byte* gate_up, const std::byte* down) const;
  Shape make_shape(int64_t rows) const;
  void call(const PeerTurn& turn);
  void sort_slots(const PeerCall& call);
  void run_expert(const Packed& weights, const Biases& biases, int64_t first, int64_t rows);
  template <typename Body>
  void split(int64_t count, int64_t elements, Body&& body) const;

  std::string path_;
  std::unique_ptr<Library> library_;
  PeerLayer layer_;
  onednn::Type type_ = onednn::Type::bf16;
  RowType rows_ = RowType::bf16;
  int64_t width_ = 0, inter_ = 0, columns_ = 0;  ///< columns of the first product
  std::string implementation_;
  // Descriptors: as weights come, as the library wants them (in any_), biases.
  Descriptor plain_gate_up_, plain_down_, gate_up_bias_, down_bias_;
  Matmul any_gate_up_, any_down_;
  std::vector<std::vector<Packed>> copies_;  ///< [copy][expert]
  std::vector<Biases> biases_;
  std::vector<std::byte> staged_;
  std::map<int64_t, Shape> shapes_;
  std::vector<PeerCall> calls_;
  // Of one call.
  std::vector<int64_t> offsets_;
  std::vector<int32_t> tokens_, positions_;
  Block x_, sums_, h_, y_;
  std::vector<float> output_;
};

void OneDnnPeer::open(const PeerLayer& layer) {
  layer_ = layer;
  const MoeConfig& c = layer.config;
  width_ = c.routed_width();
  inter_ = c.inter;
  columns_ = (c.activation.gated ? 2 : 1) * inter_;
  library_ = std::make_unique<Library>(path_, layer.num_threads);
  const bool wants_bf16 = layer.dtype == DType::bf16;
  if (!(wants_bf16 && choose_layouts(onednn::Type::bf16)) && !choose_layouts(onednn::Type::f32)) {
    refuse(
        fmt::format("oneDNN {} has only its reference matmul for this CPU", library_->version()));
  }
  const int64_t bytes =
      library_->bytes_of(any_gate_up_.weights) + library_->bytes_of(any_down_.weights);
  layer_.reserve(bytes * c.num_experts);
  copies_.emplace_back();
}

/// Asks for the layouts in which weights of `type` are read fastest; false where no kernel is made
/// for them.
bool OneDnnPeer::choose_layouts(onednn::Type type) {
  const Library& lib = *library_;
  const auto rows = std::max<int64_t>(1, static_cast<int64_t>(layer_.rows_per_expert));
  const auto f32 = onednn::Type::f32;
  gate_up_bias_ = lib.matrix(1, columns_, f32, columns_, 1);
  down_bias_ = lib.matrix(1, width_, f32, width_, 1);
  const MoeConfig& c = layer_.config;
  const auto fits = [&](int64_t in, int64_t out, const void* bias, Matmul& matmul) {
    return lib.make_matmul(lib.matrix(rows, in, type, in, 1).get(),
                           lib.any_layout(in, out, type).get(), bias,
                           lib.matrix(rows, out, type, out, 1).get(), matmul) &&
           !matmul.implementation.starts_with("ref");
  };
  if (!fits(width_, columns_, c.has_gate_up_bias ? gate_up_bias_.get() : nullptr, any_gate_up_) ||
      !fits(inter_, width_, c.has_down_bias ? down_bias_.get() : nullptr, any_down_)) {
    return false;
  }
  type_ = type;
  rows_ = type == onednn::Type::bf16 ? RowType::bf16 : RowType::f32;
  implementation_ = any_gate_up_.implementation;
  // Checkpoints hold [outputs, inputs]: the products' weights, transposed.
  plain_gate_up_ = lib.matrix(width_, columns_, type, 1, width_);
  plain_down_ = lib.matrix(inter_, width_, type, 1, inter_);
  return true;
}

Packed OneDnnPeer::pack(const std::byte* gate_up, const std::byte* down) const {
  const Library& lib = *library_;
  Packed packed;
  const auto fill = [&](const Descriptor& plain, const std::byte* from, const void* wanted,
                        Block& block, Handle& memory) {
    block = Block(lib.bytes_of(wanted));
    memory = lib.memory(wanted, block.get());
    const Handle source = lib.memory(plain.get(), const_cast<std::byte*>(from));
    lib.reorder(plain.get(), source.get(), wanted, memory.get());
  };
  fill(plain_gate_up_, gate_up, any_gate_up_.weights, packed.gate_up, packed.gate_up_memory);
  fill(plain_down_, down, any_down_.weights, packed.down, packed.down_memory);
  return packed;
}

void OneDnnPeer::add_expert(int64_t, const PeerExpert& weights) {
  const int64_t unit = bytes_of(rows_);
  staged_.resize(static_cast<size_t>((columns_ + inter_) * width_ * unit));
  std::byte* to = staged_.data();
  for (const std::span<const float> matrix : {weights.gate, weights.up, weights.down}) {
    if (rows_ == RowType::f32) {
      if (!matrix.empty()) std::memcpy(to, matrix.data(), matrix.size_bytes());
    } else {
      std::transform(matrix.begin(), matrix.end(), reinterpret_cast<uint16_t*>(to), bf16_of);
    }
    to += static_cast<int64_t>(matrix.size()) * unit;
  }
  copies_.front().push_back(pack(staged_.data(), staged_.data() + columns_ * width_ * unit));
  Biases& biases = biases_.emplace_back();
  biases.gate_up.assign(weights.gate_bias.begin(), weights.gate_bias.end());
  biases.gate_up.insert(biases.gate_up.end(), weights.up_bias.begin(), weights.up_bias.end());
  biases.down.assign(weights.down_bias.begin(), weights.down_bias.end());
  if (layer_.config.has_gate_up_bias)
    biases.gate_up_memory = library_->memory(gate_up_bias_.get(), biases.gate_up.data());
  if (layer_.config.has_down_bias)
    biases.down_memory = library_->memory(down_bias_.get(), biases.down.data());
}

void OneDnnPeer::set_copies(int count) {
  const Library& lib = *library_;
  const int64_t gate_up_bytes = lib.bytes_of(any_gate_up_.weights);
  const int64_t down_bytes = lib.bytes_of(any_down_.weights);
  while (static_cast<int>(copies_.size()) < count) {
    const std::vector<Packed>& first = copies_.front();
    layer_.reserve((gate_up_bytes + down_bytes) * static_cast<int64_t>(first.size()));
    std::vector<Packed> copy;
    for (const Packed& from : first) {
      Packed& to = copy.emplace_back();
      to.gate_up = Block(gate_up_bytes);
      to.down = Block(down_bytes);
      std::memcpy(to.gate_up.get(), from.gate_up.get(), static_cast<size_t>(gate_up_bytes));
      std::memcpy(to.down.get(), from.down.get(), static_cast<size_t>(down_bytes));
      to.gate_up_memory = lib.memory(any_gate_up_.weights, to.gate_up.get());
      to.down_memory = lib.memory(any_down_.weights, to.down.get());
    }
    copies_.push_back(std::move(copy));
  }
}

/// Other numbers of rows than the one that chose the layouts take these layouts.
Shape OneDnnPeer::make_shape(int64_t rows) const {
  const Library& lib = *library_;
  const MoeConfig& c = layer_.config;
  Shape shape;
  const Descriptor x = lib.matrix(rows, width_, type_, width_, 1);
  const Descriptor sums = lib.matrix(rows, columns_, type_, columns_, 1);
  const Descriptor h = lib.matrix(rows, inter_, type_, inter_, 1);
  const bool made =
      lib.make_matmul(x.get(), any_gate_up_.weights,
                      c.has_gate_up_bias ? gate_up_bias_.get() : nullptr, sums.get(),
                      shape.gate_up) &&
      lib.make_matmul(h.get(), any_down_.weights, c.has_down_bias ? down_bias_.get() : nullptr,
                      x.get(), shape.down);
  if (!made || shape.gate_up.implementation.starts_with("ref") ||
      shape.down.implementation.starts_with("ref")) {
    refuse(fmt::format("oneDNN {} has only its reference matmul for {} rows of its weights' layout",
                       library_->version(), rows));
  }
  shape.x = lib.memory(x.get(), nullptr);
  shape.sums = lib.memory(sums.get(), nullptr);
  shape.h = lib.memory(h.get(), nullptr);
  shape.y = lib.memory(x.get(), nullptr);
  return shape;
}

void OneDnnPeer::set_calls(std::span<const PeerCall> calls) {
  calls_.assign(calls.begin(), calls.end());
  int64_t most_slots = 0, num_tokens = 0;
  for (const PeerCall& call : calls_) {
    sort_slots(call);
    num_tokens = call.hidden.shape[0];
    most_slots = std::max(most_slots, offsets_.back());
    for (size_t e = 0; e + 1 < offsets_.size(); ++e) {
      const int64_t rows = offsets_[e + 1] - offsets_[e];
      if (rows > 0 && !shapes_.contains(rows)) shapes_.emplace(rows, make_shape(rows));
    }
  }
  const int64_t unit = bytes_of(rows_);
  x_ = Block(most_slots * width_ * unit);
  sums_ = Block(most_slots * columns_ * unit);
  h_ = Block(most_slots * inter_ * unit);
  y_ = Block(most_slots * width_ * unit);
  output_.assign(static_cast<size_t>(num_tokens * width_), 0.0f);
}

/// Slots by expert: where each one's row lies, and which token it is.
void OneDnnPeer::sort_slots(const PeerCall& call) {
  const auto* ids = static_cast<const int32_t*>(call.topk_ids.data);
  const int64_t top_k = call.topk_ids.shape[1];
  const int64_t slots = call.topk_ids.shape[0] * top_k;
  offsets_.assign(static_cast<size_t>(layer_.config.num_experts) + 1, 0);
  for (int64_t i = 0; i < slots; ++i) {
    if (ids[i] >= 0) ++offsets_[static_cast<size_t>(ids[i]) + 1];
  }
  for (size_t e = 1; e < offsets_.size(); ++e) offsets_[e] += offsets_[e - 1];
  std::vector<int64_t> next(offsets_.begin(), offsets_.end() - 1);
  tokens_.resize(static_cast<size_t>(offsets_.back()));
  positions_.resize(static_cast<size_t>(slots));
  for (int64_t i = 0; i < slots; ++i) {
    positions_[static_cast<size_t>(i)] = -1;
    if (ids[i] < 0) continue;
    const int64_t at = next[static_cast<size_t>(ids[i])]++;
    positions_[static_cast<size_t>(i)] = static_cast<int32_t>(at);
    tokens_[static_cast<size_t>(at)] = static_cast<int32_t>(i / top_k);
  }
}

/// body(first, last) over [0, count), on all threads where `elements` are many.
template <typename Body>
void OneDnnPeer::split(int64_t count, int64_t elements, Body&& body) const {
  if (elements < kTeamElements || count < layer_.num_threads) return body(0, count);
  library_->on_threads([&](int thread, int num_threads) {
    body(count * thread / num_threads, count * (thread + 1) / num_threads);
  });
}

void OneDnnPeer::run_expert(const Packed& weights, const Biases& biases, int64_t first,
                            int64_t rows) {
  const Library& lib = *library_;
  const int64_t unit = bytes_of(rows_);
  const Shape& shape = shapes_.at(rows);
  std::byte* sums = sums_.get() + first * columns_ * unit;
  std::byte* h = h_.get() + first * inter_ * unit;
  lib.set_data(shape.x.get(), x_.get() + first * width_ * unit);
  lib.set_data(shape.sums.get(), sums);
  lib.set_data(shape.h.get(), h);
  lib.set_data(shape.y.get(), y_.get() + first * width_ * unit);
  const auto multiply = [&](const Matmul& matmul, const Handle& in, const Handle& matrix,
                            const Handle& bias, const Handle& out) {
    if (bias) {
      lib.execute(matmul, {{onednn::kSource, in.get()},
                           {onednn::kWeights, matrix.get()},
                           {onednn::kBias, bias.get()},
                           {onednn::kDestination, out.get()}});
    } else {
      lib.execute(matmul, {{onednn::kSource, in.get()},
                           {onednn::kWeights, matrix.get()},
                           {onednn::kDestination, out.get()}});
    }
  };
  multiply(shape.gate_up, shape.x, weights.gate_up_memory, biases.gate_up_memory, shape.sums);
  split(rows, rows * columns_, [&](int64_t from, int64_t to) {
    activate_rows(layer_.config.activation, sums + from * columns_ * unit, to - from, inter_, rows_,
                  h + from * inter_ * unit);
  });
  multiply(shape.down, shape.h, weights.down_memory, biases.down_memory, shape.y);
}

void OneDnnPeer::call(const PeerTurn& turn) {
  const PeerCall& call = calls_[static_cast<size_t>(turn.call)];
  sort_slots(call);
  const int64_t slots = offsets_.back();
  split(slots, slots * width_, [&](int64_t from, int64_t to) {
    gather_rows(static_cast<const uint16_t*>(call.hidden.data), tokens_.data(), from, to, width_,
                rows_, x_.get());
  });
  const std::vector<Packed>& weights = copies_[static_cast<size_t>(turn.copy)];
  for (size_t e = 0; e + 1 < offsets_.size(); ++e) {
    const int64_t rows = offsets_[e + 1] - offsets_[e];
    if (rows > 0) run_expert(weights[e], biases_[e], offsets_[e], rows);
  }
  const int64_t num_tokens = call.hidden.shape[0];
  split(num_tokens, slots * width_, [&](int64_t from, int64_t to) {
    combine_rows(y_.get(), positions_.data(), static_cast<const float*>(call.topk_weights.data),
                 call.topk_ids.shape[1], from, to, width_, rows_, output_.data());
  });
}

void OneDnnPeer::run(std::span<float> output) {
  call({0, 0});
  std::copy(output_.begin(), output_.end(), output.begin());
}

std::vector<double> OneDnnPeer::time(std::span<const PeerTurn> turns) {
  using Clock = std::chrono::steady_clock;
  std::vector<double> times;
  for (const PeerTurn& turn : turns) {
    const auto start = Clock::now();
    call(turn);
    times.push_back(std::chrono::duration<double, std::micro>(Clock::now() - start).count());
  }
  return times;
}

PeerIdentity OneDnnPeer::identity() const {
  return {library_ ? library_->version() : "", type_ == onednn::Type::bf16 ? "bf16" : "f32",
          "matmul per expert, " + implementation_};
}

}  // namespace

std::shared_ptr<BenchPeer> make_onednn_peer(const std::string& library) {
  return std::make_shared<OneDnnPeer>(library);
}

}  // namespace moekit::cli
