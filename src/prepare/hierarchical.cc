// All-to-all in two levels: a row travels once to every node that serves it, and there once to each
// rank; results go back the same way. Traffic between nodes shrinks by what the ranks of a node
// share, for one more hop. Each level is an exchange like all2all's: on the first the relays of the
// nodes stand for the ranks behind them, on the second a relay passes on what it got.
#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "comm/traffic.h"
#include "prepare/combine.h"
#include "prepare/dispatch.h"
#include "prepare/members.h"
#include "prepare/node_relays.h"
#include "prepare/parallel_rows.h"
#include "prepare/replica_turn.h"

namespace moekit::prepare {
namespace {

/// The two levels' parts of the workspace, one after the other.
struct Levels {
  DistributedLayout between;  // nodes: this rank's tokens out, rows to pass on in
  DistributedLayout within;   // a node: those rows out, rows to serve in
  int64_t second = 0;         // where the second level's part begins

  Levels(const Problem& problem, const RowFormat& wire, QuantDuty quant_duty) {
    // Rows that a level can bring are fewer than max_tokens of every rank.
    Problem first = problem, next = problem;
    const int64_t relayed =
        checked_mul(max_relayed_sources(problem), problem.max_tokens, "relayed rows");
    first.capacity = {CapacityPolicy::drop, relayed};
    next.max_tokens = relayed;
    next.capacity = {CapacityPolicy::drop, problem.num_ranks * problem.max_tokens};
    between = DistributedLayout(first, wire, quant_duty, Spread::nodes, RowsLayout::standard);
    within = DistributedLayout(next, wire, quant_duty, Spread::needed_rows, RowsLayout::standard);
    second = between.all.total();
  }
};

/// The second level's view of a call: the rows that this rank passes on are its tokens.
template <typename Args>
Args relay_args(const Args& args, const DistributedLayout& between) {
  Args relay = args;
  relay.routing = {state_of(args.workspace).num_rows, args.routing.top_k, nullptr,
                   between.weights.in<float>(args.workspace)};
  relay.workspace = args.workspace + between.all.total();
  return relay;
}

class Hierarchical final : public PrepareFinalize {
 public:
  std::string_view name() const override { return "hierarchical"; }

  Traits traits(const Problem& problem) const override {
    Traits t;
    t.rows = RowsLayout::standard;
    t.max_rows = t.max_sum_rows = problem.num_ranks * problem.max_tokens;
    t.moves_rows = true;
    t.takes_partial_sums = true;
    return t;
  }

  Support supports(const Problem& problem) const override {
    Support s = supports_ranks(problem);
    s.require(problem.capacity.policy == CapacityPolicy::exact, ReasonCode::capacity,
              "rows pass through a relay before the ranks that serve them count theirs: takes the "
              "exact worst case only; all2all bounds capacity");
    return s;
  }

  int64_t workspace_bytes(const Problem& problem, const RowFormat& wire,
                          QuantDuty quant_duty) const override {
    const Levels levels(problem, wire, quant_duty);
    return levels.second + levels.within.all.total();
  }

  int64_t wire_bytes(const Problem& problem, const RowFormat& wire) const override {
    const int64_t top_k = problem.config.top_k;
    const int64_t others = problem.nodes.num_nodes() - 1;
    const int64_t row = RowMessage(wire.record_bytes, top_k).bytes;
    const int64_t back = problem.config.routed_width() * (bits_of(problem.combine_dtype) / 8);
    const int64_t servers =
        std::min({top_k, int64_t{problem.num_ranks} - 1, ranks_with_experts(problem)});
    const int64_t returns = problem.combine == Combine::slots ? top_k : servers;
    // What crosses between nodes, beside what a rank passes on inside its own.
    const int64_t crossing = std::min(top_k, others) * row + (others > 0 ? returns * back : 0);
    return checked_mul(problem.max_tokens, crossing, "bytes between nodes") +
           wire_bytes_of(problem, wire, Spread::needed_rows);
  }

