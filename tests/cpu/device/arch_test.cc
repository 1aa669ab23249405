#include "device/arch.h"

#include <gtest/gtest.h>

#include "device/gpu.h"
#include "moekit/error.h"

namespace moekit::device {
namespace {

TEST(Arch, KnownNamesAreReadAndWrittenBack) {
  for (const char* name : {"80", "89", "90", "90a", "100a", "103a", "120", "120a", "121a"}) {
    EXPECT_EQ(to_string(parse_arch(name)), name);
  }
  EXPECT_EQ(parse_arch("90a"), (Arch{9, 0, true}));
  EXPECT_EQ(parse_arch("121"), (Arch{12, 1, false}));
}

TEST(Arch, OthersAreRefusedWithTheForm) {
  for (const char* name :
       {"", "a", "9", "77", "80a", "90b", "sm_90", "90aa", " 90", "900", "9.0"}) {
    try {
      parse_arch(name);
      ADD_FAILURE() << "'" << name << "' was taken";
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), ErrorCode::invalid_argument) << name;
      EXPECT_NE(std::string(e.what()).find("90a"), std::string::npos) << e.what();
    }
  }
}

// A target without `a` runs on later minor numbers of its major; one with `a` on its own GPU only.
TEST(Arch, CodeRunsWhereCudaSaysSo) {
  struct Case {
    const char* targets;
    const char* arch;
    bool runs;
  };
  const Case cases[] = {
      {"80,90a,100a,120a", "80", true},
      {"80,90a,100a,120a", "86", true},
      {"80,90a,100a,120a", "89", true},
      {"80,90a,100a,120a", "75", false},
      {"80,90a,100a,120a", "90a", true},
      {"80,90a,100a,120a", "90", false},
      {"80,90a,100a,120a", "100a", true},
      {"80,90a,100a,120a", "103a", false},
      {"80,90a,100a,120a", "120a", true},
      {"80,90a,100a,120a", "121a", false},
      {"86", "80", false},
      {"90a", "100a", false},
      {"100", "103", true},
      {"100", "103a", true},
      {"100", "120a", false},
      {"", "90a", false},
  };
  for (const Case& c : cases) {
    EXPECT_EQ(has_code_for(c.targets, parse_arch(c.arch)), c.runs) << c.targets << " on " << c.arch;
  }
}

}  // namespace
}  // namespace moekit::device
