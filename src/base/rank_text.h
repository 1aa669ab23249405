// Whose error it is, said once.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <string>
#include <string_view>

namespace moekit {

/// "rank R: TEXT", or TEXT where it begins so already: an error may pass several places that name
/// the rank.
inline std::string rank_text(int64_t rank, std::string_view text) {
  const std::string prefix = fmt::format("rank {}: ", rank);
  return text.starts_with(prefix) ? std::string(text) : prefix + std::string(text);
}

}  // namespace moekit
