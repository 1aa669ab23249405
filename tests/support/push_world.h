// One state of the model of pushed rows: what ranks remember, what lies in their memory and what is
// on its way between them; how it is packed, and what of it can be forgotten.
#pragma once

#include <array>
#include <cstdint>

#include "kernels/common/ep_protocol.h"
#include "support/state_set.h"

namespace moekit::ep {

inline constexpr int kMaxRanks = 3;
inline constexpr int kMaxRows = 3;
inline constexpr uint64_t kLastCall = 7;  ///< the highest number of a call that a state can hold

enum class OpKind : uint8_t { rows, header, returns, signal };

/// On its way from one rank to another.
struct Op {
  OpKind kind;
  uint8_t index;  // slot, header slot or flag
  uint8_t value;  // what is written: a header, or the call
};

/// In the order in which the sender issued them.
struct Wire {
  static constexpr int kRoom = 24;
  uint8_t size = 0;
  std::array<Op, kRoom> op;  // up to size

  void push(const Op& o);
  void erase(int i);
};

/// The number of the call that wrote it, and the number of rows.
using Header = uint8_t;
constexpr Header header_of(uint64_t call, int rows) {
  return static_cast<Header>(call | static_cast<uint64_t>(rows) << 3);
}
constexpr uint64_t call_of(Header header) { return header & 7; }
constexpr int rows_of(Header header) { return header >> 3; }

/// What peers write into. Every other cell holds the number of the call that wrote it.
struct Memory {
  std::array<uint8_t, 3 * kMaxRanks> flags{};
  std::array<Header, 2 * kMaxRanks> headers{};
  std::array<uint8_t, kMaxRanks * kMaxRows> rows{};     // by source
  std::array<uint8_t, kMaxRanks * kMaxRows> returns{};  // by server
};

struct RankModel {
  PushState state;
  std::array<PushPeer, kMaxRanks> peers{};
  Memory memory;
  /// What peers mean to say in their headers, by call % 2 and peer: where the model does not look
  /// at a peer's memory, the rank learns it from here.
  std::array<Header, 2 * kMaxRanks> promised{};
};

struct World {
  std::array<RankModel, kMaxRanks> rank{};
  std::array<Wire, kMaxRanks * kMaxRanks> wire;  // [from, to]
  std::array<uint8_t, 2> given_up{};             // by call % 2: all ranks give the call up
};

/// Writes or reads a state.
void transfer(test::StateBits& bits, World& world, int ranks);

/// Makes states equal from which the same can happen. A cell whose value is older than any that
/// will be asked for will only be found too old, whatever the value; what a rank remembers of a
/// call that is over, and a credit that has come, is not asked for again. Exact: no behaviour and
/// no verdict changes.
void forget(World& world, int ranks);

/// Renumbers calls by two less where no number is too small for it: a state of any later call
/// becomes the state of an early one. Exact, since calls are only compared and taken modulo two.
void renumber(World& world, int ranks);

}  // namespace moekit::ep
