// The world of ranks itself (see world.h), compiled into the test program of this folder.
#include "cpu/prepare/world.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <numeric>
#include <thread>

#include "base/buffer.h"
#include "base/thread_pool.h"
#include "prepare/replica_turn.h"
#include "quant/row_codec.h"
#include "tensor/convert.h"
#include "tensor/float_formats.h"
#include "tensor/rng.h"

namespace {
thread_local bool t_counting = false;
thread_local int64_t t_allocations = 0;
}  // namespace

// Counts what a member allocates while it runs. g++ 14 sees one of the two of a pair inlined.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmismatched-new-delete"
#endif
void* operator new(std::size_t bytes) {
  if (t_counting) ++t_allocations;
  if (void* data = std::malloc(bytes)) return data;
  throw std::bad_alloc();
}
void operator delete(void* data) noexcept { std::free(data); }
void operator delete(void* data, std::size_t) noexcept { std::free(data); }

namespace moekit::prepare {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

/// What expert e makes of a row: differs in every element and between experts.
void expert_formula(int32_t expert, const float* x, int64_t width, float* y) {
  const float scale = 1.0f + 0.37f * static_cast<float>(expert % 97);
  const float shift = 0.011f * static_cast<float>(expert % 31);
  for (int64_t i = 0; i < width; ++i) y[i] = x[i] * scale + shift * static_cast<float>(i % 7);
}

constexpr int64_t kGuard = 256;
constexpr int kGuardByte = 0x5a;

/// Moves (rank, token) to the one stream of all ranks where the world has one.
void to_stream(const World& world, int& rank, int64_t& token) {
  if (!world.one_stream) return;
  for (int r = 0; r < rank; ++r) token += world.tokens[r];
  rank = 0;
}

float hidden_of(const World& world, int rank, int64_t token, int64_t i) {
  to_stream(world, rank, token);
  const Rng rng(static_cast<uint64_t>(world.seed), static_cast<uint64_t>(rank));
  return rng.normal(static_cast<uint64_t>(token * world.width + i));
}

ActivationScheme scheme_of(const World& world) {
  ActivationScheme scheme;
  scheme.format = world.wire;
  if (world.wire == ActivationFormat::fp8_tensor) scheme.static_scale = true;
  return scheme;
}

/// The caller's tensor of one rank.
struct Hidden {
  std::vector<float> storage;  // room for any type
  TensorView view;
  std::vector<std::byte> records;

  Hidden(const World& world, int rank) {
    const int64_t tokens = world.tokens[rank];
    const int64_t pitch = world.width * world.element_step + world.row_gap;
    storage.assign(static_cast<size_t>(tokens * pitch + 1), kNaN);
    view = TensorView::contiguous(storage.data(), world.hidden_dtype, {tokens, world.width});
    view.strides[0] = pitch;
    view.strides[1] = world.element_step;
    const RowFormat format = RowFormat::of(world.wire, world.width);
    if (world.pass_records) records.resize(static_cast<size_t>(tokens * format.record_bytes));
    std::vector<float> row(static_cast<size_t>(world.width));
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t i = 0; i < world.width; ++i) row[i] = hidden_of(world, rank, t, i);
      store_row_f32(view, t, row.data());
      if (!world.pass_records) continue;
      load_row_f32(view, t, row.data());
      quant::encode_row(scheme_of(world), 0.02f, row.data(), world.width,
                        records.data() + t * format.record_bytes);
    }
  }
};

/// x as the experts of any rank see it.
std::vector<float> delivered_row(const World& world, const Hidden& hidden, int64_t token) {
  std::vector<float> x(static_cast<size_t>(world.width));
  load_row_f32(hidden.view, token, x.data());
  quant::round_trip_row(scheme_of(world), 0.02f, x.data(), world.width);
  return x;
}

