// The C ABI from the outside: layers of fixtures and of memory, steps, ranks, errors, lifetimes.
#include "moekit/c_api.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "moekit/error.h"
#include "moekit/layer.h"
#include "moekit/version.h"

namespace {

const std::string kModel = std::string(MOEKIT_FIXTURES) + "/qwen3moe-ct-nvfp4";
constexpr int64_t kTokens = 7;

std::vector<float> some_rows(int64_t count) {
  std::vector<float> x(static_cast<size_t>(count));
  for (size_t i = 0; i < x.size(); ++i) x[i] = std::sin(0.37f * static_cast<float>(i));
  return x;
}

/// A [rows, columns] f32 tensor that keeps its own shape.
struct Rows {
  Rows(float* data, int64_t rows, int64_t columns) : shape{rows, columns} {
    tensor = {data, {1, 0}, 2, {MOEKIT_DTYPE_FLOAT, 32, 1}, shape, nullptr, 0};
  }
  Rows(const Rows&) = delete;
  Rows& operator=(const Rows&) = delete;
  int64_t shape[2];
  moekit_tensor tensor;
};

moekit_plan_options options_for(int64_t max_tokens) {
  moekit_plan_options options;
  EXPECT_EQ(moekit_plan_options_init(&options, sizeof options), MOEKIT_OK);
  options.max_tokens = max_tokens;
  options.num_threads = 1;
  return options;
}

moekit_run_args args_of(const Rows& x, const Rows& y) {
  moekit_run_args args{};
  args.struct_size = sizeof args;
  args.hidden = &x.tensor;
  args.output = &y.tensor;
  return args;
}

class OpenLayer : public ::testing::Test {
 protected:
  void SetUp() override {
    const moekit_plan_options options = options_for(kTokens);
    ASSERT_EQ(moekit_layer_open(kModel.c_str(), -1, &options, &layer_), MOEKIT_OK)
        << moekit_last_error();
    moekit_config config;
    config.struct_size = sizeof config;
    ASSERT_EQ(moekit_layer_config(layer_, &config), MOEKIT_OK);
    hidden_ = config.hidden;
    x_ = some_rows(kTokens * hidden_);
    y_.assign(x_.size(), 0.0f);
  }
  void TearDown() override { moekit_layer_free(layer_); }

