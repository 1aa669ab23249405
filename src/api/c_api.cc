// The C ABI over the C++ API: handles, status codes, and the wall that no exception passes.
#include "moekit/c_api.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <exception>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "api/c_convert.h"
#include "api/c_guard.h"
#include "engine/plan_agreement.h"
#include "moekit/moekit.h"
#include "moekit/version.h"

namespace {

using moekit::ErrorCode;
namespace c = moekit::c;
using c::guarded;
using c::required;

// A layer with the allocator that its memory came from; the allocator goes last.
struct LayerState {
  std::unique_ptr<c::CallbackAllocator> allocator;
  std::optional<moekit::Layer> layer;
};

char* copy_string(const std::string& text) {
  char* copy = static_cast<char*>(std::malloc(text.size() + 1));
  if (copy == nullptr) throw std::bad_alloc();
  std::memcpy(copy, text.c_str(), text.size() + 1);
  return copy;
}

}  // namespace

struct moekit_layer {
  std::shared_ptr<LayerState> state;
};

struct moekit_group {
  std::vector<moekit::CommunicatorHandle> ranks;
  int num_nodes;
  bool one_end = false;  // `ranks` holds this process's (or thread's) end alone

  const moekit::CommunicatorHandle& end(int rank) const {
    const int size = one_end ? ranks.front().size() : static_cast<int>(ranks.size());
    MOEKIT_CHECK(rank >= 0 && rank < size, "rank is {}, the group has ranks 0 to {}", rank,
                 size - 1);
    if (!one_end) return ranks[static_cast<size_t>(rank)];
    MOEKIT_CHECK(rank == ranks.front().rank(), "rank is {}, this end of the group is rank {}", rank,
                 ranks.front().rank());
    return ranks.front();
  }
};

struct moekit_workspace {
  std::shared_ptr<LayerState> layer;
  std::shared_ptr<moekit::Workspace> workspace;
};

// Members are destroyed from the last to the first: the call, then what it works on.
struct moekit_call {
  std::shared_ptr<LayerState> layer;
  std::shared_ptr<moekit::Workspace> workspace;
  moekit::PendingCall call;
};

namespace {

/// The C++ options; the allocator of the callbacks, if any, is put into `state`.
moekit::PlanOptions plan_options(const moekit_plan_options* given, LayerState* state) {
  const moekit_plan_options o =
      c::read_struct(given, c::default_plan_options(), "moekit_plan_options");
  moekit::PlanOptions options = c::from_c(o);
  MOEKIT_CHECK(o.group != nullptr || o.rank == 0,
               "rank is {}, but group is NULL: a layer of one rank is rank 0", o.rank);
  if (o.group != nullptr) {
    options.comm = o.group->end(o.rank);
    options.num_nodes = o.group->num_nodes;
  }
  if (o.allocator != nullptr) {
    state->allocator = std::make_unique<c::CallbackAllocator>(
        c::read_struct(o.allocator, moekit_allocator{}, "moekit_allocator"));
    options.allocator = state->allocator.get();
  }
  return options;
}

/// The end that the options name; none where they can't be read.
moekit::CommunicatorHandle end_of(const moekit_plan_options* given) noexcept {
  try {
    const moekit_plan_options o =
        c::read_struct(given, c::default_plan_options(), "moekit_plan_options");
    if (o.group != nullptr) return o.group->end(o.rank);
  } catch (...) {  // the caller has an error of its own to tell
  }
  return {};
}

/// Takes the arguments of a new layer. A rank whose arguments are wrong says so to those that make
/// the layer with it.
template <typename Read>
void or_tell_peers(const moekit_plan_options* options, Read&& read) {
  try {
    read();
  } catch (...) {
    moekit::engine::refuse_layer(end_of(options).impl.get(), std::current_exception());
  }
}

std::chrono::nanoseconds deadline_of(int64_t deadline_ns) {
  MOEKIT_CHECK(deadline_ns >= 0, "deadline_ns is {}, expected 0 (30 s) or a positive time",
               deadline_ns);
  return deadline_ns == 0 ? std::chrono::nanoseconds(std::chrono::seconds(30))
                          : std::chrono::nanoseconds(deadline_ns);
}

/// A group of which this process has one end.
moekit_group* one_end(moekit::CommunicatorHandle handle) {
  int num_nodes = 0;
  for (int r = 0; r < handle.size(); ++r) num_nodes = std::max(num_nodes, handle.node_of(r) + 1);
  return new moekit_group{{std::move(handle)}, num_nodes, true};
}

moekit_run_args read_args(const moekit_run_args* args) {
  return c::read_struct(args, moekit_run_args{}, "moekit_run_args");
}

moekit::Workspace* workspace_of(const moekit_run_args& args, const moekit_layer& layer) {
  if (args.workspace == nullptr) return nullptr;
  MOEKIT_CHECK(args.workspace->layer == layer.state, "the workspace belongs to another layer");
  return args.workspace->workspace.get();
}

void make_layer(moekit_layer** out, std::shared_ptr<LayerState> state, moekit::Layer layer) {
  state->layer.emplace(std::move(layer));
  *out = new moekit_layer{std::move(state)};
}

}  // namespace

