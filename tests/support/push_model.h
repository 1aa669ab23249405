// An explicit-state model of pushed rows: ranks driven by ep::PushRank over memory whose puts and
// signals land in every order that the heap's contract allows. explore() visits every reachable
// state and says what ranks have read in them, and whether a state was left in which nobody can go
// on.
//
// A call of a few ranks has far more orders than can be visited. Four reductions make them few;
// each can be switched off, and tests compare the verdicts.
//
// forget: states that differ in nothing that will be asked for are one (push_world.h). With it the
//   states of late calls equal those of early ones, and calls need no bound: `calls` = 0.
//
// eager: what commutes with everything else happens at once, alone. That are
//   - a signal's landing, once it may land. It disables nothing: waits ask for "at least", flags
//     grow, signals of one flag land in order. Nothing that can happen before it depends on it.
//   - what a rank does by itself: passing waits that are over, putting operations behind those that
//     are on their way, and, where a pair is watched, serving and adding up at other ranks, which
//     look at no memory then. Each is the rank's only next step and touches nothing that a step of
//     another rank touches but the tail of its own wires, of which the others take the head.
//   - the beginning of a call, with each of its choices, at the lowest idle rank.
//   So any run can be reordered, without a change of what is read, into one in which these come
//   first: they form persistent sets. Numbers of calls only grow (renumbering is a name for the
//   same state), so runs never come back to a state, and a chain of such steps ends, which the
//   checker verifies: no other step is put off for ever. What is left to order are landings of
//   puts, and the steps that read what they wrote.
//
// watched: only what one pair writes into each other's memory is modelled: headers and rows of
//   `client` at `server`, results of `server` at `client`. No value of a cell decides what a rank
//   does, but the header's "are there rows", and every run up to the first wrong read of any pair
//   is a run of the model in which this pair is watched: other headers are right until then, so the
//   rank is told what they ought to say. Hence a wrong read exists for some watched pair if and
//   only if one exists at all; who can go on is the same in all. A rank that would serve before
//   that is known waits: without it, it would read a wrong header, of another pair.
//
// folded counts: by the same argument a pair that is not watched matters only by whether it has
//   rows: choices that differ in nothing else are one.
#pragma once

#include <array>
#include <bitset>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "support/push_world.h"

namespace moekit::ep {

/// A rule taken away, to see that the checker misses it.
enum class Broken : uint8_t {
  nothing,
  credit,        ///< rows are put without waiting for their slots
  generations,   ///< one header and one row flag a source
  arrive,        ///< rows are read without waiting for their flags
  collect,       ///< results are read without waiting for their flags
  release,       ///< a signal lands before the puts that it should publish
  void_release,  ///< a call that was given up does not give slots back
  void_collect,  ///< ... and its results are waited for
  silence,       ///< a rank signals only the peers that it has sent rows
};

using Counts = std::array<int, kMaxRanks>;  ///< rows of one rank for each

struct Model {
  int ranks = 2;
  uint64_t calls = 3;      ///< 0: without end; needs `forget`
  uint64_t void_call = 0;  ///< all ranks give this call up; 0: none
  bool any_void = false;   ///< all ranks give up any call, or not
  Broken broken = Broken::nothing;
  /// What a rank may send in a call (from 1; with calls without end, the same in all).
  std::function<std::vector<Counts>(int rank, uint64_t call)> choices;
  size_t max_states = 20'000'000;

  bool forget = true;
  bool eager = true;
  int client = -1;  ///< the watched pair; -1: all pairs
  int server = -1;
};

/// What a rank reads of a peer.
enum class Read : uint8_t { header, row, result };
enum class Found : uint8_t { right, older, newer };

/// Everything that happens in some run.
class Facts {
 public:
  void add(Read read, int reader, int peer, Found found) {
    bits_.set(static_cast<size_t>(number(read, reader, peer, found)));
  }
  void add_deadlock() { bits_.set(kDeadlock); }
  void add(const Facts& other) { bits_ |= other.bits_; }
  bool operator==(const Facts& other) const { return bits_ == other.bits_; }

  bool has(Read read, int reader, int peer, Found found) const {
    return bits_.test(static_cast<size_t>(number(read, reader, peer, found)));
  }
  bool deadlock() const { return bits_.test(kDeadlock); }
  /// What should not happen, in words; empty: nothing of it does.
  std::vector<std::string> violations() const;

 private:
  static constexpr size_t kDeadlock = 3 * 3 * kMaxRanks * kMaxRanks;
  static int number(Read read, int reader, int peer, Found found) {
    return ((static_cast<int>(read) * 3 + static_cast<int>(found)) * kMaxRanks + reader) *
               kMaxRanks +
           peer;
  }
  std::bitset<kDeadlock + 1> bits_;
};

struct Verdict {
  size_t states = 0;
  size_t steps = 0;       ///< between states
  size_t bytes = 0;       ///< that the states took
  size_t ends = 0;        ///< states in which all calls are over
  bool complete = false;  ///< every reachable state was visited
  Facts facts;            ///< a run ends with the first wrong read
};

Verdict explore(const Model& model);

/// explore() with each pair watched in turn. States are added up.
Verdict explore_pairs(Model model);

}  // namespace moekit::ep
