#include "support/push_model.h"

#include <algorithm>
#include <stdexcept>

#include "fmt/format.h"

namespace moekit::ep {
namespace {

class Explorer {
 public:
  explicit Explorer(const Model& model) : m_(model), watching_(model.client >= 0) {
    if (m_.calls > kLastCall || (m_.calls == 0 && !m_.forget))
      throw std::invalid_argument("a model of so many calls has no end");
    for (int r = 0; r < m_.ranks; ++r) {
      for (uint64_t call = 1; call <= last_call(); ++call) list_choices(r, call);
    }
  }

  Verdict run() {
    arrive_at(World());
    for (size_t i = 0; i < states_.size() && states_.size() < m_.max_states; ++i) {
      World world;
      test::StateBits bits(states_[i]);
      transfer(bits, world, m_.ranks);
      expand(world);
    }
    verdict_.states = states_.size();
    verdict_.bytes = states_.bytes();
    verdict_.complete = states_.size() < m_.max_states && !cut_;
    return verdict_;
  }

 private:
  uint64_t last_call() const { return m_.calls == 0 ? kLastCall : m_.calls; }

  void list_choices(int r, uint64_t call) {
    std::vector<Counts>& all = choices_[r][call];
    all = m_.choices(r, call);
    for (Counts& rows : all) {
      for (int p = 0; p < m_.ranks; ++p) {
        if (!watches(r, p)) rows[p] = std::min(rows[p], 1);
      }
    }
    std::sort(all.begin(), all.end());
    all.erase(std::unique(all.begin(), all.end()), all.end());
  }

  // What the model looks at.

  /// Rows of `client` at `server` and results on their way back.
  bool watches(int client, int server) const {
    return !watching_ || (client == m_.client && server == m_.server);
  }
  /// Serving at `r`, or adding up, looks at memory that puts on their way may still change.
  bool reads_memory(int r, PushPhase phase) const {
    return !watching_ || r == (phase == PushPhase::serve ? m_.server : m_.client);
  }
  bool may_begin(const PushState& state) const {
    return state.phase == PushPhase::idle && state.call < last_call();
  }
  /// Serving or adding up is next, and everything is known that it needs.
  bool may_read(const World& world, int r) const {
    const PushState& s = world.rank[r].state;
    if (s.phase == PushPhase::add_up) return true;
    if (s.phase != PushPhase::serve) return false;
    for (int p = 0; p < m_.ranks; ++p) {
      if (!watches(p, r) && call_of(promise(world, r, p)) != s.call) return false;
    }
    return true;
  }
  Header promise(const World& world, int r, int p) const {
    const RankModel& rank = world.rank[r];
    return rank.promised[header_slot(m_.ranks, p, rank.state.call)];
  }

  // States.

  /// A step has led here: goes on as far as nothing else can interfere, and keeps the state.
  void arrive_at(World&& world) {
    ++verdict_.steps;
    if (wrong_) {
      wrong_ = false;
      return;
    }
    if (m_.eager) settle(world);
    if (m_.forget) forget(world, m_.ranks);
    if (m_.calls == 0) renumber(world, m_.ranks);
    test::StateBits bits;
    transfer(bits, world, m_.ranks);
    states_.insert(bits);
  }

  /// All successors of one state.
  void expand(const World& world) {
    bool moved = false, over = true;
    for (int r = 0; r < m_.ranks; ++r) {
      const PushState& s = world.rank[r].state;
      over &= s.phase == PushPhase::idle && s.call == m_.calls && m_.calls > 0;
      cut_ |= m_.calls == 0 && s.phase == PushPhase::idle && !may_begin(s);
      if (!may_begin(s) || (m_.eager && moved)) continue;
      begin_each(world, r);
      moved = true;
    }
    if (m_.eager && moved) return;
    for (int r = 0; r < m_.ranks; ++r) {
      if (!may_read(world, r)) continue;
      World next = world;
      read(next, r);
      arrive_at(std::move(next));
      moved = true;
    }
    for (int from = 0; from < m_.ranks; ++from) {
      for (int to = 0; to < m_.ranks; ++to) moved |= land_each(world, from, to);
    }
    verdict_.ends += over ? 1 : 0;
    if (!moved && !over && !cut_) verdict_.facts.add_deadlock();
  }

  /// Everything that commutes with all else, see the header.
  void settle(World& world) {
    for (int steps = 0; settle_once(world); ++steps) {
      if (steps == 1000) throw std::logic_error("ranks go on for ever by themselves");
    }
  }

  bool settle_once(World& world) {
    bool moved = false;
    for (int from = 0; from < m_.ranks; ++from) {
      for (int to = 0; to < m_.ranks; ++to) {
        const Wire& wire = world.wire[from * m_.ranks + to];
        for (int i = 0; i < wire.size; ++i) {
          if (wire.op[i].kind != OpKind::signal || !may_land(wire, i)) continue;
          take(world, from, to, i--);
          moved = true;
        }
      }
    }
    for (int r = 0; r < m_.ranks; ++r) {
      if (reads_memory(r, world.rank[r].state.phase) || !may_read(world, r)) continue;
      read(world, r);
      moved = true;
    }
    return moved;
  }

