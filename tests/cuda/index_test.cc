// Index: one launch and two, and the border between them, against the host's own sort.
#include <algorithm>
#include <optional>
#include <utility>

#include "kernels/smxx_moe/api.h"
#include "tests/cuda/gpu.h"

namespace moekit::testing {
namespace {

namespace rows = kernels::smxx_moe;
using kernels::TaskShape;
using kernels::TileTask;

/// What a slot nobody wrote holds.
constexpr int32_t kUntouched = 77777;

/// An index with room for `slots` slots, and the checks of what calls leave there.
class IndexBed {
 public:
  IndexBed(int64_t slots, int32_t experts, const TaskShape (&shapes)[2], bool first_list = true,
           bool second_list = true)
      : experts_(experts),
        offsets_(experts + 1),
        row_slot_(slots),
        row_token_(slots),
        slot_row_(slots),
        counts_(4),
        chunks_(rows::chunk_count(slots) * experts),
        pairs_(2 * (experts + 1)),
        ticket_(std::vector<int32_t>{0, 0}),
        tasks_{DeviceArray<TileTask>(rows::task_capacity(shapes[0], slots, experts)),
               DeviceArray<TileTask>(rows::task_capacity(shapes[1], slots, experts))} {
    index_.expert_offsets = offsets_.data();
    index_.row_slot = row_slot_.data();
    index_.row_token = row_token_.data();
    index_.slot_row = slot_row_.data();
    index_.num_rows = counts_.data();
    index_.dropped = counts_.data() + 1;
    index_.chunk_counts = chunks_.data();
    index_.pair_offsets = pairs_.data();
    index_.ticket = ticket_.data();
    for (int list = 0; list < 2; ++list) {
      index_.shapes[list] = shapes[list];
      if (!(list == 0 ? first_list : second_list)) continue;
      index_.tasks[list] = tasks_[list].data();
      index_.num_tasks[list] = counts_.data() + 2 + list;
    }
  }

  /// Builds the index of `ids` ([tokens, top_k]) of which `live` tokens are real, and checks all of
  /// it. Without `live` the device gets no count.
  void build_and_check(const std::vector<int32_t>& ids, int32_t top_k,
                       std::optional<int32_t> live = {}) {
    const auto tokens = static_cast<int64_t>(ids.size()) / top_k;
    const DeviceArray<int32_t> device_ids(ids), device_live(std::vector<int32_t>{live.value_or(0)});
    slot_row_.set(std::vector<int32_t>(slot_row_.get().size(), kUntouched));
    counts_.set({kUntouched, kUntouched, kUntouched, kUntouched});
    device::check_cuda(
        rows::build_index(device_ids.data(), tokens, live ? device_live.data() : nullptr, top_k,
                          experts_, index_, nullptr),
        "index");
    const int64_t real =
        std::clamp<int64_t>(live.value_or(static_cast<int32_t>(tokens)), 0, tokens);
    check_rows(ids, top_k, real * top_k);
    if (::testing::Test::HasFatalFailure()) return;
    for (int list = 0; list < 2; ++list) check_list(list);
  }

 private:
  void check_rows(const std::vector<int32_t>& ids, int32_t top_k, int64_t slots) {
    const auto has_expert = [&](int64_t s) { return ids[s] >= 0 && ids[s] < experts_; };
    expected_.assign(experts_ + 1, 0);
    int32_t dropped = 0;
    for (int64_t s = 0; s < slots; ++s) {
      if (has_expert(s)) ++expected_[ids[s] + 1];
      dropped += !has_expert(s) && ids[s] != -1;
    }
    for (int32_t e = 0; e < experts_; ++e) expected_[e + 1] += expected_[e];
    ASSERT_EQ(offsets_.get(), expected_);
    ASSERT_EQ(ticket_.get(), (std::vector<int32_t>{0, 0}));
    const auto counts = counts_.get();
    ASSERT_EQ(counts[0], expected_.back());
    ASSERT_EQ(counts[1], dropped);
    const auto row_slot = row_slot_.get(), row_token = row_token_.get(), slot_row = slot_row_.get();
    for (int64_t s = 0; s < static_cast<int64_t>(slot_row.size()); ++s) {
      const int32_t row = slot_row[s];
      if (s >= slots || !has_expert(s)) {
        ASSERT_EQ(row, s >= slots ? kUntouched : -1) << "slot " << s;
        continue;
      }
      ASSERT_GE(row, expected_[ids[s]]);
      ASSERT_LT(row, expected_[ids[s] + 1]);
      ASSERT_EQ(row_slot[row], s);
      ASSERT_EQ(row_token[row], s / top_k);
    }
  }

