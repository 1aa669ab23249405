// A rank that goes wrong: an end of a group that forwards every operation, save the one at which
// its script says what happens. Built with MOEKIT_FAULTS only; the library knows nothing of it.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "faults/shared_page.h"

namespace moekit::faults {

enum class Kind {
  none,        ///< only counts operations
  leaves,      ///< its end of the group goes away, whatever is in flight
  dies,        ///< its process is killed; threads can only leave
  stalls,      ///< until every other rank has noticed
  late,        ///< well within the deadline
  sends_more,  ///< states and sends more bytes to its next peer than that one was told
  sends_less,
  expects_more,  ///< expects more bytes of its next peer than that one sends
  expects_less,
  promises_more,  ///< announces a row more to its next peer than it sends
  promises_less,
  promises_absurd,  ///< announces more rows than any rank may have
  flag_behind,      ///< signals the value of an earlier call
  flag_ahead,       ///< signals the value of a later call
};

/// The operation is counted from 1 inside a step of a call of the layer (0 dispatch, 1 experts, 2
/// combine); kFirstThatFits is the first to which the kind can happen.
inline constexpr int kFirstThatFits = 0;
struct Fault {
  Kind kind = Kind::none;
  int rank = 1;
  int64_t call = 1;
  int step = 0;
  int operation = 1;
};

/// What a rank that leaves throws; nothing but the test catches it.
struct Left {};

/// Shared by the ends of one group. Processes have copies of one page: made by fork(), or of the
/// same file.
class Script {
 public:
  Script(const Fault& fault, int num_ranks, const std::string& file = "");

  std::shared_ptr<comm::Communicator> wrap(std::shared_ptr<comm::Communicator> end);
  /// The rank comes to a step.
  void enter(int rank, int64_t call, int step);
  /// Whether the fault still lies ahead of a rank that comes to this step.
  bool ahead(int64_t call, int step) const;
  bool fired() const { return page_->fired.load(); }
  /// Operations of the faulty rank in its step, by name.
  std::vector<std::string> operations() const;

  // For the ends.
  const Fault& fault() const { return fault_; }
  /// Counts an operation of `rank`; whether the fault is due at it. `fits` says whether the fault's
  /// kind can happen to such an operation.
  bool due(int rank, const char* operation, bool fits);
  /// An operation of `rank` threw.
  void noticed(int rank);
  void wait_until_noticed() const;

 private:
  static constexpr int kMaxOperations = 64;
  struct Position {
    int64_t call = -1;
    int step = 0;
    int operation = 0;
    bool noticed = false;
  };
  struct Page {
    std::atomic<bool> fired;
    std::atomic<int> num_noticed;
    int num_operations;  // this and the names: of the faulty rank, read when it is over
    char operations[kMaxOperations][64];
  };
  const Fault fault_;
  std::vector<Position> positions_;  // each touched by its rank only
  Shared<Page> page_;
};

}  // namespace moekit::faults