  // Steps of ranks.

  PushRank protocol(World& world, int r) const {
    return {r, m_.ranks, &world.rank[r].state, world.rank[r].peers.data()};
  }

  void begin_each(const World& world, int r) {
    const uint64_t call = world.rank[r].state.call + 1;
    bool first = m_.any_void;  // whoever begins a call first decides whether it is given up
    for (int p = 0; p < m_.ranks; ++p) first &= world.rank[p].state.call < call;
    for (const Counts& rows : choices_[r][call]) {
      for (int given_up = 0; given_up < (first ? 2 : 1); ++given_up) {
        World next = world;
        if (first) next.given_up[call % 2] = static_cast<uint8_t>(given_up);
        PushRank rank = protocol(next, r);
        for (int p = 0; p < m_.ranks; ++p) {
          rank.peer(p).rows_out = rows[p];
          rank.peer(p).rows_in = 0;
        }
        rank.begin();
        go_on(next, r);
        arrive_at(std::move(next));
      }
    }
  }

  /// Does what needs no peer and shows to none: writes that land later, signals likewise, waits
  /// that are over.
  void go_on(World& world, int r) {
    PushRank rank = protocol(world, r);
    for (;;) {
      const PushStep step = rank.next();
      if (step.kind == PushStep::Kind::act) {
        if (rank.phase() != PushPhase::write_rows) return;
        write_rows(world, r);
      } else if (step.kind == PushStep::Kind::signal) {
        if (!swallows(world, rank, step.peer)) send(world, r, step.peer, signal_op(step));
      } else if (!passes(rank) && world.rank[r].memory.flags[flag(step.flag)] < step.value) {
        return;
      }
      rank.advance();
    }
  }

  bool given_up(const World& world, uint64_t call) const {
    return call == m_.void_call || (m_.any_void && world.given_up[call % 2] != 0);
  }
  bool passes(const PushRank& rank) const {
    return (m_.broken == Broken::credit && rank.phase() == PushPhase::credit) ||
           (m_.broken == Broken::arrive && rank.phase() == PushPhase::arrive) ||
           (m_.broken == Broken::collect && rank.phase() == PushPhase::collect);
  }
  bool swallows(const World& world, const PushRank& rank, int peer) const {
    return (m_.broken == Broken::void_release && given_up(world, rank.call()) &&
            rank.phase() == PushPhase::publish_returns) ||
           (m_.broken == Broken::silence && rank.phase() == PushPhase::publish_rows &&
            rank.peer(peer).rows_out == 0);
  }
  int flag(int64_t f) const {
    const bool of_rows = f < 2 * m_.ranks;
    return static_cast<int>(m_.broken == Broken::generations && of_rows ? f % m_.ranks : f);
  }
  int header(int source, uint64_t call) const {
    return m_.broken == Broken::generations ? source
                                            : static_cast<int>(header_slot(m_.ranks, source, call));
  }
  Op signal_op(const PushStep& step) const {
    return {OpKind::signal, static_cast<uint8_t>(flag(step.flag)),
            static_cast<uint8_t>(step.value)};
  }

  void write_rows(World& world, int r) {
    PushRank rank = protocol(world, r);
    const auto call = static_cast<uint8_t>(rank.call());
    for (int p = 0; p < m_.ranks; ++p) {
      const auto rows = static_cast<int>(rank.peer(p).rows_out);
      if (!watches(r, p)) {
        world.rank[p].promised[header_slot(m_.ranks, r, call)] = header_of(call, rows);
        continue;
      }
      for (int i = 0; i < rows; ++i) {
        send(world, r, p, {OpKind::rows, static_cast<uint8_t>(r * kMaxRows + i), call});
      }
      send(world, r, p,
           {OpKind::header, static_cast<uint8_t>(header(r, call)), header_of(call, rows)});
    }
  }

  /// Serves or adds up.
  void read(World& world, int r) {
    world.rank[r].state.phase == PushPhase::serve ? serve(world, r) : add_up(world, r);
    if (!wrong_) go_on(world, r);
  }