/// Slot rows of everything that prepare delivered; all else is left NaN.
void run_slot_experts(const Problem& problem, const ExpertRows& rows, float weight_input,
                      std::vector<float>& out) {
  const int64_t width = problem.config.routed_width();
  const std::vector<int32_t>& mine = problem.placement->experts_of(problem.rank);
  std::vector<float> x(static_cast<size_t>(width));
  const bool batched = rows.layout == RowsLayout::batched;
  const auto apply = [&](int64_t record, int32_t expert, float weight, int64_t place) {
    quant::decode_row(rows.format, rows.record(record), x.data());
    if (weight_input != 0.0f) {
      for (float& v : x) v *= weight;
    }
    expert_formula(expert, x.data(), width, out.data() + place * width);
  };
  if (batched) {
    out.assign(mine.size() * static_cast<size_t>(rows.rows_per_expert * width), kNaN);
    for (size_t e = 0; e < mine.size(); ++e) {
      for (int64_t p = 0; p < rows.expert_num_rows[e]; ++p) {
        const int64_t place = static_cast<int64_t>(e) * rows.rows_per_expert + p;
        apply(place, mine[e], rows.origins[place].weight, place);
      }
    }
    return;
  }
  out.assign(static_cast<size_t>(rows.num_rows * rows.top_k * width), kNaN);
  for (int64_t i = 0; i < rows.num_rows * rows.top_k; ++i) {
    if (rows.ids[i] == LocalExpert::none) continue;
    apply(i / rows.top_k, mine.at(static_cast<size_t>(index_of(rows.ids[i]))), rows.weights[i], i);
  }
}

/// Sums of the rank's slots, as experts or a reduce member write them.
std::vector<float> sum_here(const World& world, const ExpertRows& rows,
                            const std::vector<float>& slots) {
  std::vector<float> sums(static_cast<size_t>(rows.num_rows * world.width), 0.0f);
  for (int64_t n = 0; n < rows.num_rows; ++n) {
    bool any = false;
    for (int64_t j = 0; j < rows.top_k; ++j) {
      const int64_t i = n * rows.top_k + j;
      if (rows.ids[i] == LocalExpert::none) continue;
      const float w = world.duty.weigher == Weigher::input ? 1.0f : rows.weights[i];
      int64_t place = i;
      if (rows.layout == RowsLayout::batched) {
        place = index_of(rows.ids[i]) * rows.rows_per_expert + rows.slot_positions[i];
      }
      for (int64_t c = 0; c < world.width; ++c) {
        const float product = w * slots[place * world.width + c];
        float& sum = sums[n * world.width + c];
        sum = any ? sum + product : product;
      }
      any = true;
    }
  }
  return sums;
}

/// A heap over threads that hides the memory of other nodes, as a heap over hosts does.
class FarHeap final : public comm::SymmetricHeap {
 public:
  FarHeap(std::unique_ptr<comm::SymmetricHeap> heap, const comm::Communicator& comm)
      : heap_(std::move(heap)), comm_(comm) {}
  std::byte* base() const override { return heap_->base(); }
  int64_t bytes() const override { return heap_->bytes(); }
  int64_t num_flags() const override { return heap_->num_flags(); }
  std::byte* peer(int rank) const override {
    return comm_.node_of(rank) == comm_.node_of(comm_.rank()) ? heap_->peer(rank) : nullptr;
  }
  void put(int rank, int64_t offset, const void* source, int64_t bytes) override {
    heap_->put(rank, offset, source, bytes);
  }
  void signal(int rank, int64_t flag, uint64_t value) override { heap_->signal(rank, flag, value); }
  uint64_t flag(int64_t flag) const override { return heap_->flag(flag); }
  void wait(int64_t flag, uint64_t value, int peer, comm::CallSite site) override {
    heap_->wait(flag, value, peer, site);
  }
  bool failed() const override { return heap_->failed(); }

 private:
  std::unique_ptr<comm::SymmetricHeap> heap_;
  const comm::Communicator& comm_;
};