  void prepare_send(const PrepareArgs& args) const override {
    const Levels levels(*args.problem, args.wire, args.quant_duty);
    Dispatch first(args, levels.between, Spread::nodes, RowsLayout::standard);
    first.send();
    const ExpertRows rows = first.receive_messages();
    find_servers(args, levels, first, rows);
    PrepareArgs relay = relay_args(args, levels.between);
    relay.dropped = nullptr;
    Dispatch(relay, levels.within, Spread::needed_rows, RowsLayout::standard).send_on(rows);
  }

  bool prepare_ready(const PrepareArgs& args) const override {
    return args.comm->ready(second_state(args.workspace).ticket);
  }

  ExpertRows prepare_receive(const PrepareArgs& args) const override {
    PrepareArgs relay = args;
    relay.workspace += state_of(args.workspace).layout.all.total();
    return Dispatch(relay, state_of(relay.workspace).layout, Spread::needed_rows,
                    RowsLayout::standard)
        .receive();
  }

  void finalize_send(const FinalizeArgs& args) const override {
    const FinalizeArgs relay = relay_args(args, state_of(args.workspace).layout);
    CombineCall(relay, state_of(relay.workspace).layout, true).send();
  }

  bool finalize_ready(const FinalizeArgs& args) const override {
    return args.comm->ready(second_state(args.workspace).ticket);
  }

  void finalize_receive(const FinalizeArgs& args) const override;

 private:
  static const CallState& second_state(std::byte* workspace) {
    return state_of(workspace + state_of(workspace).layout.all.total());
  }

  /// Which rank of this node and which of its experts serve each slot of the rows to pass on.
  void find_servers(const PrepareArgs& args, const Levels& levels, const Dispatch& first,
                    const ExpertRows& rows) const {
    const Problem& problem = *args.problem;
    std::byte* second = args.workspace + levels.second;
    SlotHomes homes(rows.top_k, levels.within.slot_rank.in<int32_t>(second),
                    levels.within.slot_expert.in<LocalExpert>(second));
    for (int64_t n = 0; n < rows.num_rows; ++n) {
      const RowSource source = first.source_of(n);
      const int64_t turn =
          replica_turn(problem, source.rank, source.token, rows.weights + n * rows.top_k);
      for (int64_t j = 0; j < rows.top_k; ++j) {
        const int32_t id = index_of(rows.ids[n * rows.top_k + j]);
        homes.set(n, j, -1, LocalExpert::none);
        if (id < 0) continue;
        const ExpertHome home = problem.placement->home(id, turn);
        homes.set(n, j, home.rank, LocalExpert{home.slot});
      }
    }
  }
};

/// Results on the first level: from the relays of a row back to its owner.
class RelayReturn {
 public:
  RelayReturn(const FinalizeArgs& args, const DistributedLayout& between,
              const DistributedLayout& within)
      : args_(args),
        problem_(*args.problem),
        between_(between),
        within_(within),
        ranks_(problem_.num_ranks),
        slots_(problem_.combine == Combine::slots) {}

  void run() {
    pack();
    place();
    const comm::Exchange exchange{between_.send_back.in<std::byte>(args_.workspace),
                                  list(between_.send_offset),
                                  list(between_.send_bytes),
                                  between_.recv_back.in<std::byte>(args_.workspace),
                                  list(between_.recv_offset),
                                  list(between_.recv_bytes)};
    comm::note_traffic(exchange.send_bytes, problem_.rank, between_.back_bytes);
    args_.comm->all_to_all_v(exchange, args_.site("combine relayed rows"));
  }

 private:
  std::span<int64_t> list(const Region& region) const {
    return DistributedLayout::span_of<int64_t>(region, args_.workspace, ranks_);
  }

