// What a call of pushed rows needs: the part of the symmetric heap that peers write into, alike on
// all ranks, and the workspace that only this rank sees.
//
// Heap part: state of the protocol (this rank's own) | headers [kGenerations, num_ranks] | row
// slots [num_ranks, slots] of messages, by source | return slots, by this rank's tokens, or, where
// all ranks can read each other's parts, where peers have the results for these tokens | the
// results that this rank has for its peers.
#pragma once

#include <cstdint>
#include <span>

#include "kernels/common/ep_protocol.h"
#include "moekit/quant.h"
#include "prepare/batched_rows.h"
#include "prepare/distributed_layout.h"
#include "prepare/prepare_finalize.h"
#include "prepare/routing_check.h"
#include "problem/workspace_layout.h"

namespace moekit::prepare {

/// What travels beside the rows of one source.
struct alignas(128) PushHeader {
  RoutingFault fault;
  int64_t rows = 0;     ///< that it has put into the receiver's slots
  int64_t call = 0;     ///< its call number
  int64_t format = -1;  ///< ActivationFormat of its rows, -1 without tokens
  int64_t shape = 0;    ///< digest of what must be the same on all ranks
  /// CapacityPolicy::refuse: the most rows that it has for one unit, and that unit's rank.
  int64_t wanted = 0;
  int64_t wanted_by = 0;
};

/// Which token a message carries, and where its result goes: in place of RowMessage's token.
struct PushOrigin {
  int32_t token = 0;
  int32_t place = 0;  ///< rank_sums: this server's place among the token's, in rank order
};
static_assert(sizeof(PushOrigin) == 8);

struct PushedLayout {
  WorkspaceLayout heap;
  Region protocol;  // ep::PushState
  Region peers;     // ep::PushPeer [num_ranks]
  Region headers;   // PushHeader [kGenerations, num_ranks]
  Region rows;      // messages [num_ranks, slots]
  Region returns;   // rows on their way back: [max_tokens, top_k or copies]
  // Instead of returns, with lends:
  Region places;   // int64 [max_tokens, top_k]: which row of the server's results
  Region results;  // f32 rows as the experts write them; the last region: placements change its
                   // size

  WorkspaceLayout all;
  Region call;         // PushedCall
  Region out_header;   // PushHeader, put from here
  Region slot_rank;    // int32 [max_tokens, top_k]
  Region slot_expert;  // LocalExpert, as many
  Region message_of;   // int64 [max_tokens, copies]: slots of a token's messages
  Region cursor;       // int64 [num_ranks]
  Region expert_rows;  // int64 [num_ranks, max_experts]: rows for each, batched rows only
  Region staging;      // one message or returned row, for peers whose memory has no address here
  Region scratch;
  Region message_index;  // int64 [max_rows]: which slot holds a row
  Region ids, weights;   // [max_rows, top_k]
  Region delivered;      // records quantized at the destination
  BatchedLayout batched;
  Region batched_index;  // int64 [num_local_experts, rows_per_expert]

  RowMessage message{0, 1};
  int64_t slots = 0;        ///< row slots of one source
  int64_t quota = 0;        ///< rows that a source may have for a unit
  int64_t max_rows = 0;     ///< received
  int64_t copies = 0;       ///< messages a token has at most
  int64_t back_bytes = 0;   ///< one returned row
  int64_t back_places = 0;  ///< return slots of a token
  int64_t message_top_k = 0;
  int64_t max_experts = 0;  ///< of any rank, batched rows only
  bool lends = false;       ///< owners read slot rows where the experts of a peer left them

  PushedLayout() = default;
  PushedLayout(const Problem& problem, const RowFormat& wire, QuantDuty quant_duty,
               RowsLayout rows);

  /// Where slot `slot` of `source` begins in a part.
  int64_t row_offset(int source, int64_t slot) const {
    return rows.offset + (source * slots + slot) * message.bytes;
  }
  int64_t return_offset(int64_t token, int64_t place) const {
    return returns.offset + (token * back_places + place) * back_bytes;
  }
  int64_t place_offset(int64_t token, int64_t slot) const {
    return places.offset + (token * message_top_k + slot) * int64_t{sizeof(int64_t)};
  }
  int64_t header_offset(int num_ranks, int source, uint64_t call) const {
    return headers.offset +
           ep::header_slot(num_ranks, source, call) * static_cast<int64_t>(sizeof(PushHeader));
  }
};

/// Mutable state of one call, at the start of the workspace. It keeps the layout: finalize knows
/// neither the wire format nor who quantized.
struct PushedCall {
  PushedLayout layout;
  int64_t num_rows = 0;  ///< received
  RowFormat format;      ///< of the rows in flight
};

/// Rows that one source may have for a unit (a rank, or one of its experts with batched rows): each
/// source has an equal share of the capacity.
int64_t push_quota(const Problem& problem);

/// Slot rows between ranks of one node stay in the heap part of the rank that made them. Sums are
/// fewer: they are added up first and pushed.
bool push_lends(const Problem& problem);

/// The protocol's state in this rank's part of the heap.
ep::PushRank push_rank(const Problem& problem, const PushedLayout& layout,
                       comm::SymmetricHeap& heap);

/// Does the waits and signals of the protocol until it asks for something else.
void run_protocol(ep::PushRank& rank, comm::SymmetricHeap& heap, comm::CallSite site);

/// Whether run_protocol() would not wait for a peer. Never blocks; a failed group is ready.
bool protocol_ready(const ep::PushRank& rank, const comm::SymmetricHeap& heap);

}  // namespace moekit::prepare
