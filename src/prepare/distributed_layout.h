// The workspace of a call over several ranks, laid out for the worst case, and the state that lives
// in it between the steps of a call.
#pragma once

#include <cstdint>
#include <span>

#include "comm/communicator.h"
#include "moekit/quant.h"
#include "prepare/batched_rows.h"
#include "prepare/prepare_finalize.h"
#include "prepare/routing_check.h"
#include "problem/workspace_layout.h"

namespace moekit::prepare {

/// Which rows a rank sends where.
enum class Spread : uint8_t {
  all_rows,     ///< every row to every rank
  needed_rows,  ///< a row once to every rank that has an expert for it
  nodes,        ///< a row once to a rank of every node that has an expert for it
};

/// A row in flight: [record | token int64 | ids int32 [top_k] | weights f32 [top_k] | pad to 16].
/// Ids are local to the receiver with Spread::needed_rows, else global; -1 is none.
struct RowMessage {
  int64_t token_offset = 0;
  int64_t ids_offset = 0;
  int64_t weights_offset = 0;
  int64_t bytes = 0;

  RowMessage(int64_t record_bytes, int64_t top_k);
};

/// What a rank tells every other before rows move, followed by one int64 a unit of the receiver:
/// rows that it will send there. A unit is what capacity bounds: the rank (standard rows) or each
/// of its local experts (batched rows).
struct CountHeader {
  RoutingFault fault;
  int64_t rows = 0;     ///< rows that it wants to send to the receiver
  int64_t format = -1;  ///< ActivationFormat of its rows, -1 without tokens
  int64_t shape = 0;    ///< digest of top_k, width, layout and capacity, equal on all ranks
  /// In the answer of a receiver whose capacity is bounded (its units then hold the rows that it
  /// takes): most rows that any of its units was offered.
  int64_t wanted = 0;
};
static_assert(sizeof(CountHeader) == 64);

struct DistributedLayout {
  WorkspaceLayout all;
  Region state;
  // One list of the exchange in flight: int64 [num_ranks] each.
  Region send_offset, send_bytes, recv_offset, recv_bytes;
  Region cursor;       // int64 [num_ranks]
  Region row_begin;    // int64 [num_ranks + 1], received rows by source
  Region far_counts;   // headers and units of every other rank, one after the other
  Region near_counts;  // headers and units of this rank, num_ranks times
  Region slot_rank;    // int32 [max_tokens, top_k]: rank that gets the row for a slot, -1 none
  Region slot_expert;  // LocalExpert that serves it there; none where the slot was dropped
  Region message_of;   // int64 [max_tokens, copies]: messages of a token, -1 ends
  Region scratch;
  Region send_rows, recv_rows;  // messages
  Region ids, weights;          // [max_rows, top_k] received
  Region delivered;             // records quantized at the destination
  BatchedLayout batched;
  Region return_begin;          // int64 [max_rows + 1]: rows that go back before a row's
  Region send_back, recv_back;  // rows on their way back
  Region back_source;           // int64 [max_tokens, top_k]: where a returned row lies
  // Rows that owners read where the experts left them: which output rows, by owner and there in the
  // order in which they would travel, and where each owner's begin.
  Region lent_rows;   // int64 [max_rows, top_k]
  Region lent_begin;  // int64 [num_ranks]

  int64_t max_rows = 0;       ///< received
  int64_t rows_per_unit = 0;  ///< capacity of a unit
  int64_t copies = 0;         ///< messages a token has at most
  int64_t back_bytes = 0;     ///< one returned row

  DistributedLayout() = default;
  DistributedLayout(const Problem& problem, const RowFormat& wire, QuantDuty quant_duty,
                    Spread spread, RowsLayout rows);

  template <typename T>
  static std::span<T> span_of(const Region& region, std::byte* base, int64_t count) {
    return {region.in<T>(base), static_cast<size_t>(count)};
  }
};

/// What receivers read of a rank that lends them its rows: messages by receiver, whose records are
/// rows of the caller's tensor where it could be read in place.
struct LentMessages {
  const std::byte* messages = nullptr;
  const int64_t* offset = nullptr;     ///< bytes, by receiver
  const std::byte* records = nullptr;  ///< null: in the messages
  int64_t record_stride = 0;
};

/// What the owners of tokens read of a rank that lends them its results.
struct LentResults {
  const float* data = nullptr;
  int64_t width = 0;
  const int64_t* rows = nullptr;
  const int64_t* begin = nullptr;
};

/// Mutable state of one call, at the start of the workspace. It keeps the layout: finalize knows
/// neither the wire format nor who quantized.
struct CallState {
  DistributedLayout layout;
  comm::Ticket ticket;
  int64_t num_rows = 0;        ///< received
  RowFormat format;            ///< of the rows in flight
  LentMessages lent_messages;  ///< read by peers while rows are in flight
  LentResults lent;            ///< and while results are
};

inline CallState& state_of(std::byte* workspace) {
  return *reinterpret_cast<CallState*>(workspace);
}

/// Units of `rank`: 1 for standard rows, else its local experts.
int64_t units_of(const Problem& problem, RowsLayout rows, int rank);
/// Largest number of rows that a unit can receive.
int64_t max_unit_rows(const Problem& problem);
/// Payload bytes of one full call, as PrepareFinalize::wire_bytes says.
int64_t wire_bytes_of(const Problem& problem, const RowFormat& wire, Spread spread);
/// What any member over ranks asks for.
Support supports_ranks(const Problem& problem);
/// Ranks that own an expert.
int64_t ranks_with_experts(const Problem& problem);

}  // namespace moekit::prepare
