// The way back of pushed rows: results are written straight into slots of the token's owner, a slot
// for each of its slots or for each rank that serves it; the owner adds them in that order. Slot
// rows of ranks that share memory stay where they are: the owner is told where.
#pragma once

#include "prepare/owner_sum.h"
#include "prepare/pushed_layout.h"
#include "prepare/slot_homes.h"
#include "prepare/slot_rows.h"

namespace moekit::prepare {

/// Combine of one call. Lives on the stack.
class PushCombine {
 public:
  PushCombine(const FinalizeArgs& args, const PushedLayout& layout);

  /// Writes results and signals. Never waits.
  void send();
  /// Waits for the ranks that serve this rank's tokens and writes args.sum.
  void receive();

 private:
  template <typename T>
  T* at(const Region& region) const {
    return region.in<T>(args_.workspace);
  }
  comm::SymmetricHeap& heap() const { return *args_.heap; }
  bool sends_slots() const { return input_ == CombineInput::slot_rows; }
  /// Tells the trace what is about to be put.
  void note_moved() const;
  void tell_places() const;
  void return_row(int64_t row, float* scratch, bool addressable) const;
  void return_sum(int64_t row, int rank, int64_t offset, float* scratch) const;
  void return_values(const float* from, int rank, int64_t offset) const;
  void add_token(int64_t token) const;
  void add_lent(const OwnerSum& owner, int64_t token) const;

  const FinalizeArgs& args_;
  const Problem& problem_;
  const PushedLayout& layout_;
  const CombineInput input_;
  const SumStore store_;
  SlotHomes homes_;
  ep::PushRank protocol_;
};

}  // namespace moekit::prepare
