// The folders of tests/fixtures, as test parameters.
#pragma once

#include <algorithm>
#include <filesystem>
#include <string>
#include <vector>

namespace moekit {

inline std::vector<std::string> fixture_names() {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(MOEKIT_FIXTURES)) {
    if (entry.is_directory()) names.push_back(entry.path().filename().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

}  // namespace moekit