  /// What this rank got back for the rows that it passed on, by owner, in the order of the rows.
  void pack() {
    const int64_t top_k = args_.routing.top_k, bytes = between_.back_bytes;
    std::byte* second = args_.workspace + between_.all.total();
    const auto* source = within_.back_source.in<int64_t>(second);
    const auto* from = within_.recv_back.in<std::byte>(second);
    auto* to = between_.send_back.in<std::byte>(args_.workspace);
    const auto* row_begin = between_.row_begin.in<int64_t>(args_.workspace);
    const auto send_offset = list(between_.send_offset), send_bytes = list(between_.send_bytes);
    int64_t next = 0;
    for (int r = 0; r < ranks_; ++r) {
      send_offset[r] = next * bytes;
      for (int64_t i = row_begin[r] * top_k; i < row_begin[r + 1] * top_k; ++i) {
        if (source[i] < 0) continue;
        std::memcpy(to + next++ * bytes, from + source[i] * bytes, static_cast<size_t>(bytes));
      }
      send_bytes[r] = next * bytes - send_offset[r];
    }
  }

  /// Where results for this rank's tokens will lie: by relay; a relay returns tokens in order, and
  /// of a token its slots in order, or its servers' sums in rank order.
  void place() {
    const auto recv_offset = list(between_.recv_offset), recv_bytes = list(between_.recv_bytes);
    const auto cursor = list(between_.cursor);
    std::fill(recv_bytes.begin(), recv_bytes.end(), 0);
    each_return([&](int relay, int64_t) { recv_bytes[relay] += between_.back_bytes; });
    comm::exclusive_offsets(recv_bytes, recv_offset);
    for (int r = 0; r < ranks_; ++r) cursor[r] = recv_offset[r] / between_.back_bytes;
    auto* source = between_.back_source.in<int64_t>(args_.workspace);
    std::fill_n(source, args_.routing.num_tokens * args_.routing.top_k, -1);
    each_return([&](int relay, int64_t place) { source[place] = cursor[relay]++; });
  }

  /// take(relay, place) for every row that comes back, token by token; place is in [T, top_k].
  template <typename Take>
  void each_return(Take take) const {
    const int64_t top_k = args_.routing.top_k;
    for (int64_t t = 0; t < args_.routing.num_tokens; ++t) {
      if (slots_) {
        for (int64_t j = 0; j < top_k; ++j) {
          const int server = server_of(t, j);
          if (server >= 0) take(relay_of(problem_, problem_.rank, server), t * top_k + j);
        }
        continue;
      }
      int64_t count = 0;
      for (int last = -1;; ++count) {  // servers in rank order
        int lowest = ranks_;
        for (int64_t j = 0; j < top_k; ++j) {
          const int server = server_of(t, j);
          if (server > last) lowest = std::min(lowest, server);
        }
        if (lowest == ranks_) break;
        take(relay_of(problem_, problem_.rank, lowest), t * top_k + count);
        last = lowest;
      }
    }
  }

  int server_of(int64_t token, int64_t slot) const {
    const GlobalExpert id = args_.routing.ids[token * args_.routing.top_k + slot];
    if (!names_expert(problem_, id)) return -1;
    const float* weights = args_.routing.weights + token * args_.routing.top_k;
    const int64_t turn = replica_turn(problem_, problem_.rank, token, weights);
    return problem_.placement->home(index_of(id), turn).rank;
  }

  const FinalizeArgs& args_;
  const Problem& problem_;
  const DistributedLayout& between_;
  const DistributedLayout& within_;
  const int ranks_;
  const bool slots_;
};

void Hierarchical::finalize_receive(const FinalizeArgs& args) const {
  const DistributedLayout& between = state_of(args.workspace).layout;
  const FinalizeArgs relay = relay_args(args, between);
  const DistributedLayout& within = state_of(relay.workspace).layout;
  CombineCall(relay, within, true).receive_rows();
  RelayReturn(args, between, within).run();
  CombineCall(args, between, true).add_up();
}

}  // namespace

const PrepareFinalize& hierarchical_member() {
  static const Hierarchical member;
  return member;
}

}  // namespace moekit::prepare
