#include "kernels/common/live_count.cuh"
#include "router/cuda/topk.h"
#include "router/scoring.h"
#include "router/selection.h"

namespace moekit::router::cuda {
namespace {

constexpr uint32_t kAll = 0xffffffffu;

/// Shared memory of one warp, which has one token.
struct Scratch {
  float* scores;      // [E]
  float* selection;   // [E]
  Ranked* groups;     // [num_groups]
  Ranked* slots;      // [top_k]
  uint32_t* allowed;  // [ceil(E / 32)] bits

  static __host__ __device__ size_t bytes(const Args& args) {
    const size_t groups = args.spec.num_groups > 1 ? args.spec.num_groups : 0;
    return sizeof(float) * 2 * args.num_experts + sizeof(Ranked) * (groups + args.top_k) +
           sizeof(uint32_t) * ((args.num_experts + 31) / 32 + 1) / 2 * 2;
  }
  __device__ Scratch(const Args& args, std::byte* base) {
    scores = reinterpret_cast<float*>(base);
    selection = scores + args.num_experts;
    groups = reinterpret_cast<Ranked*>(selection + args.num_experts);
    slots = groups + (args.spec.num_groups > 1 ? args.spec.num_groups : 0);
    allowed = reinterpret_cast<uint32_t*>(slots + args.top_k);
  }
  __device__ bool is_allowed(int32_t e) const { return allowed[e / 32] >> (e % 32) & 1; }
};

__device__ Ranked better(Ranked a, Ranked b) {
  if (a.id < 0) return b;
  if (b.id < 0) return a;
  return ranks_before(a, b) ? a : b;
}

/// The best of all lanes' candidates, in every lane. id -1 is no candidate.
__device__ Ranked warp_best(Ranked best) {
  for (int step = 16; step > 0; step /= 2) {
    Ranked other;
    other.value = __shfl_xor_sync(kAll, best.value, step);
    other.id = __shfl_xor_sync(kAll, best.id, step);
    best = better(best, other);
  }
  return best;
}

/// softmax() of scoring.h: lane l < 16 owns partial sum l, as the scalar code's i % 16 does.
__device__ void warp_softmax(const float* logits, int32_t count, float* out, int lane) {
  float max = -HUGE_VALF;
  for (int32_t i = lane; i < count; i += 32) max = logits[i] > max ? logits[i] : max;
  for (int step = 16; step > 0; step /= 2) {
    const float other = __shfl_xor_sync(kAll, max, step);
    max = other > max ? other : max;
  }
  for (int32_t i = lane; i < count; i += 32) out[i] = softmax_numerator(logits[i], max);
  __syncwarp();
  float sum = 0.0f;
  if (lane < kSumLanes) {
    for (int32_t i = lane; i < count; i += kSumLanes) sum += out[i] == out[i] ? out[i] : 0.0f;
  }
  for (int width = kSumLanes / 2; width > 0; width /= 2) sum += __shfl_down_sync(kAll, sum, width);
  sum = __shfl_sync(kAll, sum, 0);
  for (int32_t i = lane; i < count; i += 32) out[i] = out[i] / sum;
}

__device__ void score_row(const RouterSpec& spec, const float* logits, int32_t count, float* scores,
                          int lane) {
  switch (spec.scoring) {
    case Scoring::softmax: warp_softmax(logits, count, scores, lane); break;
    case Scoring::sigmoid:
      for (int32_t i = lane; i < count; i += 32) scores[i] = sigmoid(logits[i]);
      break;
    case Scoring::sqrt_softplus:
      for (int32_t i = lane; i < count; i += 32) scores[i] = sqrt_softplus(logits[i]);
      break;
    case Scoring::logits:
      for (int32_t i = lane; i < count; i += 32) scores[i] = logits[i];
      break;
  }
  __syncwarp();
}

/// max, or the sum of the two best, of the values that are not NaN; NaN when there are none.
__device__ float group_score(GroupScore kind, const float* values, int32_t count) {
  float best = __int_as_float(0x7fc00000), second = best;
  for (int32_t i = 0; i < count; ++i) {
    const float v = values[i];
    if (v != v) continue;
    if (best != best || v > best) {
      second = best;
      best = v;
    } else if (second != second || v > second) {
      second = v;
    }
  }
  return kind == GroupScore::max || second != second ? best : best + second;
}

__device__ void allow_groups(const Args& args, const Scratch& s, int lane) {
  const RouterSpec& spec = args.spec;
  const int32_t size = args.num_experts / spec.num_groups;
  for (int32_t g = lane; g < spec.num_groups; g += 32) {
    s.groups[g] = {group_score(spec.group_score, s.selection + g * size, size), g};
  }
  for (int32_t w = lane; w < (args.num_experts + 31) / 32; w += 32) s.allowed[w] = 0;
  __syncwarp();
  for (int32_t i = 0; i < spec.topk_groups; ++i) {
    Ranked best{0.0f, -1};
    for (int32_t g = lane; g < spec.num_groups; g += 32) best = better(best, s.groups[g]);
    best = warp_best(best);
    for (int32_t e = best.id * size + lane; e < (best.id + 1) * size; e += 32) {
      atomicOr(&s.allowed[e / 32], 1u << e % 32);
    }
    if (lane == 0) s.groups[best.id].id = -1;
    __syncwarp();
  }
}

__device__ void select(const Args& args, const Scratch& s, int lane) {
  for (int32_t j = 0; j < args.top_k; ++j) {
    Ranked best{0.0f, -1};
    for (int32_t e = lane; e < args.num_experts; e += 32) {
      if (s.is_allowed(e)) best = better(best, {s.selection[e], e});
    }
    best = warp_best(best);
    if (lane == 0) {
      s.slots[j] = best;
      s.allowed[best.id / 32] &= ~(1u << best.id % 32);
    }
    __syncwarp();
  }
}

__device__ float p_norm(const Ranked* slots, int32_t top_k, float p) {
  float sum = 0.0f;
  const bool infinite = p == HUGE_VALF;
  for (int32_t j = 0; j < top_k; ++j) {
    const float a = fabsf(slots[j].value);
    if (infinite) {
      sum = a > sum || a != a ? a : sum;
    } else {
      sum += p == 1.0f ? a : p == 2.0f ? a * a : powf(a, p);
    }
  }
  return infinite || p == 1.0f ? sum : p == 2.0f ? sqrtf(sum) : powf(sum, 1.0f / p);
}

__device__ void softmax_slots(const float* logits, Ranked* slots, int32_t top_k) {
  float max = -HUGE_VALF;
  for (int32_t j = 0; j < top_k; ++j) {
    const float l = logits[slots[j].id];
    max = l > max ? l : max;
  }
  float lanes[kSumLanes] = {};
  for (int32_t j = 0; j < top_k; ++j) {
    const float e = softmax_numerator(logits[slots[j].id], max);
    slots[j].value = e;
    lanes[j % kSumLanes] += e == e ? e : 0.0f;
  }
  const float sum = join_lanes(lanes);
  for (int32_t j = 0; j < top_k; ++j) slots[j].value /= sum;
}

/// One lane: weights, renormalisation, output order. Steps and orders of selection.cc.
__device__ void finish_row(const RouterSpec& spec, const float* logits, const float* scores,
                           Ranked* slots, int32_t top_k) {
  switch (spec.weight) {
    case RouterWeight::scores:
      for (int32_t j = 0; j < top_k; ++j) slots[j].value = scores[slots[j].id];
      break;
    case RouterWeight::softmax_selected: softmax_slots(logits, slots, top_k); break;
    case RouterWeight::sigmoid_logit:
      for (int32_t j = 0; j < top_k; ++j) slots[j].value = sigmoid(logits[slots[j].id]);
      break;
  }
  if (spec.renormalize != Renormalize::none) {
    float divisor = 0.0f;
    if (spec.renormalize == Renormalize::p_norm) {
      divisor = p_norm(slots, top_k, spec.p);
    } else {
      for (int32_t j = 0; j < top_k; ++j) divisor += slots[j].value;
      if (spec.renormalize == Renormalize::sum) {
        divisor += spec.epsilon;
      } else {
        divisor = divisor < spec.epsilon ? spec.epsilon : divisor;
      }
    }
    for (int32_t j = 0; j < top_k; ++j) slots[j].value /= divisor;
  }
  if (spec.scaling_factor != 1.0f) {
    for (int32_t j = 0; j < top_k; ++j) slots[j].value *= spec.scaling_factor;
  }
  for (int32_t j = 1; j < top_k; ++j) {
    const Ranked moving = slots[j];
    int32_t i = j;
    for (; i > 0 && ranks_before(moving, slots[i - 1]); --i) slots[i] = slots[i - 1];
    slots[i] = moving;
  }
}

/// Fills the slots from the hash table; false (and the row written as "no expert") when a token id
/// or an id of its row is out of range.
__device__ bool read_hash_row(const Args& args, int64_t token, const Scratch& s, int lane) {
  const int64_t row = args.token_ids[token];
  bool good = row >= 0 && row < args.hash_rows;
  for (int32_t j = lane; good && j < args.top_k; j += 32) {
    const int64_t id = args.hash_table[row * args.top_k + j];
    good = id >= 0 && id < args.num_experts;
    s.slots[j].id = static_cast<int32_t>(id);
  }
  if (__all_sync(kAll, good)) return true;
  for (int32_t j = lane; j < args.top_k; j += 32) {
    args.ids[token * args.top_k + j] = -1;
    args.weights[token * args.top_k + j] = 0.0f;
  }
  if (lane == 0 && args.bad_ids != nullptr) atomicAdd(args.bad_ids, 1);
  return false;
}

__device__ void route_token(const Args& args, int64_t token, const Scratch& s, int lane) {
  const RouterSpec& spec = args.spec;
  const float* logits = args.logits + token * args.num_experts;
  bool nan = false;
  for (int32_t e = lane; e < args.num_experts; e += 32) nan |= logits[e] != logits[e];
  if (__any_sync(kAll, nan) && lane == 0 && args.nan_rows != nullptr) atomicAdd(args.nan_rows, 1);
  score_row(spec, logits, args.num_experts, s.scores, lane);
  if (spec.hash_routing) {
    if (!read_hash_row(args, token, s, lane)) return;
  } else {
    const float* base = spec.select_on == SelectOn::scores ? s.scores : logits;
    for (int32_t e = lane; e < args.num_experts; e += 32) {
      s.selection[e] = spec.has_selection_bias ? base[e] + args.selection_bias[e] : base[e];
    }
    for (int32_t w = lane; w < (args.num_experts + 31) / 32; w += 32) s.allowed[w] = kAll;
    __syncwarp();
    if (is_grouped(spec)) allow_groups(args, s, lane);
    select(args, s, lane);
  }
  __syncwarp();
  if (lane == 0) finish_row(spec, logits, s.scores, s.slots, args.top_k);
  __syncwarp();
  for (int32_t j = lane; j < args.top_k; j += 32) {
    args.ids[token * args.top_k + j] = s.slots[j].id;
    args.weights[token * args.top_k + j] = s.slots[j].value;
  }
}

__global__ void topk_kernel(const __grid_constant__ Args args, uint32_t scratch_bytes) {
  extern __shared__ std::byte shared[];
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const Scratch scratch(args, shared + warp * scratch_bytes);
  const int64_t tokens = kernels::live_count(args.num_tokens, args.live_tokens);
  const int64_t step = static_cast<int64_t>(gridDim.x) * (blockDim.x / 32);
  for (int64_t t = static_cast<int64_t>(blockIdx.x) * (blockDim.x / 32) + warp; t < tokens;
       t += step) {
    route_token(args, t, scratch, lane);
    __syncwarp();
  }
}

}  // namespace

cudaError_t run(const Args& args, cudaStream_t stream) {
  const bool complete = args.logits != nullptr && args.ids != nullptr && args.weights != nullptr &&
                        args.spec.has_selection_bias == (args.selection_bias != nullptr) &&
                        (!args.spec.hash_routing || (args.token_ids && args.hash_table));
  if (args.num_experts < 1 || args.num_experts > kMaxExperts || args.top_k < 1 ||
      args.top_k > args.num_experts || !complete) {
    return cudaErrorInvalidValue;
  }
  if (args.num_tokens == 0) return cudaSuccess;
  const size_t bytes = (Scratch::bytes(args) + 15) / 16 * 16;
  // As many tokens a block as fit into the shared memory that needs no opting in.
  constexpr size_t kShared = 48 * 1024;
  size_t warps = kShared / bytes;
  if (warps == 0) {
    const cudaError_t status =
        cudaFuncSetAttribute(reinterpret_cast<const void*>(&topk_kernel),
                             cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
    if (status != cudaSuccess) return status;
  }
  warps = warps < 1 ? 1 : warps > 4 ? 4 : warps;
  const int64_t wanted =
      (args.num_tokens + static_cast<int64_t>(warps) - 1) / static_cast<int64_t>(warps);
  const int blocks = static_cast<int>(wanted < 65536 ? wanted : 65536);
  topk_kernel<<<blocks, static_cast<int>(warps) * 32, warps * bytes, stream>>>(
      args, static_cast<uint32_t>(bytes));
  return cudaGetLastError();
}

}  // namespace moekit::router::cuda