  moekit_layer* layer_ = nullptr;
  int64_t hidden_ = 0;
  std::vector<float> x_, y_;
};

TEST(CApi, TellsItsVersions) {
  EXPECT_EQ(moekit_abi_version() >> 16, static_cast<uint32_t>(MOEKIT_ABI_MAJOR));
  EXPECT_EQ(moekit_abi_version() & 0xffff, static_cast<uint32_t>(MOEKIT_ABI_MINOR));
  EXPECT_STREQ(moekit_version_string(), MOEKIT_VERSION);
}

TEST(CApi, NamesEveryStatus) {
  for (int status = MOEKIT_OK; status <= MOEKIT_INTERNAL; ++status) {
    EXPECT_STREQ(moekit_status_name(status),
                 moekit::to_string(static_cast<moekit::ErrorCode>(status)));
  }
  EXPECT_STREQ(moekit_status_name(99), "unknown");
  EXPECT_STREQ(moekit_status_name(-1), "unknown");
}

TEST(CApi, ErrorsBelongToTheirThread) {
  moekit_layer* layer = reinterpret_cast<moekit_layer*>(1);
  const moekit_plan_options options = options_for(1);
  EXPECT_EQ(moekit_layer_open("/no/such/model", -1, &options, &layer), MOEKIT_INVALID_ARGUMENT);
  EXPECT_EQ(layer, nullptr);
  EXPECT_NE(std::string(moekit_last_error()).find("/no/such/model"), std::string::npos);
  std::string elsewhere = "?";
  std::thread([&] { elsewhere = moekit_last_error(); }).join();
  EXPECT_EQ(elsewhere, "");
}

TEST(CApi, NullsAreRefusedNotRead) {
  const moekit_plan_options options = options_for(1);
  moekit_layer* layer = nullptr;
  char* json = nullptr;
  EXPECT_EQ(moekit_layer_open(nullptr, -1, &options, &layer), MOEKIT_INVALID_ARGUMENT);
  EXPECT_EQ(moekit_layer_open(kModel.c_str(), -1, nullptr, &layer), MOEKIT_INVALID_ARGUMENT);
  EXPECT_EQ(moekit_layer_open(kModel.c_str(), -1, &options, nullptr), MOEKIT_INVALID_ARGUMENT);
  EXPECT_EQ(moekit_layer_create(nullptr, nullptr, &options, &layer), MOEKIT_INVALID_ARGUMENT);
  EXPECT_EQ(moekit_layer_run(nullptr, nullptr), MOEKIT_INVALID_ARGUMENT);
  EXPECT_EQ(moekit_layer_explain(nullptr, &json), MOEKIT_INVALID_ARGUMENT);
  EXPECT_EQ(moekit_inspect(kModel.c_str(), 0, nullptr), MOEKIT_INVALID_ARGUMENT);
  EXPECT_EQ(moekit_call_wait(nullptr), MOEKIT_INVALID_ARGUMENT);
  EXPECT_EQ(moekit_workspace_create(nullptr, nullptr), MOEKIT_INVALID_ARGUMENT);
  EXPECT_EQ(moekit_config_init(nullptr, sizeof(moekit_config)), MOEKIT_INVALID_ARGUMENT);
  moekit_layer_free(nullptr);
  moekit_workspace_free(nullptr);
  moekit_call_free(nullptr);
  moekit_group_free(nullptr);
  moekit_string_free(nullptr);
}

TEST_F(OpenLayer, GivesTheBitsOfTheCppApi) {
  const Rows x(x_.data(), kTokens, hidden_), y(y_.data(), kTokens, hidden_);
  const moekit_run_args args = args_of(x, y);
  ASSERT_EQ(moekit_layer_run(layer_, &args), MOEKIT_OK) << moekit_last_error();

  moekit::PlanOptions options;
  options.max_tokens = kTokens;
  options.num_threads = 1;
  const moekit::Layer layer = moekit::Layer::open(kModel, -1, options);
  std::vector<float> expected(x_.size());
  moekit::LayerArgs cpp;
  cpp.hidden = moekit::TensorView::contiguous(x_.data(), moekit::DType::f32, {kTokens, hidden_});
  cpp.output =
      moekit::TensorView::contiguous(expected.data(), moekit::DType::f32, {kTokens, hidden_});
  layer.run(cpp);
  EXPECT_EQ(std::memcmp(y_.data(), expected.data(), y_.size() * sizeof(float)), 0);
  double squares = 0;
  for (float v : y_) squares += static_cast<double>(v) * v;
  EXPECT_GT(squares, 0.0);
}

TEST_F(OpenLayer, StepsGiveTheBitsOfOneRun) {
  const Rows x(x_.data(), kTokens, hidden_), y(y_.data(), kTokens, hidden_);
  moekit_run_args args = args_of(x, y);
  ASSERT_EQ(moekit_layer_run(layer_, &args), MOEKIT_OK) << moekit_last_error();

  std::vector<float> stepped(y_.size());
  const Rows z(stepped.data(), kTokens, hidden_);
  args.output = &z.tensor;
  moekit_workspace* workspace = nullptr;
  ASSERT_EQ(moekit_workspace_create(layer_, &workspace), MOEKIT_OK) << moekit_last_error();
  int64_t bytes = 0;
  ASSERT_EQ(moekit_workspace_bytes(workspace, &bytes), MOEKIT_OK);
  EXPECT_GT(bytes, 0);
  args.workspace = workspace;
  moekit_call* call = nullptr;
  ASSERT_EQ(moekit_layer_dispatch(layer_, &args, &call), MOEKIT_OK) << moekit_last_error();
  // The handles keep what the call needs.
  moekit_workspace_free(workspace);
  moekit_layer_free(layer_);
  layer_ = nullptr;
  int32_t ready = -1;
  EXPECT_EQ(moekit_call_ready(call, &ready), MOEKIT_OK);
  EXPECT_EQ(ready, 1) << "one rank waits for nobody";
  EXPECT_EQ(moekit_call_combine(call), MOEKIT_INVALID_ARGUMENT) << "experts come first";
  EXPECT_EQ(moekit_call_experts(call), MOEKIT_OK) << moekit_last_error();
  EXPECT_EQ(moekit_call_combine(call), MOEKIT_OK) << moekit_last_error();
  moekit_call_free(call);
  EXPECT_EQ(std::memcmp(y_.data(), stepped.data(), y_.size() * sizeof(float)), 0);
}

TEST_F(OpenLayer, WaitRunsWhatIsLeft) {
  const Rows x(x_.data(), kTokens, hidden_), y(y_.data(), kTokens, hidden_);
  moekit_run_args args = args_of(x, y);
  ASSERT_EQ(moekit_layer_run(layer_, &args), MOEKIT_OK) << moekit_last_error();
  std::vector<float> waited(y_.size());
  const Rows z(waited.data(), kTokens, hidden_);
  args.output = &z.tensor;
  moekit_call* call = nullptr;
  ASSERT_EQ(moekit_layer_dispatch(layer_, &args, &call), MOEKIT_OK) << moekit_last_error();
  EXPECT_EQ(moekit_call_wait(call), MOEKIT_OK) << moekit_last_error();
  moekit_call_free(call);
  EXPECT_EQ(std::memcmp(y_.data(), waited.data(), y_.size() * sizeof(float)), 0);
}

TEST_F(OpenLayer, NoTokensIsOrdinary) {
  const Rows x(nullptr, 0, hidden_), y(nullptr, 0, hidden_);
  const moekit_run_args args = args_of(x, y);
  EXPECT_EQ(moekit_layer_run(layer_, &args), MOEKIT_OK) << moekit_last_error();
}

TEST_F(OpenLayer, RefusesWhatDoesNotFit) {
  const Rows x(x_.data(), kTokens, hidden_ - 1), y(y_.data(), kTokens, hidden_);
  const moekit_run_args args = args_of(x, y);
  EXPECT_EQ(moekit_layer_run(layer_, &args), MOEKIT_INVALID_ARGUMENT);
  EXPECT_STRNE(moekit_last_error(), "");
}

TEST_F(OpenLayer, WorkspaceOfAnotherLayerIsRefused) {
  const moekit_plan_options options = options_for(kTokens);
  moekit_layer* other = nullptr;
  ASSERT_EQ(moekit_layer_open(kModel.c_str(), -1, &options, &other), MOEKIT_OK);
  moekit_workspace* workspace = nullptr;
  ASSERT_EQ(moekit_workspace_create(other, &workspace), MOEKIT_OK);
  const Rows x(x_.data(), kTokens, hidden_), y(y_.data(), kTokens, hidden_);
  moekit_run_args args = args_of(x, y);
  args.workspace = workspace;
  EXPECT_EQ(moekit_layer_run(layer_, &args), MOEKIT_INVALID_ARGUMENT);
  moekit_workspace_free(workspace);
  moekit_layer_free(other);
}

TEST_F(OpenLayer, ExplainsItselfAsJson) {
  char* text = nullptr;
  ASSERT_EQ(moekit_layer_explain(layer_, &text), MOEKIT_OK) << moekit_last_error();
  const nlohmann::json json = nlohmann::json::parse(text);
  moekit_string_free(text);
  ASSERT_FALSE(json["candidates"].empty());
  bool chosen_is_listed = false;
  for (const auto& candidate : json["candidates"]) {
    if (!candidate["supported"].get<bool>()) {
      EXPECT_FALSE(candidate["reasons"].empty()) << candidate;
    }
    chosen_is_listed |= candidate["name"] == json["chosen"]["backend"];
  }
  EXPECT_TRUE(chosen_is_listed);
  EXPECT_GT(json["plan"]["weights_bytes"].get<int64_t>(), 0);
  EXPECT_EQ(json["problem"]["hidden"].get<int64_t>(), hidden_);
}

TEST(CApi, InspectsAsJson) {
  char* text = nullptr;
  ASSERT_EQ(moekit_inspect(kModel.c_str(), 1, &text), MOEKIT_OK) << moekit_last_error();
  const nlohmann::json json = nlohmann::json::parse(text);
  moekit_string_free(text);
  EXPECT_EQ(json["family"], "qwen3_moe");
  EXPECT_FALSE(json["layers"].empty());
  EXPECT_FALSE(json["tensors"].empty());
  EXPECT_EQ(json["layers"][0]["scheme"]["weights"], "nvfp4");
}

TEST(CApi, ThreadRanksGiveTheBitsOfOneRank) {
  const moekit_plan_options alone = options_for(2 * kTokens);
  moekit_layer* layer = nullptr;
  ASSERT_EQ(moekit_layer_open(kModel.c_str(), -1, &alone, &layer), MOEKIT_OK)
      << moekit_last_error();
  moekit_config config;
  config.struct_size = sizeof config;
  ASSERT_EQ(moekit_layer_config(layer, &config), MOEKIT_OK);
  const int64_t hidden = config.hidden;
  std::vector<float> x = some_rows(2 * kTokens * hidden), y(x.size()), z(x.size());
  const Rows all_x(x.data(), 2 * kTokens, hidden), all_y(y.data(), 2 * kTokens, hidden);
  const moekit_run_args args = args_of(all_x, all_y);
  ASSERT_EQ(moekit_layer_run(layer, &args), MOEKIT_OK) << moekit_last_error();
  moekit_layer_free(layer);

  moekit_group* group = nullptr;
  ASSERT_EQ(moekit_group_create(2, 0, 1, &group), MOEKIT_OK) << moekit_last_error();
  EXPECT_EQ(moekit_group_size(group), 2);
  std::string errors[2];
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      moekit_plan_options options = options_for(kTokens);
      options.group = group;
      options.rank = rank;
      moekit_layer* mine = nullptr;
      moekit_status status = moekit_layer_open(kModel.c_str(), -1, &options, &mine);
      const int64_t first = rank * kTokens * hidden;
      const Rows my_x(x.data() + first, kTokens, hidden), my_z(z.data() + first, kTokens, hidden);
      const moekit_run_args my_args = args_of(my_x, my_z);
      if (status == MOEKIT_OK) status = moekit_layer_run(mine, &my_args);
      if (status != MOEKIT_OK) errors[rank] = moekit_last_error();
      moekit_layer_free(mine);
    });
  }
  for (std::thread& thread : threads) thread.join();
  moekit_group_free(group);
  EXPECT_EQ(errors[0], "");
  EXPECT_EQ(errors[1], "");
  EXPECT_EQ(std::memcmp(y.data(), z.data(), y.size() * sizeof(float)), 0);
}

