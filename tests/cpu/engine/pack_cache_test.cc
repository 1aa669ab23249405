// The pack cache: the same bits from the file as from packing, nothing believed that does not
// verify, and nobody else's file.
#include "engine/pack_cache.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <thread>

#include "moekit/error.h"
#include "quant/stored_digest.h"
#include "support/run_layer.h"

namespace moekit::test {
namespace {

namespace fs = std::filesystem;

constexpr const char* kSpec = "E=8,k=2,H=96,I=64,weights=nvfp4,tokens=8";

class PackCacheTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string name = (fs::temp_directory_path() / "moekit-cache-XXXXXX").string();
    ASSERT_NE(::mkdtemp(name.data()), nullptr);
    folder_ = name;
  }
  void TearDown() override { fs::remove_all(folder_); }

  PlanOptions options() const {
    PlanOptions o = options_for("cpu");
    o.max_tokens = 8;
    o.pack_cache = (folder_ / "packed").string();
    return o;
  }
  /// What a new layer says of its cache.
  std::string outcome(const LayerSource& source) const {
    return Layer::from_canonical(source.canonical, options()).explanation().plan.pack_cache;
  }
  std::vector<float> output(const LayerSource& source, const PlanOptions& o) const {
    return run_layer(source, o, 1, make_rows(source, 8));
  }
  std::vector<fs::path> files() const {
    std::vector<fs::path> found;
    for (const auto& entry : fs::directory_iterator(folder_ / "packed")) found.push_back(entry);
    return found;
  }
  void flip(const fs::path& path, std::streamoff offset) const {
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(offset);
    const char old = static_cast<char>(file.get());
    file.seekp(offset);
    file.put(static_cast<char>(old ^ 1));
  }

  fs::path folder_;
};

TEST_F(PackCacheTest, ReadsWhatItStored) {
  const LayerSource source = make_layer(kSpec);
  PlanOptions plain = options();
  plain.pack_cache.clear();
  const std::vector<float> expected = output(source, plain);
  EXPECT_EQ(outcome(source), "stored");
  EXPECT_EQ(outcome(source), "hit");
  EXPECT_EQ(output(source, options()), expected);
  EXPECT_EQ(files().size(), 1u);
}

TEST_F(PackCacheTest, IsOffUnlessAsked) {
  const LayerSource source = make_layer(kSpec);
  PlanOptions plain = options();
  plain.pack_cache.clear();
  EXPECT_EQ(Layer::from_canonical(source.canonical, plain).explanation().plan.pack_cache, "off");
  PlanOptions reference = options();
  reference.backend = "ref";  // reads the canonical weights in place
  EXPECT_EQ(Layer::from_canonical(source.canonical, reference).explanation().plan.pack_cache,
            "off");
}

TEST_F(PackCacheTest, OtherWeightsAreOtherFiles) {
  EXPECT_EQ(outcome(make_layer(kSpec, 1)), "stored");
  EXPECT_EQ(outcome(make_layer(kSpec, 2)), "stored");
  EXPECT_EQ(outcome(make_layer("E=8,k=2,H=96,I=64,weights=mxfp4,tokens=8", 1)), "stored");
  EXPECT_EQ(files().size(), 3u);
  EXPECT_EQ(outcome(make_layer(kSpec, 1)), "hit");
}

TEST_F(PackCacheTest, DamagedFilesAreReplaced) {
  const LayerSource source = make_layer(kSpec);
  const std::vector<float> expected = output(source, options());
  const fs::path file = files().at(0);
  const auto size = static_cast<std::streamoff>(fs::file_size(file));
  for (const std::streamoff offset : {std::streamoff{0}, std::streamoff{24}, std::streamoff{41},
                                      std::streamoff{50}, std::streamoff{4096}, size - 1}) {
    flip(file, offset);
    EXPECT_EQ(outcome(source), "damaged") << "byte " << offset;
    EXPECT_EQ(outcome(source), "hit") << "byte " << offset;
  }
  fs::resize_file(file, static_cast<uintmax_t>(size - 1));
  EXPECT_EQ(outcome(source), "damaged");
  fs::resize_file(file, 0);
  EXPECT_EQ(outcome(source), "damaged");
  EXPECT_EQ(output(source, options()), expected);
}