class RankRun {
 public:
  RankRun(const World& world, int rank, comm::Communicator& comm)
      : world_(world),
        rank_(rank),
        comm_(comm),
        problem_(problem_of(world, rank)),
        pool_(world.threads),
        hidden_(world, rank) {
    const int64_t slots = world.tokens[rank] * world.top_k;
    ids_.resize(static_cast<size_t>(slots));
    weights_.resize(static_cast<size_t>(slots));
    for (int64_t i = 0; i < slots; ++i) {
      ids_[i] = GlobalExpert{id_of(world, rank, i / world.top_k, i % world.top_k)};
      weights_[i] = weight_of(world, rank, i / world.top_k, i % world.top_k);
    }
    wire_ = RowFormat::of(world.wire, world.width);
    const int64_t bytes = world.member->workspace_bytes(problem_, wire_, world.quant_duty);
    workspace_ = Buffer(bytes + kGuard);
    std::memset(workspace_.data(), 0xff, static_cast<size_t>(bytes));
    std::memset(workspace_.data() + bytes, kGuardByte, kGuard);
    const HeapNeed need = world.member->heap_need(problem_, wire_, world.quant_duty);
    if (need.any()) heap_ = comm.make_heap(need.bytes, need.num_flags, {"plan: heap", 0});
    if (need.any() && world.far_peers) heap_ = std::make_unique<FarHeap>(std::move(heap_), comm);
  }

  void expect_guard() const {
    for (int64_t i = workspace_.size() - kGuard; i < workspace_.size(); ++i) {
      ASSERT_EQ(std::to_integer<int>(workspace_.data()[i]), kGuardByte) << "beyond the workspace";
    }
  }

  void call(int64_t number, RankResult& result) {
    if (rank_ == world_.spoiled_rank && !ids_.empty()) {
      ids_[0] = GlobalExpert{number == 0 ? 1000000 : id_of(world_, rank_, 0, 0)};
    }
    PrepareArgs args;
    args.problem = &problem_;
    args.hidden = hidden_.view;
    if (world_.pass_records) args.records = hidden_.records.data();
    args.routing = {world_.tokens[rank_], world_.top_k, ids_.data(), weights_.data()};
    args.quant_duty = world_.quant_duty;
    args.reduce_duty = duty();
    args.wire = wire_;
    args.input_scale = 0.02f;
    args.workspace = workspace_.data();
    args.threads = &pool_;
    args.comm = &comm_;
    args.heap = heap_.get();
    args.call = number;
    args.dropped = &result.dropped;
    step(0, [&] { world_.member->prepare_send(args); });
    ExpertRows rows;
    step(1, [&] {
      world_.member->prepare_ready(args);
      rows = world_.member->prepare_receive(args);
    });
    if (world_.look) world_.look(rank_, rows);
    run_slot_experts(problem_, rows, duty().weigher == Weigher::input ? 1.0f : 0.0f, slots_);
    if (duty().summer != Summer::combine) slots_ = sum_here(world_, rows, slots_);
    float* results = world_.member->results(args);
    EXPECT_EQ(results != nullptr, world_.member->traits(problem_).holds_results);
    if (results == nullptr) results = slots_.data();
    if (results != slots_.data()) std::copy(slots_.begin(), slots_.end(), results);

    FinalizeArgs final_args;
    final_args.problem = &problem_;
    final_args.routing = args.routing;
    final_args.reduce_duty = duty();
    final_args.rows = rows;
    final_args.experts = {results, world_.width};
    final_args.sum = result.out.data();
    final_args.workspace = workspace_.data();
    final_args.threads = &pool_;
    final_args.comm = &comm_;
    final_args.heap = heap_.get();
    final_args.call = number;
    step(2, [&] { world_.member->finalize_send(final_args); });
    step(3, [&] {
      world_.member->finalize_ready(final_args);
      world_.member->finalize_receive(final_args);
    });
  }

 private:
  ReduceDuty duty() const {
    ReduceDuty duty = world_.duty;
    duty.order = world_.combine == Combine::slots ? SumOrder::slots : SumOrder::rank_sums;
    return duty;
  }
  template <typename Body>
  void step(int number, Body body) {
    if (world_.before) world_.before(rank_, number);
    t_counting = true;
    try {
      body();
    } catch (...) {
      t_counting = false;
      throw;
    }
    t_counting = false;
  }