TEST(CApi, ARankWithoutALayerTellsTheOthers) {
  moekit_group* group = nullptr;
  ASSERT_EQ(moekit_group_create(2, 0, 1, &group), MOEKIT_OK) << moekit_last_error();
  using Make = std::function<moekit_status(moekit_plan_options & options, moekit_layer * *out)>;
  const std::vector<Make> failing = {
      [](auto& options, auto** out) {
        return moekit_layer_open("/no/such/model", -1, &options, out);
      },
      [](auto& options, auto** out) { return moekit_layer_open(nullptr, -1, &options, out); },
      [](auto& options, auto** out) {
        options.combine = 77;
        return moekit_layer_open(kModel.c_str(), -1, &options, out);
      },
      [](auto& options, auto** out) {
        return moekit_layer_create(nullptr, nullptr, &options, out);
      },
      [](auto& options, auto**) {
        moekit_layer_refuse(options.group, options.rank, "no file was named");
        return MOEKIT_INVALID_ARGUMENT;
      },
      [](auto& options, auto** out) {  // nothing is wrong
        return moekit_layer_open(kModel.c_str(), -1, &options, out);
      }};
  for (const Make& make : failing) {
    const bool works = &make == &failing.back();
    moekit_status status[2];
    std::string text[2];
    std::vector<std::thread> threads;
    for (int rank = 0; rank < 2; ++rank) {
      threads.emplace_back([&, rank] {
        moekit_plan_options options = options_for(kTokens);
        options.group = group;
        options.rank = rank;
        moekit_layer* mine = nullptr;
        status[rank] = rank == 1 ? make(options, &mine)
                                 : moekit_layer_open(kModel.c_str(), -1, &options, &mine);
        if (status[rank] != MOEKIT_OK) text[rank] = moekit_last_error();
        moekit_layer_free(mine);
      });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(status[1], works ? MOEKIT_OK : MOEKIT_INVALID_ARGUMENT) << text[1];
    EXPECT_EQ(status[0], works ? MOEKIT_OK : MOEKIT_COMM) << text[0];
    EXPECT_EQ(text[0], works ? "" : "rank 1 could not make its plan: " + text[1]);
  }
  moekit_group_free(group);
}

TEST(CApi, LoadDrivesTheNextPlacement) {
  const int64_t hidden = 128;
  const std::vector<float> x = some_rows(2 * kTokens * hidden);
  std::vector<float> y(x.size()), z(x.size());
  moekit_group* group = nullptr;
  ASSERT_EQ(moekit_group_create(2, 0, 1, &group), MOEKIT_OK) << moekit_last_error();
  std::string errors[2];
  moekit_placement_change changes[2] = {};
  moekit_load loads[2] = {};
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      moekit_plan_options options = options_for(kTokens);
      options.group = group;
      options.rank = rank;
      options.slots_per_rank = 6;
      moekit_layer* layer = nullptr;
      const int64_t first = rank * kTokens * hidden;
      float* rows = const_cast<float*>(x.data()) + first;
      const Rows in(rows, kTokens, hidden), before(y.data() + first, kTokens, hidden),
          after(z.data() + first, kTokens, hidden);
      const moekit_run_args first_args = args_of(in, before), last_args = args_of(in, after);
      int64_t per_expert[8], per_rank[2];
      moekit_load& load = loads[rank];
      load.struct_size = sizeof load;
      load.all_ranks = 1;
      load.num_experts = 8;
      load.num_ranks = 2;
      load.per_expert = per_expert;
      load.per_rank = per_rank;
      changes[rank].struct_size = sizeof changes[rank];
      moekit_rebalance_options how{sizeof how, 2, 1, MOEKIT_REBALANCE_GREEDY, 6, 0};
      moekit_placement *next = nullptr, *now = nullptr;
      const auto failed = [&](moekit_status status) {
        if (status != MOEKIT_OK) errors[rank] = moekit_last_error();
        return status != MOEKIT_OK;
      };
      if (failed(moekit_layer_open(kModel.c_str(), -1, &options, &layer)) ||
          failed(moekit_layer_run(layer, &first_args)) || failed(moekit_layer_load(layer, &load)) ||
          failed(moekit_rebalance(per_expert, 8, &how, &next)) ||
          failed(moekit_layer_set_placement(layer, next, &changes[rank])) ||
          failed(moekit_layer_placement(layer, &now)) ||
          failed(moekit_layer_run(layer, &last_args)) || failed(moekit_layer_reset_load(layer))) {
        return;
      }
      EXPECT_EQ(per_rank[0] + per_rank[1], 2 * kTokens * 3);
      EXPECT_EQ(now->num_ranks, 2);
      for (int r = 0; r <= 2; ++r) EXPECT_EQ(now->first[r], next->first[r]);
      for (int64_t i = 0; i < now->first[2]; ++i) EXPECT_EQ(now->ids[i], next->ids[i]);
      moekit_placement_free(now);
      moekit_placement_free(next);
      moekit_layer_free(layer);
    });
  }
  for (std::thread& thread : threads) thread.join();
  moekit_group_free(group);
  EXPECT_EQ(errors[0], "");
  EXPECT_EQ(errors[1], "");
  EXPECT_EQ(loads[0].tokens, 2 * kTokens);
  EXPECT_EQ(loads[0].imbalance, loads[1].imbalance);
  EXPECT_GT(changes[0].experts_packed + changes[1].experts_packed, 0);
  EXPECT_EQ(changes[0].experts_packed + changes[0].experts_kept, 6);
  EXPECT_EQ(std::memcmp(y.data(), z.data(), y.size() * sizeof(float)), 0);
}