TEST_F(PackCacheTest, AFileUnderAnotherNameIsNotBelieved) {
  const LayerSource one = make_layer(kSpec, 1);
  const LayerSource two = make_layer(kSpec, 2);
  EXPECT_EQ(outcome(one), "stored");
  const fs::path first = files().at(0);
  EXPECT_EQ(outcome(two), "stored");
  for (const fs::path& file : files()) {
    if (file != first) fs::copy_file(first, file, fs::copy_options::overwrite_existing);
  }
  EXPECT_EQ(outcome(two), "damaged");
}

TEST_F(PackCacheTest, WritersSideBySideLeaveOneGoodFile) {
  const LayerSource source = make_layer(kSpec);
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i) threads.emplace_back([&] { outcome(source); });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(files().size(), 1u);  // no temporary file either
  EXPECT_EQ(outcome(source), "hit");
}

TEST_F(PackCacheTest, RanksKeepTheirOwnExperts) {
  const LayerSource source = make_layer(kSpec);
  const std::vector<float> rows = make_rows(source, 8);
  const std::vector<float> first = run_layer(source, options(), 3, rows);
  EXPECT_EQ(files().size(), 3u);
  EXPECT_EQ(run_layer(source, options(), 3, rows), first);
  EXPECT_EQ(files().size(), 3u);
}

TEST_F(PackCacheTest, RefusesADirectoryThatCannotBeOne) {
  const LayerSource source = make_layer(kSpec);
  std::ofstream(folder_ / "packed") << "a file";
  try {
    outcome(source);
    FAIL() << "a file was taken for a directory";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
    EXPECT_NE(std::string(error.what()).find("packed"), std::string::npos);
  }
}

TEST(StoredDigest, EveryConventionAndByteCounts) {
  const LayerSource source = make_layer("E=2,k=1,H=64,I=32,weights=int4_g32,tokens=1");
  const StoredMatrix& m = source.canonical->experts[0].up;
  auto digest = [](const StoredMatrix& matrix) {
    Digester digester;
    quant::add(digester, matrix);
    return digester.result();
  };
  const Digest whole = digest(m);
  EXPECT_EQ(digest(m), whole);
  std::vector<StoredMatrix> others(9, m);
  others[0].zero_offset += 1;
  others[1].code_offset += 1;
  others[2].global *= 2;
  others[3].global_sense = ScaleSense::divisor;
  others[4].input_scale *= 2;
  others[5].rows -= 1;
  others[6].scheme.group = 64;
  others[7].codes.order = PackOrder::awq;
  others[8] = source.canonical->experts[1].up;
  for (size_t i = 0; i < others.size(); ++i) EXPECT_NE(digest(others[i]), whole) << "change " << i;

  // A changed code and a changed scale, in copies of what the grids point at.
  auto bytes_of_grid = [](const CodeGrid& grid, int64_t rows, int64_t cols) {
    return std::vector<std::byte>(grid.data, grid.data + (rows - 1) * grid.row_stride +
                                                 (cols - 1) * grid.col_stride +
                                                 bytes_of(grid.unit));
  };
  StoredMatrix changed = m;
  std::vector<std::byte> codes = bytes_of_grid(m.codes, m.rows, m.cols / m.codes.pack);
  changed.codes.data = codes.data();
  EXPECT_EQ(digest(changed), whole);
  codes.back() ^= std::byte{0x80};
  EXPECT_NE(digest(changed), whole);
  changed = m;
  std::vector<std::byte> scales = bytes_of_grid(m.scales.values, m.rows, m.cols / 32);
  changed.scales.values.data = scales.data();
  EXPECT_EQ(digest(changed), whole);
  scales.back() ^= std::byte{1};
  EXPECT_NE(digest(changed), whole);
}

}  // namespace
}  // namespace moekit::test