  /// The list is the host's, entry by entry, and covers every row and column block once.
  void check_list(int list) {
    const int32_t num_tasks = counts_.get()[2 + list];
    if (index_.tasks[list] == nullptr) {
      ASSERT_EQ(num_tasks, kUntouched);
      return;
    }
    const TaskShape& shape = index_.shapes[list];
    std::vector<TileTask> expected;
    for (int32_t e = 0; e < experts_; ++e) {
      const int32_t num_rows = expected_[e + 1] - expected_[e];
      for (int32_t p = 0; p < shape.num_pairs(num_rows); ++p) {
        for (int32_t half = 0; half < 2; ++half) {
          expected.push_back(shape.task(e, expected_[e], num_rows, p, half));
        }
      }
    }
    const auto tasks = tasks_[list].get();
    ASSERT_EQ(num_tasks, static_cast<int32_t>(expected.size()));
    ASSERT_LE(expected.size(), tasks.size());
    std::vector<int> covered(static_cast<size_t>(expected_.back()) * shape.n_blocks, 0);
    for (size_t t = 0; t < expected.size(); ++t) {
      const TileTask& task = tasks[t];
      ASSERT_EQ(std::memcmp(&task, &expected[t], sizeof(TileTask)), 0)
          << "list " << list << ", task " << t;
      for (int32_t r = 0; r < task.num_rows; ++r) {
        ASSERT_GE(task.first_row + r, expected_[task.expert]);
        ASSERT_LT(task.first_row + r, expected_[task.expert + 1]);
        ++covered[static_cast<size_t>(task.first_row + r) * shape.n_blocks + task.n_block];
      }
    }
    ASSERT_TRUE(std::all_of(covered.begin(), covered.end(), [](int n) { return n == 1; }));
  }

