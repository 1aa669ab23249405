// The way out over several ranks: who gets which row, counts before rows, capacity, packing and
// unpacking. The members differ in Spread and RowsLayout only.
#pragma once

#include "prepare/distributed_layout.h"
#include "prepare/row_reader.h"
#include "prepare/slot_homes.h"

namespace moekit::prepare {

/// Dispatch of one call. Lives on the stack; what must outlive a step is in the workspace.
class Dispatch {
 public:
  Dispatch(const PrepareArgs& args, const DistributedLayout& layout, Spread spread,
           RowsLayout rows);

  /// Exchanges counts and starts the exchange of rows.
  void send();
  /// The same for rows that another rank has sent here to pass on: `rows` holds their records and
  /// weights, the layout's slot_rank and slot_expert say who serves them. args.routing counts them
  /// and has their weights, its ids are not read.
  void send_on(const ExpertRows& rows);
  /// Takes the rows and lays them out for the experts.
  ExpertRows receive();
  /// The rows as they came, ids as the sender wrote them (Spread::nodes: global).
  ExpertRows receive_messages();
  /// The token and the rank that sent it, of a row of receive_messages().
  RowSource source_of(int64_t row) const;

 private:
  template <typename T>
  T* at(const Region& region) const {
    return region.in<T>(args_.workspace);
  }
  template <typename T>
  std::span<T> list(const Region& region) const {
    return layout_.span_of<T>(region, args_.workspace, ranks_);
  }
  CountHeader& far_header(int rank) const;
  CountHeader& near_header(int rank) const;
  static int64_t* units_after(CountHeader& header) {
    return reinterpret_cast<int64_t*>(&header + 1);
  }
  void lay_out_counts();
  void count_rows();
  void exchange_counts();
  void check_headers() const;
  void check_rows() const;
  void settle_capacity();
  void answer_capacity();
  void check_capacity() const;
  void drop_beyond_capacity();
  void place_messages();
  void exchange();
  /// `path` reads the caller's rows; null: `given` are passed on.
  void write_messages(const RowPath* path, const ExpertRows& given) const;
  void write_meta(int64_t token, int rank, std::byte* message) const;
  /// Rows of the caller's tensor that peers can read need not be packed.
  bool lends_records(const RowPath* path) const;
  void begin_rows(const RowPath* path);
  void read_messages(std::span<const void* const> lent) const;
  void unpack_rows(const RowMessage& message) const;

  const PrepareArgs& args_;
  const Problem& problem_;
  const DistributedLayout& layout_;
  const Spread spread_;
  const RowsLayout rows_;
  const int ranks_;
  const int me_;
  int64_t tokens_ = 0;
  int64_t dropped_ = 0;
  RoutingFault fault_;
  int64_t format_ = -1;  // of this rank's rows
  CallState& state_;
  SlotHomes homes_;
};

/// Digest of what must be the same on all ranks of a plan. `kind` tells members apart.
int64_t shape_digest(const PrepareArgs& args, int64_t kind);

}  // namespace moekit::prepare