TEST(CApi, PlacementsThatDontFitAreRefused) {
  moekit_plan_options options = options_for(kTokens);
  options.load_statistics = 0;
  moekit_layer* layer = nullptr;
  ASSERT_EQ(moekit_layer_open(kModel.c_str(), -1, &options, &layer), MOEKIT_OK);
  moekit_load load{};
  load.struct_size = sizeof load;
  EXPECT_EQ(moekit_layer_load(layer, &load), MOEKIT_UNSUPPORTED);
  const int64_t good[2] = {0, 8}, bad[2] = {0, -1};
  const int32_t ids[8] = {0, 1, 2, 3, 4, 5, 6, 7};
  moekit_placement placement{sizeof placement, 1, good, ids};
  EXPECT_EQ(moekit_layer_set_placement(layer, &placement, nullptr), MOEKIT_INVALID_ARGUMENT);
  EXPECT_NE(std::string(moekit_last_error()).find("slots_per_rank"), std::string::npos);
  placement.first = bad;
  EXPECT_EQ(moekit_layer_set_placement(layer, &placement, nullptr), MOEKIT_INVALID_ARGUMENT);
  EXPECT_NE(std::string(moekit_last_error()).find("ascend"), std::string::npos);
  placement.first = nullptr;
  EXPECT_EQ(moekit_layer_set_placement(layer, &placement, nullptr), MOEKIT_INVALID_ARGUMENT);
  EXPECT_EQ(moekit_layer_set_placement(layer, nullptr, nullptr), MOEKIT_INVALID_ARGUMENT);
  moekit_placement* out = nullptr;
  moekit_rebalance_options how{sizeof how, 2, 1, 7, 0, 0};
  const int64_t loads[2] = {1, 2};
  EXPECT_EQ(moekit_rebalance(loads, 2, &how, &out), MOEKIT_INVALID_ARGUMENT);
  EXPECT_EQ(moekit_rebalance(nullptr, 2, &how, &out), MOEKIT_INVALID_ARGUMENT);
  moekit_layer_free(layer);
  moekit_placement_free(nullptr);
}

