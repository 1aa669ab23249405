#include "support/push_world.h"

#include <algorithm>
#include <stdexcept>

namespace moekit::ep {
namespace {

constexpr int kCallBits = 3;

constexpr int kHeaderBits = 5;

void transfer(test::StateBits& bits, RankModel& rank, int ranks) {
  bits.field(rank.state.call, kCallBits);
  bits.field(rank.state.phase, 4);
  bits.field(rank.state.peer, 2);
  bits.field(rank.state.void_call, 1);
  for (int p = 0; p < ranks; ++p) {
    bits.field(rank.peers[p].last_rows, kCallBits);
    bits.field(rank.peers[p].rows_out, 2);
  }
  bits.cells(rank.memory.flags, kCallBits);
  bits.cells(rank.memory.rows, kCallBits);
  bits.cells(rank.memory.returns, kCallBits);
  bits.cells(rank.memory.headers, kHeaderBits);
  bits.cells(rank.promised, kHeaderBits);
}

void transfer(test::StateBits& bits, Wire& wire) {
  bits.field(wire.size, 5);
  for (int i = 0; i < wire.size; ++i) {
    bits.field(wire.op[i].kind, 2);
    bits.field(wire.op[i].index, 4);
    bits.field(wire.op[i].value, kHeaderBits);
  }
}

/// The next call in which a rank will look at something that it looks at once a call, when `over`
/// says whether it has in this one.
uint64_t next_look(const PushState& state, bool over) { return over ? state.call + 1 : state.call; }

/// For headers as for cells, which have no rows.
void drop_before(uint8_t& cell, uint64_t call) {
  if (call_of(cell) < call) cell = 0;
}

void forget(RankModel& rank, int ranks) {
  const PushState& s = rank.state;
  const bool idle = s.phase == PushPhase::idle;
  const bool arrived = idle || s.phase > PushPhase::arrive;
  const bool served = idle || s.phase > PushPhase::serve;
  const bool collected = idle || s.phase > PushPhase::collect;
  if (idle) rank.state.void_call = 0;
  for (int p = 0; p < ranks; ++p) {
    PushPeer& peer = rank.peers[p];
    uint8_t& returns = rank.memory.flags[2 * ranks + p];
    if (idle) peer.rows_out = 0;
    if (returns >= peer.last_rows) peer.last_rows = 0;
    drop_before(returns, next_look(s, collected));
    for (int i = 0; i < kMaxRows; ++i) {
      drop_before(rank.memory.rows[p * kMaxRows + i], next_look(s, served));
      drop_before(rank.memory.returns[p * kMaxRows + i], next_look(s, idle));
    }
  }
  for (int f = 0; f < 2 * ranks; ++f) {
    drop_before(rank.memory.flags[f], next_look(s, arrived));
    drop_before(rank.memory.headers[f], next_look(s, served));
    drop_before(rank.promised[f], next_look(s, served));
  }
}

/// body(cell), for each cell with the number of a call in the state, but those of ranks.
template <typename Body>
void for_each_cell(World& world, int ranks, const Body& body) {
  const auto each = [&](auto& cells) {
    for (uint8_t& cell : cells) {
      if (cell != 0) body(cell);
    }
  };
  for (int r = 0; r < ranks; ++r) {
    RankModel& rank = world.rank[r];
    each(rank.memory.flags);
    each(rank.memory.rows);
    each(rank.memory.returns);
    each(rank.memory.headers);
    each(rank.promised);
  }
  for (Wire& wire : world.wire) {
    for (int i = 0; i < wire.size; ++i) body(wire.op[i].value);
  }
}

}  // namespace

void Wire::push(const Op& o) {
  if (size == kRoom) throw std::length_error("too much is on its way in the model");
  op[size++] = o;
}

void Wire::erase(int i) {
  std::copy(op.begin() + i + 1, op.begin() + size, op.begin() + i);
  --size;
}

void transfer(test::StateBits& bits, World& world, int ranks) {
  for (int r = 0; r < ranks; ++r) transfer(bits, world.rank[r], ranks);
  for (int w = 0; w < ranks * ranks; ++w) {
    if (w / ranks != w % ranks) transfer(bits, world.wire[w]);  // nothing travels to oneself
  }
  for (uint8_t& g : world.given_up) bits.field(g, 1);
}

void forget(World& world, int ranks) {
  uint64_t last = 0;
  for (int r = 0; r < ranks; ++r) last = std::max(last, world.rank[r].state.call);
  std::array<bool, 2> asked{};  // will a rank ask whether the call is given up?
  for (int r = 0; r < ranks; ++r) {
    const PushState& s = world.rank[r].state;
    if (s.phase != PushPhase::idle) asked[s.call % 2] = true;
    if (s.call < last) asked[(s.call + 1) % 2] = true;
    forget(world.rank[r], ranks);
  }
  for (int g = 0; g < 2; ++g) world.given_up[g] &= asked[g] ? 1 : 0;
}

void renumber(World& world, int ranks) {
  bool high = true;
  for (int r = 0; r < ranks; ++r) {
    high &= world.rank[r].state.call > 2;
    for (const PushPeer& peer : world.rank[r].peers) {
      high &= peer.last_rows == 0 || peer.last_rows > 2;
    }
  }
  if (!high) return;
  for_each_cell(world, ranks, [&](uint8_t cell) { high &= call_of(cell) > 2; });
  if (!high) return;
  for (int r = 0; r < ranks; ++r) {
    world.rank[r].state.call -= 2;
    for (PushPeer& peer : world.rank[r].peers) peer.last_rows -= peer.last_rows == 0 ? 0 : 2;
  }
  for_each_cell(world, ranks, [](uint8_t& cell) { cell = static_cast<uint8_t>(cell - 2); });
  renumber(world, ranks);
}

}  // namespace moekit::ep