extern "C" {

uint32_t moekit_abi_version(void) {
  return static_cast<uint32_t>(MOEKIT_ABI_MAJOR) << 16 | MOEKIT_ABI_MINOR;
}

const char* moekit_version_string(void) { return MOEKIT_VERSION; }

const char* moekit_status_name(moekit_status status) {
  if (status < MOEKIT_OK || status > MOEKIT_INTERNAL) return "unknown";
  return moekit::to_string(static_cast<ErrorCode>(status));
}

const char* moekit_last_error(void) { return c::last_error(); }

moekit_status moekit_config_init(moekit_config* config, uint32_t struct_size) {
  return guarded(
      [&] { c::write_struct(config, struct_size, c::default_config(), "moekit_config"); });
}

moekit_status moekit_plan_options_init(moekit_plan_options* options, uint32_t struct_size) {
  return guarded([&] {
    c::write_struct(options, struct_size, c::default_plan_options(), "moekit_plan_options");
  });
}

moekit_status moekit_group_create(int32_t num_ranks, int64_t deadline_ns, int32_t num_nodes,
                                  moekit_group** group) {
  return guarded([&] {
    required(group, "group") = nullptr;
    *group = new moekit_group{
        moekit::make_thread_ranks(num_ranks, deadline_of(deadline_ns), num_nodes), num_nodes};
  });
}

int32_t moekit_group_size(const moekit_group* group) {
  if (group == nullptr) return 0;
  return group->one_end ? group->ranks.front().size() : static_cast<int32_t>(group->ranks.size());
}

int32_t moekit_group_rank(const moekit_group* group) {
  return group == nullptr || !group->one_end ? -1 : group->ranks.front().rank();
}

moekit_status moekit_group_create_processes(const moekit_bootstrap* bootstrap,
                                            moekit_group** group) {
  return guarded([&] {
    required(group, "group") = nullptr;
    const moekit_bootstrap b = c::read_struct(bootstrap, moekit_bootstrap{}, "moekit_bootstrap");
    required(b.allgather, "allgather");
    moekit::Bootstrap callbacks;
    callbacks.rank = b.rank;
    callbacks.size = b.size;
    callbacks.allgather = [&b](const void* send, void* recv, int64_t bytes) {
      const int32_t status = b.allgather(b.context, send, recv, static_cast<size_t>(bytes));
      MOEKIT_CHECK_AS(ErrorCode::comm, status == 0,
                      "the bootstrap's allgather of {} bytes failed with {}", bytes, status);
    };
    if (b.barrier != nullptr) {
      callbacks.barrier = [&b] {
        const int32_t status = b.barrier(b.context);
        MOEKIT_CHECK_AS(ErrorCode::comm, status == 0, "the bootstrap's barrier failed with {}",
                        status);
      };
    }
    const moekit::ProcessOptions options{deadline_of(b.deadline_ns), b.num_nodes};
    *group = one_end(moekit::make_process_ranks(callbacks, options));
  });
}

moekit_status moekit_group_create_mpi(const void* mpi_comm, int64_t deadline_ns, int32_t num_nodes,
                                      moekit_group** group) {
  return guarded([&] {
    required(group, "group") = nullptr;
    *group = one_end(moekit::make_mpi_ranks(mpi_comm, {deadline_of(deadline_ns), num_nodes}));
  });
}

moekit_status moekit_group_split(const moekit_group* group, int32_t rank, int32_t color,
                                 int32_t key, moekit_group** out) {
  return guarded([&] {
    required(out, "out") = nullptr;
    moekit::CommunicatorHandle part = required(group, "group").end(rank).split(color, key);
    if (color >= 0) *out = one_end(std::move(part));
  });
}

void moekit_group_abort(const moekit_group* group, int32_t rank, const char* reason) {
  guarded([&] {
    required(group, "group").end(rank).abort(reason == nullptr ? "no reason given" : reason);
  });
}

void moekit_group_free(moekit_group* group) { delete group; }

moekit_status moekit_layer_open(const char* model_dir, int32_t layer,
                                const moekit_plan_options* options, moekit_layer** out) {
  return guarded([&] {
    auto state = std::make_shared<LayerState>();
    moekit::PlanOptions plan;
    or_tell_peers(options, [&] {
      required(out, "out") = nullptr;
      required(model_dir, "model_dir");
      plan = plan_options(options, state.get());
    });
    make_layer(out, state, moekit::Layer::open(model_dir, layer, plan));
  });
}

moekit_status moekit_layer_create(const moekit_config* config, const moekit_layer_tensors* tensors,
                                  const moekit_plan_options* options, moekit_layer** out) {
  return guarded([&] {
    auto state = std::make_shared<LayerState>();
    moekit::MoeConfig cpp_config;
    moekit::LayerTensors cpp_tensors;
    moekit::PlanOptions plan;
    or_tell_peers(options, [&] {
      required(out, "out") = nullptr;
      cpp_config = c::from_c(c::read_struct(config, c::default_config(), "moekit_config"));
      cpp_tensors = c::from_c(
          c::read_struct(tensors, moekit_layer_tensors{}, "moekit_layer_tensors"), cpp_config);
      plan = plan_options(options, state.get());
    });
    make_layer(out, state, moekit::Layer::create(cpp_config, cpp_tensors, plan));
  });
}

void moekit_layer_refuse(const moekit_group* group, int32_t rank, const char* reason) {
  guarded([&] {
    const moekit::CommunicatorHandle end = required(group, "group").end(rank);
    const char* words = reason == nullptr ? "no reason given" : reason;
    moekit::engine::refuse_layer(
        end.impl.get(), std::make_exception_ptr(moekit::Error(ErrorCode::invalid_argument, words)));
  });
}

void moekit_layer_free(moekit_layer* layer) { delete layer; }

moekit_status moekit_layer_config(const moekit_layer* layer, moekit_config* config) {
  return guarded([&] {
    const moekit_config value = c::to_c(required(layer, "layer").state->layer->config());
    c::write_struct(config, required(config, "config").struct_size, value, "moekit_config");
  });
}

moekit_status moekit_layer_explain(const moekit_layer* layer, char** json) {
  return guarded([&] {
    required(json, "json") = nullptr;
    const moekit::Layer& l = *required(layer, "layer").state->layer;
    *json = copy_string(moekit::explanation_json(l.config(), l.explanation()));
  });
}

moekit_status moekit_inspect(const char* model_dir, int32_t with_tensors, char** json) {
  return guarded([&] {
    required(json, "json") = nullptr;
    required(model_dir, "model_dir");
    *json = copy_string(
        moekit::checkpoint_json(moekit::inspect_checkpoint(model_dir, with_tensors != 0)));
  });
}

void moekit_string_free(char* text) { std::free(text); }

moekit_status moekit_workspace_create(const moekit_layer* layer, moekit_workspace** out) {
  return guarded([&] {
    required(out, "out") = nullptr;
    const auto& state = required(layer, "layer").state;
    *out = new moekit_workspace{state, state->layer->make_workspace()};
  });
}

moekit_status moekit_workspace_bytes(const moekit_workspace* workspace, int64_t* bytes) {
  return guarded(
      [&] { required(bytes, "bytes") = required(workspace, "workspace").workspace->bytes(); });
}

void moekit_workspace_free(moekit_workspace* workspace) { delete workspace; }

moekit_status moekit_layer_run(const moekit_layer* layer, const moekit_run_args* args) {
  return guarded([&] {
    const moekit_run_args a = read_args(args);
    moekit::Workspace* workspace = workspace_of(a, required(layer, "layer"));
    layer->state->layer->run(c::from_c(a), a.stream, workspace);
  });
}

moekit_status moekit_layer_dispatch(const moekit_layer* layer, const moekit_run_args* args,
                                    moekit_call** out) {
  return guarded([&] {
    required(out, "out") = nullptr;
    const moekit_run_args a = read_args(args);
    moekit::Workspace* workspace = workspace_of(a, required(layer, "layer"));
    std::shared_ptr<moekit::Workspace> keep;
    if (workspace != nullptr) keep = a.workspace->workspace;
    *out = new moekit_call{layer->state, std::move(keep),
                           layer->state->layer->dispatch(c::from_c(a), a.stream, workspace)};
  });
}

moekit_status moekit_call_ready(const moekit_call* call, int32_t* ready) {
  return guarded([&] { required(ready, "ready") = required(call, "call").call.ready() ? 1 : 0; });
}

moekit_status moekit_call_wait(moekit_call* call) {
  return guarded([&] { required(call, "call").call.wait(); });
}

moekit_status moekit_call_experts(moekit_call* call) {
  return guarded([&] { required(call, "call").call.experts(); });
}

moekit_status moekit_call_combine(moekit_call* call) {
  return guarded([&] { required(call, "call").call.combine(); });
}

void moekit_call_free(moekit_call* call) { delete call; }

moekit_status moekit_rebalance(const int64_t* loads, int64_t num_experts,
                               const moekit_rebalance_options* options, moekit_placement** out) {
  return guarded([&] {
    required(out, "out") = nullptr;
    required(loads, "loads");
    MOEKIT_CHECK(num_experts >= 1, "num_experts is {}, expected 1 or more", num_experts);
    const moekit_rebalance_options defaults{sizeof(moekit_rebalance_options), 1, 1,
                                            MOEKIT_REBALANCE_GREEDY,          0, 0};
    *out = c::to_c(moekit::rebalance(
        std::vector<int64_t>(loads, loads + num_experts),
        c::from_c(c::read_struct(options, defaults, "moekit_rebalance_options"))));
  });
}

moekit_status moekit_layer_placement(const moekit_layer* layer, moekit_placement** out) {
  return guarded([&] {
    required(out, "out") = nullptr;
    *out = c::to_c(required(layer, "layer").state->layer->placement());
  });
}

void moekit_placement_free(moekit_placement* placement) { std::free(placement); }

moekit_status moekit_layer_set_placement(moekit_layer* layer, const moekit_placement* placement,
                                         moekit_placement_change* change) {
  return guarded([&] {
    moekit::Layer& l = *required(layer, "layer").state->layer;
    const moekit::PlacementChange done = l.set_placement(
        c::from_c(c::read_struct(placement, moekit_placement{}, "moekit_placement")));
    if (change == nullptr) return;
    const moekit_placement_change value{sizeof(value), 0, done.experts_kept, done.experts_packed,
                                        done.bytes_packed};
    c::write_struct(change, change->struct_size, value, "moekit_placement_change");
  });
}

moekit_status moekit_layer_load(const moekit_layer* layer, moekit_load* load) {
  return guarded([&] {
    const moekit::Layer& l = *required(layer, "layer").state->layer;
    moekit_load filled = c::read_struct(load, moekit_load{}, "moekit_load");
    const moekit::LoadStatistics statistics =
        filled.all_ranks != 0 ? l.gather_load_statistics() : l.load_statistics();
    MOEKIT_CHECK_AS(ErrorCode::unsupported, !statistics.per_expert.empty(),
                    "the layer was planned with load_statistics off");
    c::to_c(statistics, &filled);
    c::write_struct(load, load->struct_size, filled, "moekit_load");
  });
}

moekit_status moekit_layer_reset_load(const moekit_layer* layer) {
  return guarded([&] { required(layer, "layer").state->layer->reset_load_statistics(); });
}

}  // extern "C"
