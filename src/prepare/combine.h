// The way back over several ranks: rows, or sums of a rank's rows, go to the token's owner, which
// adds them in slot order or in rank order. The same for all members: what comes back depends on
// who serves which slot only, not on how rows went out. Where ranks can read each other's memory
// nothing goes: the owner adds the rows where the experts left them.
#pragma once

#include "prepare/distributed_layout.h"
#include "prepare/slot_rows.h"

namespace moekit::prepare {

/// Combine of one call. Lives on the stack; what must outlive a step is in the workspace.
class CombineCall {
 public:
  /// `moves_rows`: also between ranks that could read each other's memory; receive_rows() needs it.
  CombineCall(const FinalizeArgs& args, const DistributedLayout& layout, bool moves_rows = false);

  /// Starts the exchange of rows.
  void send();
  /// Takes them and writes args.sum.
  void receive();
  /// Takes them and leaves them in the layout's recv_back, where back_source says.
  void receive_rows();
  /// Adds what back_source names in recv_back into args.sum.
  void add_up();

 private:
  template <typename T>
  T* at(const Region& region) const {
    return region.in<T>(args_.workspace);
  }
  template <typename T>
  std::span<T> list(const Region& region) const {
    return layout_.span_of<T>(region, args_.workspace, ranks_);
  }
  bool sends_slots() const { return input_ == CombineInput::slot_rows; }
  void begin(const std::byte* rows, const void* lent);
  void count_returns();
  void list_lent();
  void place_lent();
  void add_up_lent(std::span<const void* const> lent) const;
  const std::byte* pack_returns();
  void pack_row(int64_t row, int64_t task, std::byte* to) const;
  void count_arrivals();
  void place_slots();
  void place_sums();

  const FinalizeArgs& args_;
  const Problem& problem_;
  const DistributedLayout& layout_;
  const CombineInput input_;
  const int ranks_;
  const bool lends_;
  CallState& state_;
};

}  // namespace moekit::prepare