TEST(CApi, RankMustBeOfTheGroup) {
  moekit_group* group = nullptr;
  ASSERT_EQ(moekit_group_create(2, 0, 1, &group), MOEKIT_OK);
  moekit_plan_options options = options_for(1);
  options.group = group;
  options.rank = 2;
  moekit_layer* layer = nullptr;
  EXPECT_EQ(moekit_layer_open(kModel.c_str(), -1, &options, &layer), MOEKIT_INVALID_ARGUMENT);
  moekit_group_free(group);
  EXPECT_EQ(moekit_group_create(0, 0, 1, &group), MOEKIT_INVALID_ARGUMENT);
  EXPECT_EQ(moekit_group_create(2, -1, 1, &group), MOEKIT_INVALID_ARGUMENT);
}

struct Counter {
  std::atomic<int64_t> live{0}, calls{0};
  int64_t limit = INT64_MAX;  ///< allocations of this many bytes fail
};

void* counted_allocate(void* user, size_t bytes, size_t alignment) {
  auto* counter = static_cast<Counter*>(user);
  if (static_cast<int64_t>(bytes) >= counter->limit) return nullptr;
  counter->live += static_cast<int64_t>(bytes);
  ++counter->calls;
  return std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
}

void counted_deallocate(void* user, void* data, size_t bytes) {
  static_cast<Counter*>(user)->live -= static_cast<int64_t>(bytes);
  std::free(data);
}