  void serve(World& world, int r) {
    PushRank rank = protocol(world, r);
    const Memory& mine = world.rank[r].memory;
    const uint64_t call = rank.call();
    for (int p = 0; p < m_.ranks; ++p) {
      if (!watches(p, r)) {
        rank.peer(p).rows_in = rows_of(promise(world, r, p));
        continue;
      }
      const Header h = mine.headers[header(p, call)];
      rank.peer(p).rows_in = found(Read::header, r, p, call_of(h), call) ? rows_of(h) : 0;
      for (int i = 0; i < rank.peer(p).rows_in; ++i) {
        found(Read::row, r, p, mine.rows[p * kMaxRows + i], call);
      }
    }
    const bool nothing_back = given_up(world, call);
    if (nothing_back && m_.broken != Broken::void_collect) return rank.give_up();
    for (int p = 0; p < m_.ranks && !nothing_back; ++p) {
      for (int i = 0; i < rank.peer(p).rows_in && watches(p, r); ++i) {
        send(world, r, p,
             {OpKind::returns, static_cast<uint8_t>(r * kMaxRows + i), static_cast<uint8_t>(call)});
      }
    }
    rank.advance();
  }

  void add_up(World& world, int r) {
    PushRank rank = protocol(world, r);
    const Memory& mine = world.rank[r].memory;
    for (int p = 0; p < m_.ranks; ++p) {
      for (int i = 0; i < rank.peer(p).rows_out && watches(r, p); ++i) {
        found(Read::result, r, p, mine.returns[p * kMaxRows + i], rank.call());
      }
    }
    rank.advance();
  }

  /// Notes what a rank has read; whether it is of the call.
  bool found(Read what, int reader, int peer, uint64_t seen, uint64_t call) {
    const Found f = seen == call ? Found::right : seen < call ? Found::older : Found::newer;
    verdict_.facts.add(what, reader, peer, f);
    wrong_ |= f != Found::right;
    return f == Found::right;
  }

  // Operations between ranks.

  void send(World& world, int from, int to, const Op& op) const {
    if (from == to) return land(world.rank[to].memory, op);
    world.wire[from * m_.ranks + to].push(op);
  }

  /// A successor for each operation between two ranks that may land now.
  bool land_each(const World& world, int from, int to) {
    const Wire& wire = world.wire[from * m_.ranks + to];
    bool moved = false;
    for (int i = 0; i < wire.size; ++i) {
      if (!may_land(wire, i)) continue;
      World next = world;
      take(next, from, to, i);
      arrive_at(std::move(next));
      moved = true;
    }
    return moved;
  }

  /// Puts land in any order; a signal after the puts before it, and after those of its flag.
  bool may_land(const Wire& wire, int i) const {
    const Op& op = wire.op[i];
    if (op.kind != OpKind::signal) return true;
    for (int e = 0; e < i; ++e) {
      const bool is_signal = wire.op[e].kind == OpKind::signal;
      if (is_signal ? wire.op[e].index == op.index : m_.broken != Broken::release) return false;
    }
    return true;
  }

  void take(World& world, int from, int to, int i) {
    Wire& wire = world.wire[from * m_.ranks + to];
    land(world.rank[to].memory, wire.op[i]);
    wire.erase(i);
    go_on(world, to);
  }

  static void land(Memory& memory, const Op& op) {
    switch (op.kind) {
      case OpKind::rows: memory.rows[op.index] = op.value; return;
      case OpKind::header: memory.headers[op.index] = op.value; return;
      case OpKind::returns: memory.returns[op.index] = op.value; return;
      case OpKind::signal: memory.flags[op.index] = op.value; return;
    }
  }

  const Model& m_;
  const bool watching_;
  std::array<std::array<std::vector<Counts>, kLastCall + 1>, kMaxRanks> choices_;
  Verdict verdict_;
  bool wrong_ = false;  // something wrong was read in the step at hand
  bool cut_ = false;    // a rank could not begin a call for want of numbers
  test::StateSet states_;
};

}  // namespace

std::vector<std::string> Facts::violations() const {
  constexpr const char* kReads[] = {"header", "row", "result"};
  std::vector<std::string> all;
  for (const Read read : {Read::header, Read::row, Read::result}) {
    for (const Found f : {Found::older, Found::newer}) {
      for (int reader = 0; reader < kMaxRanks; ++reader) {
        for (int peer = 0; peer < kMaxRanks; ++peer) {
          if (!has(read, reader, peer, f)) continue;
          all.push_back(fmt::format("rank {} reads a {} of rank {} of {} call", reader,
                                    kReads[static_cast<int>(read)], peer,
                                    f == Found::older ? "an older" : "a later"));
        }
      }
    }
  }
  if (deadlock()) all.push_back("deadlock");
  return all;
}

Verdict explore(const Model& model) { return Explorer(model).run(); }

Verdict explore_pairs(Model model) {
  Verdict all;
  all.complete = true;
  for (model.client = 0; model.client < model.ranks; ++model.client) {
    for (model.server = 0; model.server < model.ranks; ++model.server) {
      const Verdict v = explore(model);
      all.states += v.states;
      all.steps += v.steps;
      all.bytes = std::max(all.bytes, v.bytes);
      all.ends += v.ends;
      all.complete &= v.complete;
      all.facts.add(v.facts);
    }
  }
  return all;
}

}  // namespace moekit::ep
