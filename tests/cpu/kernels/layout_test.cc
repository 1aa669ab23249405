// Arithmetic that device code relies on, tested without a GPU: swizzles, descriptors, register
// fragments, TMA rules, cutting of rows into tasks, epilogue activations.
#include <gtest/gtest.h>

#include <cmath>
#include <set>
#include <vector>

#include "experts/ref/activation.h"
#include "kernels/common/activation.h"
#include "kernels/common/fragment.h"
#include "kernels/common/swizzle.h"
#include "kernels/common/tensor_map_spec.h"
#include "kernels/common/tile_task.h"

namespace moekit::kernels {
namespace {

TEST(Swizzle, IsAnInvolutionInsideRows) {
  for (uint32_t offset = 0; offset < 4096; ++offset) {
    const uint32_t there = swizzle_128b(offset);
    EXPECT_EQ(swizzle_128b(there), offset);
    EXPECT_EQ(there / 128, offset / 128);
    EXPECT_EQ(there % 16, offset % 16);
  }
}

TEST(Swizzle, ChunkOffsetIsTheSwizzleOfTheChunk) {
  for (uint32_t row = 0; row < 64; ++row) {
    for (uint32_t chunk = 0; chunk < 8; ++chunk) {
      EXPECT_EQ(tile_chunk_offset(row, chunk), swizzle_128b(row * 128 + chunk * 16));
    }
  }
}

TEST(Swizzle, EightRowsAtOneChunkTouchAllBanks) {
  for (const uint32_t row_chunks : {8u, 16u}) {
    for (uint32_t chunk = 0; chunk < row_chunks; ++chunk) {
      std::set<uint32_t> groups;  // groups of four banks
      for (uint32_t row = 0; row < 8; ++row) {
        groups.insert(staging_chunk_offset(row, chunk, row_chunks) / 16 % 8);
      }
      EXPECT_EQ(groups.size(), 8u);
    }
  }
}

TEST(Swizzle, StagingOffsetsAreAllDistinct) {
  for (const uint32_t row_chunks : {8u, 16u}) {
    std::set<uint32_t> seen;
    for (uint32_t row = 0; row < 16; ++row) {
      for (uint32_t chunk = 0; chunk < row_chunks; ++chunk) {
        const uint32_t offset = staging_chunk_offset(row, chunk, row_chunks);
        EXPECT_LT(offset, 16 * row_chunks * 16);
        seen.insert(offset);
      }
    }
    EXPECT_EQ(seen.size(), 16 * row_chunks);
  }
}

TEST(Descriptor, FieldsAreWhereTheInstructionReadsThem) {
  const uint64_t d = wgmma_descriptor(0x12400);
  EXPECT_EQ(d & 0x3fff, 0x12400u >> 4);
  EXPECT_EQ(d >> 16 & 0x3fff, 1u);
  EXPECT_EQ(d >> 32 & 0x3fff, 1024u >> 4);
  EXPECT_EQ(d >> 49 & 7, 0u);  // base offset: tiles start on an atom
  EXPECT_EQ(d >> 62, 1u);      // 128-byte swizzle
  EXPECT_EQ(wgmma_descriptor(0x12400) + kDescriptorStepK, wgmma_descriptor(0x12420));
}

TEST(Fragment, EveryElementHasOneOwner) {
  for (const int columns : {8, 128, 256}) {
    std::vector<int> owners(64 * columns, 0);
    for (int thread = 0; thread < kWarpgroup; ++thread) {
      for (int i = 0; i < columns / 2; ++i) {
        ++owners[accumulator_row(thread, i) * columns + accumulator_column(thread, i)];
      }
    }
    for (const int n : owners) ASSERT_EQ(n, 1);
  }
}

TEST(Fragment, GateAndUpOfAColumnMeetInOneThread) {
  for (int thread = 0; thread < kWarpgroup; ++thread) {
    for (int i = 0; i < 32; ++i) {
      EXPECT_EQ(accumulator_row(thread, i), accumulator_row(thread, i + 32));
      EXPECT_EQ(accumulator_column(thread, i) + 64, accumulator_column(thread, i + 32));
    }
  }
}

TensorMapSpec good_spec() {
  TensorMapSpec s;
  s.base = reinterpret_cast<const void*>(uintptr_t{0x100000});
  s.rank = 4;
  s.dims = {2880, 2880, 2, 128};
  s.strides = {5760, 2880 * 5760, 2 * 2880 * 5760};
  s.box = {64, 64, 2, 1};
  return s;
}

TEST(TensorMap, AcceptsOurShapesAndNamesTheBrokenRule) {
  EXPECT_EQ(broken_rule(good_spec()), nullptr);
  TensorMapSpec s = good_spec();
  s.base = reinterpret_cast<const void*>(uintptr_t{0x100008});
  EXPECT_STREQ(broken_rule(s), "the base must be 16-byte aligned");
  s = good_spec();
  s.strides[0] = 5768;
  EXPECT_STREQ(broken_rule(s), "strides must be multiples of 16 bytes below 2^40");
  s = good_spec();
  s.box[1] = 257;
  EXPECT_STREQ(broken_rule(s), "box sides must lie in [1, 256]");
  s = good_spec();
  s.dims[3] = 0;  // no experts: a descriptor must not be made
  EXPECT_STREQ(broken_rule(s), "dimensions must lie in [1, 2^32]");
  s = good_spec();
  s.element = TileElement::b8;
  EXPECT_STREQ(broken_rule(s), "the box must be 128 bytes wide");
}

TEST(TaskShape, EveryTileOnceForAllCounts) {
  for (const int32_t n_blocks : {1, 2, 5, 12}) {
    for (const int32_t group : {2, 4, 16}) {
      const TaskShape shape{128, n_blocks, group};
      for (int32_t rows = 0; rows < 2300; rows += 53) {
        std::vector<int> covered(static_cast<size_t>(rows) * n_blocks, 0);
        for (int32_t pair = 0; pair < shape.num_pairs(rows); ++pair) {
          for (int32_t half = 0; half < 2; ++half) {
            const TileTask t = shape.task(3, 1000, rows, pair, half);
            EXPECT_EQ(t.expert, 3);
            EXPECT_LE(t.num_rows, 128);
            for (int32_t r = 0; r < t.num_rows; ++r) {
              ++covered[static_cast<size_t>(t.first_row - 1000 + r) * n_blocks + t.n_block];
            }
          }
        }
        for (const int n : covered) ASSERT_EQ(n, 1) << rows << " rows, " << n_blocks << " blocks";
      }
    }
  }
}

TEST(TaskShape, PairsShareWeightsWhereTwoRowTilesAreThere) {
  const TaskShape shape{128, 3, 16};
  for (int32_t pair = 0; pair < 3; ++pair) {
    const TileTask a = shape.task(0, 0, 256, pair, 0), b = shape.task(0, 0, 256, pair, 1);
    EXPECT_EQ(a.n_block, b.n_block);
    EXPECT_EQ(a.first_row + 128, b.first_row);
  }
}

TEST(TaskShape, ReadersOfTheSameWeightsAreNeighbours) {
  for (const int32_t n_blocks : {4, 7}) {
    for (const int32_t rows : {5, 300, 128 * 5, 128 * 8}) {
      const TaskShape shape{128, n_blocks, 16};
      int32_t last = 0;
      for (int32_t pair = 0; pair < shape.num_pairs(rows); ++pair) {
        for (int32_t half = 0; half < 2; ++half) {
          const TileTask t = shape.task(0, 0, rows, pair, half);
          if (t.num_rows == 0) continue;
          EXPECT_GE(t.n_block / 2, last) << "pair " << pair << " of " << rows << " rows";
          last = t.n_block / 2;
        }
      }
    }
  }
}

TEST(Activation, EpilogueFormsAreTheDefinitions) {
  for (const ActivationKind kind :
       {ActivationKind::silu, ActivationKind::gelu, ActivationKind::gelu_tanh,
        ActivationKind::swiglu_oai, ActivationKind::relu2}) {
    for (const float limit : {INFINITY, 7.0f, 0.5f}) {
      ActivationSpec spec;
      spec.kind = kind;
      spec.limit = limit;
      const EpilogueActivation epilogue = epilogue_activation(spec);
      for (float gate = -30.0f; gate < 30.0f; gate += 0.37f) {
        for (const float up : {-20.0f, -0.3f, 0.0f, 1.7f, 9.0f}) {
          const double exact = experts::ref::activate<double>(spec, gate, up);
          // A few roundings of z reach sigmoid(z) with |z| times their size; |z| is below 200 here.
          const double room = 1e-6 * std::fabs(exact) + 1e-5 * std::fabs(exact) + 1e-30;
          ASSERT_NEAR(apply_gated(epilogue, gate, up), exact, room + 2e-7 * std::fabs(gate * up))
              << "kind " << static_cast<int>(kind) << " gate " << gate << " up " << up;
        }
      }
    }
  }
  const EpilogueActivation silu = epilogue_activation({});
  EXPECT_TRUE(std::isnan(apply_gated(silu, NAN, 1.0f)));
  EXPECT_TRUE(std::isnan(apply_gated(silu, 1.0f, NAN)));
  EXPECT_EQ(apply_gated(silu, 1.5f, -2.0f), apply_gated_sigmoid(silu, 1.5f, -2.0f));
}

}  // namespace
}  // namespace moekit::kernels
