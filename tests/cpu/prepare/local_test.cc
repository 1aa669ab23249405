// The members of one rank: rows in place or converted, both layouts, ids and capacity.
#include <gtest/gtest.h>

#include <vector>

#include "cpu/prepare/world.h"
#include "prepare/members.h"

namespace moekit::prepare {
namespace {

class LocalMember : public testing::TestWithParam<const PrepareFinalize*> {
 protected:
  World world() const {
    World w;
    w.member = GetParam();
    w.tokens = {9};
    return w;
  }
  bool batched() const { return GetParam() == &local_batched_member(); }
};

TEST_P(LocalMember, RowsOfEveryType) {
  for (DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    for (int64_t step : {1, 2}) {
      for (int threads : {1, 2}) {
        World w = world();
        w.hidden_dtype = dtype;
        w.element_step = step;
        w.row_gap = 3;
        w.threads = threads;
        w.calls = 2;
        w.tokens = {threads == 1 ? 9 : 1200};
        expect_exact(w);
      }
    }
  }
}

TEST_P(LocalMember, RowsInPlaceAreNotCopied) {
  for (DType dtype : {DType::f32, DType::bf16}) {
    World w = world();
    w.hidden_dtype = dtype;
    w.row_gap = 8;
    int64_t stride = 0;
    ActivationFormat format = ActivationFormat::nvfp4;
    w.look = [&](int, const ExpertRows& rows) {
      stride = rows.record_stride;
      format = rows.format.format;
    };
    expect_exact(w);
    if (batched()) continue;
    const int64_t element = dtype == DType::f32 ? 4 : 2;
    EXPECT_EQ(stride, (w.width + 8) * element);
    EXPECT_EQ(format, dtype == DType::f32 ? ActivationFormat::f32 : ActivationFormat::bf16);
  }
}

TEST_P(LocalMember, QuantizesWhoeverHasTheDuty) {
  for (ActivationFormat format :
       {ActivationFormat::bf16, ActivationFormat::fp8_tensor, ActivationFormat::fp8_token,
        ActivationFormat::fp8_block, ActivationFormat::mxfp8, ActivationFormat::mxfp4,
        ActivationFormat::nvfp4}) {
    for (QuantDuty duty : {QuantDuty::source, QuantDuty::destination}) {
      World w = world();
      w.input = w.wire = format;
      w.quant_duty = format == ActivationFormat::bf16 ? QuantDuty::none : duty;
      w.width = 160;
      expect_exact(w);
      w.hidden_dtype = DType::bf16;
      w.threads = 2;
      w.tokens = {700};
      expect_exact(w);
      w.pass_records = format != ActivationFormat::bf16;
      expect_exact(w);
    }
  }
}

TEST_P(LocalMember, WhoWeighsAndWhoSums) {
  for (Summer summer : {Summer::combine, Summer::reduce, Summer::experts}) {
    World w = world();
    w.duty.summer = summer;
    w.duty.weigher = summer == Summer::experts ? Weigher::experts : Weigher::combine;
    expect_exact(w);
    w.combine = Combine::rank_sums;
    expect_exact(w);
    w.combine_dtype = DType::bf16;
    expect_exact(w);
  }
  World w = world();
  w.top_k = 1;
  w.duty.weigher = Weigher::input;
  expect_exact(w);
  w.combine_dtype = DType::bf16;
  expect_exact(w);
}

TEST_P(LocalMember, SumsThatWouldLoseTheBitsOfSlotsAreRefused) {
  World w = world();
  w.combine_dtype = DType::bf16;
  w.duty.summer = Summer::reduce;
  const auto results = run_world(w);
  EXPECT_EQ(results[0].code, ErrorCode::unsupported) << results[0].error;
}

TEST_P(LocalMember, NoTokensAndNoExperts) {
  World w = world();
  w.tokens = {0};
  expect_exact(w);
  w.tokens = {5};
  w.id = [](int, int64_t, int64_t) { return -1; };
  const auto results = expect_exact(w);
  for (float v : results[0].out) EXPECT_EQ(v, 0.0f);
  EXPECT_EQ(results[0].dropped, 0);
}

TEST_P(LocalMember, DuplicateIdsCountEach) {  // F14
  for (int64_t tokens : {8, 257}) {
    World w = world();
    w.experts = 16;
    w.top_k = 4;
    w.tokens = {tokens};
    w.id = [](int, int64_t, int64_t j) { return std::vector<int32_t>{5, 9, 9, 2}[j]; };
    expect_exact(w);
  }
  World w = world();
  w.top_k = 3;
  w.tokens = {4};
  w.id = [](int, int64_t, int64_t) { return 0; };
  w.look = [&](int, const ExpertRows& rows) {
    if (batched()) {
      EXPECT_EQ(rows.expert_num_rows[0], 4);
    }  // one row a token
  };
  expect_exact(w);
}

TEST_P(LocalMember, MaskedSlotsAreNeverRead) {  // F11, F12
  World w = world();
  w.tokens = {2};
  w.id = [](int, int64_t t, int64_t j) { return t == 0 && j == 1 ? 7 : -1; };
  const auto results = expect_exact(w);
  for (int64_t i = w.width; i < 2 * w.width; ++i) EXPECT_EQ(results[0].out[i], 0.0f);
}

TEST_P(LocalMember, IdsOutOfRange) {  // F13
  World w = world();
  w.tokens = {3};
  w.id = [](int, int64_t t, int64_t j) {
    const int32_t ids[3][2] = {{3, 2}, {1000000, 2}, {2147483647, -7}};
    return ids[t][j];
  };
  auto results = run_world(w);
  EXPECT_EQ(results[0].code, ErrorCode::invalid_argument);
  EXPECT_NE(results[0].error.find("row 1, slot 0"), std::string::npos) << results[0].error;
  EXPECT_NE(results[0].error.find("expert 1000000"), std::string::npos) << results[0].error;
  w.checked = false;
  results = expect_exact(w);
  EXPECT_EQ(results[0].dropped, 3);
}

TEST_P(LocalMember, TooManyTokens) {
  World w = world();
  w.max_tokens = 8;
  w.tokens = {9};
  const auto results = run_world(w);
  EXPECT_EQ(results[0].code, ErrorCode::invalid_argument);
  EXPECT_NE(results[0].error.find("9 tokens"), std::string::npos) << results[0].error;
}

TEST_P(LocalMember, Capacity) {
  World w = world();
  w.tokens = {6};
  w.id = [](int, int64_t, int64_t j) { return j == 0 ? 3 : 3 + 2; };
  w.capacity = {CapacityPolicy::refuse, 4};
  auto results = run_world(w);
  EXPECT_EQ(results[0].code, ErrorCode::invalid_argument);
  EXPECT_NE(results[0].error.find("capacity is 4"), std::string::npos) << results[0].error;

  w.capacity = {CapacityPolicy::drop, 4};
  w.look = [&](int, const ExpertRows& rows) {
    EXPECT_LE(rows.num_rows, w.member->traits(problem_of(w, 0)).max_sum_rows);
    for (int64_t e = 0; batched() && e < w.experts; ++e) {
      EXPECT_LE(rows.expert_num_rows[e], w.capacity.max_rows);
    }
  };
  results = run_world(w);
  ASSERT_EQ(results[0].code, ErrorCode::ok) << results[0].error;
  EXPECT_EQ(results[0].dropped, 4);  // two tokens, both slots
  const auto expected = expected_outputs(w);
  for (int64_t i = 0; i < 6 * w.width; ++i) {
    EXPECT_EQ(results[0].out[i], i < 4 * w.width ? expected[0][i] : 0.0f) << i;
  }
  w.capacity = {CapacityPolicy::refuse, 6};
  expect_exact(w);
}

INSTANTIATE_TEST_SUITE_P(Members, LocalMember,
                         testing::Values(&local_member(), &local_batched_member()),
                         [](const auto& info) { return std::string(info.param->name()); });

TEST(LocalBatched, OriginsSayWhereRowsComeFrom) {
  World w;
  w.member = &local_batched_member();
  w.tokens = {20};
  int64_t seen = 0;
  w.look = [&](int, const ExpertRows& rows) {
    for (int64_t e = 0; e < w.experts; ++e) {
      for (int64_t p = 0; p < rows.expert_num_rows[e]; ++p) {
        const RowOrigin& origin = rows.origins[e * rows.rows_per_expert + p];
        EXPECT_EQ(origin.rank, 0);
        EXPECT_EQ(id_of(w, 0, origin.token, origin.slot), e);
        EXPECT_EQ(origin.weight, weight_of(w, 0, origin.token, origin.slot));
        ++seen;
      }
    }
  };
  expect_exact(w);
  EXPECT_GT(seen, 0);
}

TEST(Local, ServesOneRank) {
  World w;
  w.ranks = 2;
  Problem p = problem_of(w, 0);
  p.device.type = DeviceType::cuda;
  const Support batched = local_batched_member().supports(p);
  ASSERT_EQ(batched.reasons().size(), 2u);
  EXPECT_EQ(batched.reasons()[0].code, ReasonCode::device);
  EXPECT_EQ(batched.reasons()[1].code, ReasonCode::parallel);
  // A device's experts fetch Standard rows.
  const Support standard = local_member().supports(p);
  ASSERT_EQ(standard.reasons().size(), 1u);
  EXPECT_EQ(standard.reasons()[0].code, ReasonCode::parallel);
}

}  // namespace
}  // namespace moekit::prepare