  const World& world_;
  const int rank_;
  comm::Communicator& comm_;
  const Problem problem_;
  ThreadPool pool_;
  Hidden hidden_;
  std::vector<GlobalExpert> ids_;
  std::vector<float> weights_;
  RowFormat wire_;
  Buffer workspace_;
  std::vector<float> slots_;  ///< outlives a call that fails: peers read it until the abort
  std::unique_ptr<comm::SymmetricHeap> heap_;
};

float as_travelled(const World& world, float x) {
  return world.combine_dtype == DType::bf16 ? bf16_to_f32(f32_to_bf16(x)) : x;
}

/// One token's output by the definition.
void expected_row(const World& world, const Problem& problem, const Hidden& hidden, int rank,
                  int64_t t, float* out) {
  const bool weighted = world.duty.weigher != Weigher::input;
  std::vector<float> x = delivered_row(world, hidden, t);
  std::vector<float> y(static_cast<size_t>(world.width)), part;
  bool any = false;
  const auto add = [&](const std::vector<float>& row, float w, std::vector<float>* to) {
    for (int64_t c = 0; c < world.width; ++c) {
      const float product = w * row[c];
      (*to)[c] = any ? (*to)[c] + product : product;
    }
    any = true;
  };
  const auto slot_row = [&](int64_t j, int32_t id) {
    std::vector<float> in = x;
    if (!weighted) {
      for (float& v : in) v *= weight_of(world, rank, t, j);
    }
    expert_formula(id, in.data(), world.width, y.data());
  };
  std::vector<float> weights;
  for (int64_t j = 0; j < world.top_k; ++j) weights.push_back(weight_of(world, rank, t, j));
  const int64_t turn = replica_turn(problem, rank, t, weights.data());
  std::vector<float> total(static_cast<size_t>(world.width), 0.0f);
  const int64_t parts = world.combine == Combine::slots ? 1 : world.ranks;
  std::vector<std::vector<float>> partial;
  for (int64_t r = 0; r < parts; ++r) {
    part.assign(static_cast<size_t>(world.width), 0.0f);
    any = false;
    for (int64_t j = 0; j < world.top_k; ++j) {
      const int32_t id = id_of(world, rank, t, j);
      if (id < 0 || id >= world.experts) continue;
      if (world.combine == Combine::rank_sums && problem.placement->home(id, turn).rank != r) {
        continue;
      }
      slot_row(j, id);
      if (world.combine == Combine::slots) {
        for (float& v : y) v = as_travelled(world, v);
      }
      add(y, weighted ? weight_of(world, rank, t, j) : 1.0f, &part);
    }
    if (any) partial.push_back(part);
  }
  any = false;
  for (std::vector<float>& p : partial) {
    if (world.combine == Combine::rank_sums) {
      for (float& v : p) v = as_travelled(world, v);
    }
    add(p, 1.0f, &total);
  }
  std::copy(total.begin(), total.end(), out);
}

}  // namespace

int32_t id_of(const World& world, int rank, int64_t token, int64_t slot) {
  to_stream(world, rank, token);
  if (world.id) return world.id(rank, token, slot);
  const Rng rng(static_cast<uint64_t>(world.seed) + 77, static_cast<uint64_t>(rank));
  return static_cast<int32_t>(rng.below(static_cast<uint64_t>(token * world.top_k + slot),
                                        static_cast<uint64_t>(world.experts + 1))) -
         1;
}

float weight_of(const World& world, int rank, int64_t token, int64_t slot) {
  to_stream(world, rank, token);
  const Rng rng(static_cast<uint64_t>(world.seed) + 99, static_cast<uint64_t>(rank));
  return rng.uniform(static_cast<uint64_t>(token * world.top_k + slot)) + 0.05f;
}