TEST(CApi, MemoryComesFromTheCallersCallbacks) {
  Counter counter;
  moekit_allocator allocator{sizeof allocator, counted_allocate, counted_deallocate, &counter};
  moekit_plan_options options = options_for(kTokens);
  options.allocator = &allocator;
  moekit_layer* layer = nullptr;
  ASSERT_EQ(moekit_layer_open(kModel.c_str(), -1, &options, &layer), MOEKIT_OK)
      << moekit_last_error();
  EXPECT_GT(counter.live.load(), 0);
  const int64_t calls = counter.calls;
  moekit_config config;
  config.struct_size = sizeof config;
  ASSERT_EQ(moekit_layer_config(layer, &config), MOEKIT_OK);
  std::vector<float> x = some_rows(kTokens * config.hidden), y(x.size());
  const Rows rows_x(x.data(), kTokens, config.hidden), rows_y(y.data(), kTokens, config.hidden);
  const moekit_run_args args = args_of(rows_x, rows_y);
  EXPECT_EQ(moekit_layer_run(layer, &args), MOEKIT_OK) << moekit_last_error();
  EXPECT_EQ(counter.calls.load(), calls) << "a run allocated";
  // A workspace outlives its layer's handle and gives its memory back to the same callbacks.
  moekit_workspace* workspace = nullptr;
  ASSERT_EQ(moekit_workspace_create(layer, &workspace), MOEKIT_OK);
  moekit_layer_free(layer);
  moekit_workspace_free(workspace);
  EXPECT_EQ(counter.live.load(), 0);

  counter.limit = 1024;
  EXPECT_EQ(moekit_layer_open(kModel.c_str(), -1, &options, &layer), MOEKIT_OUT_OF_MEMORY);
  EXPECT_EQ(layer, nullptr);
  EXPECT_EQ(counter.live.load(), 0);
  allocator.deallocate = nullptr;
  EXPECT_EQ(moekit_layer_open(kModel.c_str(), -1, &options, &layer), MOEKIT_INVALID_ARGUMENT);
}

TEST(CApi, UnknownBackendSaysWhatThereIs) {
  moekit_plan_options options = options_for(kTokens);
  options.backend = "no-such-member";
  moekit_layer* layer = nullptr;
  const moekit_status status = moekit_layer_open(kModel.c_str(), -1, &options, &layer);
  EXPECT_TRUE(status == MOEKIT_INVALID_ARGUMENT || status == MOEKIT_UNSUPPORTED) << status;
  EXPECT_NE(std::string(moekit_last_error()).find("no-such-member"), std::string::npos);
}

}  // namespace
