// Placement files: round trip, and every kind of damage with its own words.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <string>

#include "moekit/error.h"
#include "moekit/placement.h"

namespace moekit {
namespace {

/// A file that goes away with the test.
class PlacementFile : public testing::Test {
 protected:
  PlacementFile()
      : path_(std::filesystem::temp_directory_path() /
              ("moekit_placement_" + std::to_string(getpid()) + ".json")) {}
  ~PlacementFile() override { std::filesystem::remove(path_); }

  void write(const std::string& text) { std::ofstream(path_) << text; }
  /// What reading `text` for 4 experts on 2 ranks says.
  std::pair<ErrorCode, std::string> refusal(const std::string& text) {
    write(text);
    try {
      load_placement(path_, 4, 2);
    } catch (const Error& e) {
      return {e.code(), e.what()};
    }
    return {ErrorCode::ok, "accepted"};
  }
  void expect_corrupt(const std::string& text, const std::string& words) {
    const auto [code, what] = refusal(text);
    EXPECT_EQ(code, ErrorCode::corrupt_file) << text << ": " << what;
    EXPECT_NE(what.find(words), std::string::npos) << text << ": " << what;
    EXPECT_NE(what.find(path_), std::string::npos) << what;
  }

  const std::string path_;
};

TEST_F(PlacementFile, RoundTrip) {
  for (const Placement& placement :
       {Placement{{{0, 1}, {2, 3}}}, Placement{{{3, 0, 1}, {}, {2, 0}}},
        round_robin_placement(9, 4), linear_placement(2, 5)}) {
    save_placement(path_, placement);
    int64_t experts = 0;
    for (const auto& list : placement.experts_of_rank) {
      for (const int32_t e : list) experts = std::max<int64_t>(experts, e + 1);
    }
    EXPECT_EQ(load_placement(path_, experts, static_cast<int>(placement.experts_of_rank.size())),
              placement);
  }
}

TEST_F(PlacementFile, TakesWhatThePageShows) {
  EXPECT_EQ(refusal("{\"experts_of_rank\": [[0, 1], [2, 3]]}").second, "accepted");
  EXPECT_EQ(refusal(" {\n\"made_by\": \"a tool\", \"experts_of_rank\": [[0,1,2,3],[]]}\n").second,
            "accepted");
}

TEST_F(PlacementFile, RefusesEveryKindOfDamage) {
  expect_corrupt("", "JSON");
  expect_corrupt("[[0, 1], [2, 3]]", "an object with \"experts_of_rank\"");
  expect_corrupt("{\"experts_of_rank\": [[0, 1], [2, 3]]", "malformed JSON");
  expect_corrupt("{\"experts_of_rank\": [[0, 1], [2, 3]]} trailing", "the end of the document");
  expect_corrupt("{\"experts\": [[0, 1], [2, 3]]}", "experts_of_rank");
  expect_corrupt("{\"experts_of_rank\": null}", "a list of experts for each rank");
  expect_corrupt("{\"experts_of_rank\": {\"0\": [0]}}", "a list of experts for each rank");
  expect_corrupt("{\"experts_of_rank\": [[0, 1], 2, 3]}", "a list of expert ids");
  expect_corrupt("{\"experts_of_rank\": [[0, 1], null]}", "a list of expert ids");
  expect_corrupt("{\"experts_of_rank\": [[0, 1], [2, \"3\"]]}", "experts_of_rank");
  expect_corrupt("{\"experts_of_rank\": [[0, 1], [2, null]]}", "experts_of_rank");
  expect_corrupt("{\"experts_of_rank\": [[0, 1], [2, 2.5]]}", "experts_of_rank");
  expect_corrupt("{\"experts_of_rank\": [[0, 1], [2, true]]}", "experts_of_rank");
  expect_corrupt("{\"experts_of_rank\": [[0, 1], [2, 4]]}", "4");
  expect_corrupt("{\"experts_of_rank\": [[0, 1], [2, -1]]}", "-1");
  expect_corrupt("{\"experts_of_rank\": [[0, 1], [2, 99999999999999999999]]}", "experts_of_rank");
  expect_corrupt("{\"experts_of_rank\": [[0, 1], [2, 2, 3]]}", "rank 1 lists expert 2 twice");
  expect_corrupt("{\"experts_of_rank\": [[0, 1], [2]]}", "expert 3 of 4 is on no rank");
  expect_corrupt("{\"experts_of_rank\": [[0, 1, 2, 3, 0], [1]]}", "rank 0 lists 5 experts");
  expect_corrupt("{\"experts_of_rank\": []}", "at least 1 rank");
  expect_corrupt("{\"experts_of_rank\": [[0, 1], [2, 3]], \"experts_of_rank\": []}",
                 "experts_of_rank");
}

TEST_F(PlacementFile, AnotherNumberOfRanksIsTheCallersFault) {
  const auto [code, what] = refusal("{\"experts_of_rank\": [[0, 1], [2], [3]]}");
  EXPECT_EQ(code, ErrorCode::invalid_argument);
  EXPECT_NE(what.find("lists experts of 3 ranks, the layer runs on 2"), std::string::npos) << what;
}

TEST_F(PlacementFile, MissingFileAndFolder) {
  for (const std::string& path : {std::string("/nowhere/placement.json"), std::string("/tmp")}) {
    try {
      load_placement(path, 4, 2);
      ADD_FAILURE() << path;
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), ErrorCode::invalid_argument) << e.what();
      EXPECT_NE(std::string(e.what()).find(path), std::string::npos);
    }
  }
  EXPECT_THROW(save_placement("/nowhere/placement.json", linear_placement(4, 2)), Error);
}

}  // namespace
}  // namespace moekit