Problem problem_of(const World& world, int rank) {
  Problem p;
  p.config.num_experts = world.experts;
  p.config.top_k = world.top_k;
  p.config.hidden = world.width;
  p.config.inter = 16;
  p.config.gate_up_input.format = world.input;
  p.config.gate_up_input.static_scale = world.input == ActivationFormat::fp8_tensor;
  p.max_tokens = world.max_tokens;
  if (p.max_tokens == 0) {
    p.max_tokens = 1;
    for (int64_t t : world.tokens) p.max_tokens = std::max(p.max_tokens, t);
  }
  p.num_ranks = world.ranks;
  p.nodes =
      world.node_of.empty() ? NodeMap::shares(world.ranks, world.nodes) : NodeMap(world.node_of);
  p.rank = rank;
  p.placement = world.placement;
  if (p.placement == nullptr) {
    p.placement = std::make_shared<const ExpertPlacement>(
        ExpertPlacement::linear(world.experts, world.ranks));
  }
  p.combine = world.combine;
  p.combine_dtype = world.combine_dtype;
  p.capacity = world.capacity;
  p.checked = world.checked;
  return p;
}

std::vector<RankResult> run_world(const World& world) {
  auto ends = comm::make_thread_group(world.ranks, world.deadline, world.nodes);
  std::vector<RankResult> results(static_cast<size_t>(world.ranks));
  std::vector<std::thread> threads;
  for (int r = 0; r < world.ranks; ++r) {
    threads.emplace_back([&, r] {
      RankResult& result = results[r];
      try {
        t_allocations = 0;
        RankRun run(world, r, *ends[r]);
        for (int call = 0; call < world.calls; ++call) {
          result.out.assign(static_cast<size_t>(world.tokens[r] * world.width), kNaN);
          try {
            run.call(call + (world.first_call ? world.first_call(r) : 0), result);
          } catch (const Error& e) {
            ++result.errors;
            result.error = e.what();
            if (!world.go_on) throw;
          } catch (const std::exception& e) {
            ends[r]->abort(e.what());  // before the buffers that peers may read go away
            throw;
          }
        }
        if (result.errors == 0) result.allocations = t_allocations;
        run.expect_guard();
      } catch (const Error& e) {
        result.code = e.code();
        result.error = e.what();
      } catch (const std::exception& e) {
        result.code = ErrorCode::internal;
        result.error = e.what();
      }
    });
  }
  for (std::thread& t : threads) t.join();
  return results;
}

std::vector<std::vector<float>> expected_outputs(const World& world) {
  std::vector<std::vector<float>> outputs(static_cast<size_t>(world.ranks));
  const Problem problem = problem_of(world, 0);
  for (int r = 0; r < world.ranks; ++r) {
    const Hidden hidden(world, r);
    outputs[r].resize(static_cast<size_t>(world.tokens[r] * world.width));
    for (int64_t t = 0; t < world.tokens[r]; ++t) {
      expected_row(world, problem, hidden, r, t, outputs[r].data() + t * world.width);
    }
  }
  return outputs;
}

std::vector<RankResult> expect_exact(const World& world) {
  std::vector<RankResult> results = run_world(world);
  const auto expected = expected_outputs(world);
  for (int r = 0; r < world.ranks; ++r) {
    EXPECT_EQ(results[r].code, ErrorCode::ok) << "rank " << r << ": " << results[r].error;
    EXPECT_EQ(results[r].allocations, 0) << "rank " << r << " allocated inside the call";
    if (results[r].code != ErrorCode::ok) continue;
    for (size_t i = 0; i < expected[r].size(); ++i) {
      if (f32_bits(expected[r][i]) == f32_bits(results[r].out[i])) continue;
      ADD_FAILURE() << world.member->name() << ", rank " << r << " of " << world.ranks << ", token "
                    << i / world.width << ", column " << i % world.width << ": expected "
                    << expected[r][i] << ", got " << results[r].out[i];
      break;
    }
  }
  return results;
}

}  // namespace moekit::prepare
