// The way out of pushed rows: a row is written once into each rank that has an expert for it, with
// a header a rank; then flags.
#pragma once

#include "prepare/pushed_layout.h"
#include "prepare/row_reader.h"
#include "prepare/slot_homes.h"

namespace moekit::prepare {

/// Dispatch of one call. Lives on the stack; what must outlive a step is in workspace and heap.
class PushDispatch {
 public:
  PushDispatch(const PrepareArgs& args, const PushedLayout& layout, RowsLayout rows);

  /// Writes rows and headers and signals. Waits only where a peer has not yet given slots back,
  /// after a faulty call.
  void send();
  /// Waits for every peer's flag and lists the rows where they lie. Throws, on all ranks alike,
  /// the faults that headers report.
  ExpertRows receive();

 private:
  template <typename T>
  T* at(const Region& region) const {
    return region.in<T>(args_.workspace);
  }
  comm::SymmetricHeap& heap() const { return *args_.heap; }
  const PushHeader& header_of(int source) const;

  void check_ends() const;
  void limit_rows();
  void limit_unit(int64_t token, int64_t slot, int64_t& rows);
  void place_messages();
  /// Tells the trace what is about to be put.
  void note_moved() const;
  void write_rows(const RowPath& path) const;
  void write_row(const RowPath& path, int64_t token, float* scratch, bool addressable) const;
  void write_meta(int64_t token, int rank, std::byte* message) const;
  int32_t place_of(int64_t token, int rank) const;
  void write_headers();

  void check_headers() const;
  void list_rows();
  void unpack_rows() const;

  const PrepareArgs& args_;
  const Problem& problem_;
  const PushedLayout& layout_;
  const RowsLayout rows_;
  const int ranks_;
  const int me_;
  PushedCall& call_;
  SlotHomes homes_;
  ep::PushRank protocol_;
  int64_t tokens_ = 0;
  int64_t dropped_ = 0;
  PushHeader header_;
};

/// Where the message of row `row` begins in this rank's part.
const std::byte* pushed_message(const PushedLayout& layout, std::byte* workspace,
                                const comm::SymmetricHeap& heap, int64_t row);
/// The row's source and what its message says of the token.
struct PushedRow {
  int32_t source = 0;
  PushOrigin origin;
};
PushedRow pushed_row(const PushedLayout& layout, std::byte* workspace,
                     const comm::SymmetricHeap& heap, int64_t row);

}  // namespace moekit::prepare
