// The producer warpgroup: fills the ring. Weights come by TMA; rows by TMA where they lie in order
// (down), else by 16-byte asynchronous copies of rows found through row_index.
#pragma once

#include "kernels/common/copy.cuh"
#include "kernels/sm90_grouped_gemm/src/kernel_args.h"
#include "kernels/sm90_grouped_gemm/src/shared_storage.cuh"

namespace moekit::kernels::sm90_grouped_gemm {

/// One thread: announces all bytes of a stage and loads its weight tile.
template <Knobs K>
__device__ __forceinline__ void load_weights(const KernelArgs& args, SharedStorage<K>& shared,
                                             const TileTask& task, bool shared_weights,
                                             uint32_t rank, uint32_t stage, int32_t k) {
  constexpr uint32_t kBoxBytes = kTileColumns / 2 * kTileRowBytes;
  uint64_t* full = &shared.full[stage];
  if (task.num_rows == 0) {
    barrier_arrive(full);
    return;
  }
  const bool half = task.num_rows <= 64;
  uint32_t bytes = 2 * kBoxBytes;
  if constexpr (!K.gathers()) bytes += (half ? 64 : 128) * kTileRowBytes;
  barrier_arrive_expect(full, bytes);
  const int32_t column = task.n_block * K.tile().columns;
  if (K.cluster == 2 && shared_weights) {
    // Each block of the cluster fetches one half of the tile for both.
    tma_load_4d_multicast(&args.weights, full, shared.weights[stage] + rank * kBoxBytes, 3, k,
                          column + static_cast<int32_t>(rank) * K.box_rows(), 0, task.expert);
  } else {
    tma_load_4d(&args.weights, full, shared.weights[stage], k, column, 0, task.expert);
    tma_load_4d(&args.weights, full, shared.weights[stage] + kBoxBytes, k, column + K.box_rows(), 0,
                task.expert);
  }
}

/// One thread: loads the rows of a stage where they lie in order.
template <Knobs K>
__device__ __forceinline__ void load_rows(const KernelArgs& args, SharedStorage<K>& shared,
                                          const TileTask& task, uint32_t stage, int32_t k) {
  uint64_t* full = &shared.full[stage];
  if (task.num_rows > 0) {
    tma_load_2d(&args.rows, full, shared.rows[stage], k, task.first_row);
  }
  if (task.num_rows > 64) {
    tma_load_2d(&args.rows, full, shared.rows[stage] + 64 * kTileRowBytes, k, task.first_row + 64);
  }
}

/// The rows that a producer thread copies: every 16th from row thread / 8 on, of each the 16 bytes
/// thread % 8 of 128. So rows of short tasks are spread over all warps.
struct GatheredRows {
  static constexpr int kRounds = 128 / 16;
  uint32_t offset[kRounds];  // of the rows, in units of 16 bytes, so that 32 bits reach 64 GiB
  int32_t count;             // rows of the task from the thread's first one on

  __device__ __forceinline__ void find(const Args& args, const TileTask& task, int thread) {
    count = task.num_rows - thread / 8;
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      offset[i] = 0;
      if (i * 16 >= count) continue;
      const int32_t row = task.first_row + thread / 8 + i * 16;
      const int64_t source = args.row_index != nullptr ? __ldg(args.row_index + row) : row;
      offset[i] = static_cast<uint32_t>(source * args.row_bytes >> 4);
    }
  }

  /// Rows beyond the task are left as they are: their products are never stored.
  __device__ __forceinline__ void copy(const Args& args, uint8_t* to, int32_t k_bytes,
                                       int32_t depth_bytes, int thread) const {
    const uint32_t chunk = thread % 8;
    const int32_t byte = k_bytes + static_cast<int32_t>(chunk) * 16;
    const bool inside = byte < depth_bytes;
    const auto* from = static_cast<const uint8_t*>(args.rows) + (inside ? byte : 0);
    const uint32_t base = shared_address(to) + tile_chunk_offset(thread / 8, chunk);
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      if (i * 16 >= count) break;
      copy_async_16(base + i * 16 * kTileRowBytes, from + (static_cast<uint64_t>(offset[i]) << 4),
                    inside);
    }
  }
};

/// The whole role. All 128 threads where rows are gathered, one thread otherwise. `down` fills the
/// ring with weights before its predecessor has ended: tasks are older than that.
template <Knobs K>
__device__ __forceinline__ void produce(const KernelArgs& args, SharedStorage<K>& shared,
                                        int thread) {
  const uint32_t rank = K.cluster == 1 ? 0 : cluster_rank();
  const Args& a = args.args;
  const int32_t depth_bytes = a.shape.depth * K.element_bytes();
  const int32_t steps = (depth_bytes + 127) / 128;
  // By then the number has arrived.
  const int32_t look_at = steps > K.stages ? K.stages : steps - 1;
  RingPosition ring;
  const bool feeds = thread == 0;
  TaskFeed<K> feed(a, shared.tasks);
  TaskReader<K, !K.gathers()> reader(shared.tasks);
  TileTask task;
  bool first_task = true;
  if (feeds) feed.first();
  while (reader.take(task)) {
    if (feeds) feed.request();
    if (K.cluster == 1 && task.num_rows == 0) {
      if (feeds) feed.publish();
      continue;
    }
    const bool shared_weights = reader.shares_weights();
    GatheredRows gathered;
    if constexpr (K.gathers()) gathered.find(a, task, thread);
    int32_t ahead = 0;  // stages whose weights are under way
    if (K.starts_early() && first_task) {
      for (; ahead < K.stages && ahead < steps; ++ahead) {
        load_weights<K>(args, shared, task, shared_weights, rank, ahead, ahead * K.block_depth());
      }
      wait_for_predecessor();
    }
    first_task = false;
    for (int32_t step = 0; step < steps; ++step) {
      const int32_t k = step * K.block_depth();
      if (step >= ahead) {
        barrier_wait(&shared.empty[ring.stage], ring.parity ^ 1);
        if (thread == 0) {
          load_weights<K>(args, shared, task, shared_weights, rank, ring.stage, k);
        }
      }
      if constexpr (K.gathers()) {
        gathered.copy(a, shared.rows[ring.stage], step * 128, depth_bytes, thread);
        copy_async_arrive(&shared.full[ring.stage]);
      } else {
        load_rows<K>(args, shared, task, ring.stage, k);
      }
      if (feeds && step == look_at) feed.look();
      ring.advance<K.stages>();
    }
    if (feeds) feed.publish();
  }
  if (feeds) feed.finish();
}

/// Arrivals that complete a full barrier besides TMA's bytes.
template <Knobs K>
constexpr uint32_t full_arrivals() {
  return 1 + (K.gathers() ? kWarpgroup : 0);
}

}  // namespace moekit::kernels::sm90_grouped_gemm
