#include "engine/tensor_parallel.h"

#include <algorithm>
#include <span>

#include "problem/rank_map.h"
#include "problem/tensor_slice.h"

namespace moekit::engine {

std::shared_ptr<const CanonicalLayer> rank_layer(std::shared_ptr<const CanonicalLayer> layer,
                                                 const PlanOptions& options) {
  if (options.tp == 1) return layer;
  const comm::Communicator* comm = options.comm.impl.get();
  const RankMap map = RankMap::of(comm != nullptr ? comm->size() : 1, options.tp);
  const int tp = map.coords_of(comm->rank()).tp;
  ActivationScheme down = layer->config.down_input;
  if (options.activations && *options.activations != down.format) {
    down = ActivationScheme{.format = *options.activations};
  }
  const TensorSlice slice = tensor_slice(*layer, down, map.tp_size, tp);
  return std::make_shared<CanonicalLayer>(slice_layer(*layer, slice, tp));
}

TensorParallel::TensorParallel(std::shared_ptr<comm::Communicator> world, int tp_size)
    : rows_(std::move(world)) {
  if (tp_size == 1) return;
  const RankMap map = RankMap::of(rows_->size(), tp_size);
  const int rank = rows_->rank();
  slices_ = rows_->split(map.tp_color(rank), rank, {"plan: tensor-parallel groups", 0});
  rows_ = rows_->split(map.ep_color(rank), rank, {"plan: expert-parallel groups", 0});
}

void TensorParallel::abort(std::string_view reason) const noexcept {
  if (rows_->size() > 1) rows_->abort(reason);
  if (on()) slices_->abort(reason);
}

SliceRegions lay_out_slices(WorkspaceLayout& workspace, int tp_size, int64_t max_tokens,
                            int64_t width) {
  if (tp_size == 1) return {};
  SliceRegions regions;
  regions.parts = workspace.add(checked_mul(tp_size * max_tokens, width, "parts of all slices"), 4);
  regions.lists = workspace.add(8 * int64_t{tp_size}, sizeof(int64_t));
  return regions;
}

void TensorParallel::sum(const Part& part, const SliceRegions& regions, std::byte* workspace,
                         ThreadPool& threads) const {
  const auto size = static_cast<size_t>(slices_->size());
  const auto me = static_cast<size_t>(slices_->rank());
  const int64_t bytes = part.tokens * part.width * int64_t{sizeof(float)};
  const int64_t shared_bytes = part.tokens * part.hidden * int64_t{sizeof(float)};
  auto* parts = regions.parts.in<float>(workspace);
  auto* next = regions.lists.in<int64_t>(workspace);
  std::fill_n(next, 8 * size, 0);
  const auto list = [&] {
    const std::span<int64_t> mine(next, size);
    next += size;
    return mine;
  };
  const auto send_at = list(), send = list(), receive_at = list(), receive = list();
  for (size_t r = 0; r < size; ++r) {
    send[r] = receive[r] = r == me ? 0 : bytes;
    receive_at[r] = static_cast<int64_t>(r) * bytes;
  }
  const comm::Ticket rows =
      slices_->begin_all_to_all_v({part.routed, send_at, send, parts, receive_at, receive},
                                  {"tensor-parallel sum", part.call, part.layer});
  if (part.shared != nullptr) {
    const auto from = list(), out = list(), to = list(), in = list();
    if (me == 0) std::fill(out.begin() + 1, out.end(), shared_bytes);
    if (me != 0) in[0] = shared_bytes;
    slices_->all_to_all_v({part.shared, from, out, part.shared, to, in},
                          {"tensor-parallel shared rows", part.call, part.layer});
  }
  slices_->finish(rows);
  const int64_t stride = part.tokens * part.width;
  auto add = [&](int64_t t, int) {
    float* row = part.routed + t * part.width;
    const float* first = parts + t * part.width;
    for (int64_t i = 0; i < part.width; ++i) {
      float total = me == 0 ? row[i] : first[i];
      for (size_t r = 1; r < size; ++r) {
        total += r == me ? row[i] : first[static_cast<int64_t>(r) * stride + i];
      }
      row[i] = total;
    }
  };
  threads.parallel_for(part.tokens, add);
}

}  // namespace moekit::engine