  int32_t experts_;
  DeviceArray<int32_t> offsets_, row_slot_, row_token_, slot_row_, counts_, chunks_, pairs_,
      ticket_;
  DeviceArray<TileTask> tasks_[2];
  rows::Index index_;
  std::vector<int32_t> expected_;  // offsets of the last call
};

/// Odd and even column blocks, tiles that few and many rows fill.
constexpr TaskShape kShapes[2] = {{128, 5, 4}, {64, 2, 16}};

/// `hot` percent of the slots go to the last expert; of the others a few have none or a bad one.
std::vector<int32_t> random_ids(int64_t slots, int32_t experts, int hot, uint64_t seed = 7) {
  Random random(seed);
  std::vector<int32_t> ids(slots);
  for (auto& id : ids) {
    const int64_t draw = random.below(100);
    id = draw < hot ? experts - 1 : static_cast<int32_t>(random.below(experts));
    if (draw >= hot && draw == 99) id = -1;
    if (draw >= hot && draw == 98) id = experts + 5;
    if (draw >= hot && draw == 97) id = -2;
  }
  return ids;
}

struct IndexCase {
  const char* name;
  int64_t tokens;
  int32_t top_k;
  int32_t experts;
  int hot;  // as random_ids() takes it
};

class IndexTest : public ::testing::TestWithParam<IndexCase> {};

TEST_P(IndexTest, SortsAndCutsEveryRowOnce) {
  MOEKIT_NEEDS_GPU(80);
  const IndexCase c = GetParam();
  const int64_t slots = c.tokens * c.top_k;
  IndexBed bed(slots, c.experts, kShapes);
  bed.build_and_check(random_ids(slots, c.experts, c.hot), c.top_k);
}

// The border lies at kOneLaunchSlots: 8192.
static_assert(rows::kOneLaunchSlots == 1024 * 8 && rows::kOneLaunchSlots == 2731 * 3 - 1);
INSTANTIATE_TEST_SUITE_P(
    Shapes, IndexTest,
    ::testing::Values(
        IndexCase{"one", 1, 8, 128, 0}, IndexCase{"few", 3, 2, 5, 0},
        IndexCase{"single", 300, 1, 1, 0}, IndexCase{"decode", 64, 8, 256, 0},
        IndexCase{"block", 1024, 1, 128, 0}, IndexCase{"past_block", 205, 5, 128, 0},
        IndexCase{"chunk", 512, 4, 384, 0}, IndexCase{"past_chunk", 683, 3, 384, 0},
        IndexCase{"hot", 700, 4, 16, 90}, IndexCase{"wide", 900, 2, 2048, 30},
        IndexCase{"odd_experts", 600, 8, 1025, 0}, IndexCase{"border", 1024, 8, 256, 0},
        IndexCase{"past_border", 2731, 3, 256, 0}, IndexCase{"border_hot", 1024, 8, 128, 100},
        IndexCase{"past_border_hot", 2731, 3, 128, 100}, IndexCase{"most_experts", 16, 8, 4096, 0},
        IndexCase{"border_most_experts", 1024, 8, 4096, 0},
        IndexCase{"past_border_most_experts", 2731, 3, 4096, 10},
        IndexCase{"many", 5000, 8, 256, 0}),
    [](const auto& info) { return std::string(info.param.name); });

// From one token's slots to the most of one launch, and a token more, which takes two.
constexpr int64_t kBothPaths[] = {8, 64, rows::kOneLaunchSlots, rows::kOneLaunchSlots + 8};

TEST(Index, NoSlotHasAnExpert) {
  MOEKIT_NEEDS_GPU(80);
  for (const int64_t slots : kBothPaths) {
    IndexBed bed(slots, 128, kShapes);
    for (const int32_t id : {-1, 128}) {
      bed.build_and_check(std::vector<int32_t>(slots, id), 8);
      ASSERT_FALSE(HasFatalFailure()) << slots << " slots of " << id;
    }
  }
}

TEST(Index, ListsMayBeMissing) {
  MOEKIT_NEEDS_GPU(80);
  constexpr std::pair<bool, bool> lists[] = {{false, false}, {true, false}, {false, true}};
  for (const int64_t slots : kBothPaths) {
    for (const auto& [first, second] : lists) {
      IndexBed bed(slots, 100, kShapes, first, second);
      bed.build_and_check(random_ids(slots, 100, 20), 8);
      ASSERT_FALSE(HasFatalFailure()) << slots << " slots, lists " << first << second;
    }
  }
}

// Lists of more pairs than the blocks of one launch have threads; one column block; wide layers.
TEST(Index, ListsOfAnyLength) {
  MOEKIT_NEEDS_GPU(80);
  const TaskShape shapes[][2] = {{{128, 1, 16}, {16, 57, 2}}, {{8, 40, 16}, {128, 56, 16}}};
  for (const auto& pair : shapes) {
    for (const int64_t slots : kBothPaths) {
      for (const int32_t experts : {2, 256, 1500}) {
        IndexBed bed(slots, experts, pair);
        bed.build_and_check(random_ids(slots, experts, 30), 8);
        ASSERT_FALSE(HasFatalFailure()) << slots << " slots, " << experts << " experts";
      }
    }
  }
}

TEST(Index, LiveCountBoundsTheCall) {
  MOEKIT_NEEDS_GPU(80);
  for (const int64_t slots : kBothPaths) {
    const auto tokens = static_cast<int32_t>(slots / 8);
    const auto ids = random_ids(slots, 96, 10);
    IndexBed bed(slots, 96, kShapes);
    for (const int32_t live : {0, 1, tokens / 2, tokens - 1, tokens, tokens + 3, -4}) {
      bed.build_and_check(ids, 8, live);
      ASSERT_FALSE(HasFatalFailure()) << slots << " slots, " << live << " live tokens";
    }
  }
}

// Neither path leaves anything behind that the other one, or itself, could trip over.
TEST(Index, CallsOfAllSizesTakeTurns) {
  MOEKIT_NEEDS_GPU(80);
  constexpr int64_t kMost = rows::kOneLaunchSlots * 2;
  IndexBed bed(kMost, 300, kShapes);
  uint64_t seed = 1;
  for (const int64_t slots : {kMost, int64_t{64}, int64_t{64}, kMost, kMost, int64_t{8192},
                              int64_t{8200}, int64_t{8}, int64_t{8200}, int64_t{512}}) {
    bed.build_and_check(random_ids(slots, 300, 5, ++seed), 8);
    ASSERT_FALSE(HasFatalFailure()) << slots << " slots";
  }
}

TEST(Index, DroppedMayBeMissingAndACallEmpty) {
  MOEKIT_NEEDS_GPU(80);
  const std::vector<int32_t> ids(64, 1);
  DeviceArray<int32_t> device_ids(ids), offsets(4), row_slot(64), row_token(64), slot_row(64),
      num_rows(1), ticket(std::vector<int32_t>{0, 0});
  rows::Index index;
  index.num_rows = num_rows.data();
  index.expert_offsets = offsets.data();
  index.row_slot = row_slot.data();
  index.row_token = row_token.data();
  index.slot_row = slot_row.data();
  index.ticket = ticket.data();
  device::check_cuda(rows::build_index(device_ids.data(), 32, nullptr, 2, 3, index, nullptr),
                     "index");
  EXPECT_EQ(num_rows.get()[0], 64);
  EXPECT_EQ(offsets.get(), (std::vector<int32_t>{0, 0, 64, 64}));
  device::check_cuda(rows::build_index(device_ids.data(), 0, nullptr, 2, 3, index, nullptr),
                     "index");
  EXPECT_EQ(num_rows.get()[0], 0);
  EXPECT_EQ(offsets.get(), (std::vector<int32_t>{0, 0, 0, 0}));
}

}  // namespace
}  // namespace moekit::testing
