// TensorParallel: the groups that a rank belongs to when experts are sliced, and the sum of the
// slices' parts.
#pragma once

#include <memory>
#include <string_view>

#include "base/thread_pool.h"
#include "comm/communicator.h"
#include "moekit/plan.h"
#include "problem/canonical_layer.h"
#include "problem/workspace_layout.h"

namespace moekit::engine {

/// What a sliced layer needs in a workspace.
struct SliceRegions {
  Region parts;  ///< [tp_size, tokens, width] f32
  Region lists;  ///< offsets and sizes of two exchanges: int64 [8, tp_size]
};

/// Nothing where tp_size is 1.
SliceRegions lay_out_slices(WorkspaceLayout& workspace, int tp_size, int64_t max_tokens,
                            int64_t width);

/// The layer as this rank of options.comm sees it: `layer` itself, or with options.tp > 1 its
/// slice. Communicates nothing. Throws unsupported where the layer can't be sliced.
std::shared_ptr<const CanonicalLayer> rank_layer(std::shared_ptr<const CanonicalLayer> layer,
                                                 const PlanOptions& options);

class TensorParallel {
 public:
  TensorParallel() = default;
  /// Collective over `world`: makes the two groups of RankMap. With tp_size 1 the world itself
  /// exchanges rows, and there is nothing to sum.
  TensorParallel(std::shared_ptr<comm::Communicator> world, int tp_size);

  bool on() const { return slices_ != nullptr; }
  /// Ranks that exchange rows with this one.
  comm::Communicator& rows() const { return *rows_; }
  /// Ends the waits of both groups. A failure in one must not leave the other waiting.
  void abort(std::string_view reason) const noexcept;

  /// One rank's part of a call, on its way to all ranks of its group.
  struct Part {
    float* routed = nullptr;  ///< [tokens, width]: this slice's part, then the sum
    int64_t width = 0;
    float* shared = nullptr;  ///< [tokens, hidden] or null: written by rank 0, received by others
    int64_t hidden = 0;
    int64_t tokens = 0;
    int64_t call = 0;
    int64_t layer = -1;  ///< the layer's number in its group
  };
  /// routed = part 0 + part 1 + ..., in the order of the group's ranks: the same bits on all of
  /// them. Tokens must be as many on all; a difference is an error that names both figures.
  void sum(const Part& part, const SliceRegions& regions, std::byte* workspace,
           ThreadPool& threads) const;

 private:
  std::shared_ptr<comm::Communicator> rows_;
  std::shared_ptr<comm::Communicator> slices_;
};

}  // namespace moekit::engine
