// Log: what the library would say to someone who asked. Off until configure() turns it on, so that
// a library user sees nothing; spdlog stays inside log.cc.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

namespace moekit::log {

enum class Level : uint8_t { debug, info, warning, off };

struct Options {
  Level console = Level::off;  ///< lowest level that goes to stderr
  std::string file;            ///< appended with everything from debug up; empty: none
};

/// Replaces the sinks of the whole process. Throws invalid_argument when `file` can't be opened.
void configure(const Options& options);

/// Whether some sink takes `level`: guards messages that are dear to format.
bool enabled(Level level);

/// Never throws: a full disk must not fail a run.
void write(Level level, std::string_view message) noexcept;

template <typename... Args>
void debug(fmt::format_string<Args...> format, Args&&... args) {
  if (enabled(Level::debug)) {
    write(Level::debug, fmt::format(format, std::forward<Args>(args)...));
  }
}
template <typename... Args>
void info(fmt::format_string<Args...> format, Args&&... args) {
  if (enabled(Level::info)) write(Level::info, fmt::format(format, std::forward<Args>(args)...));
}
template <typename... Args>
void warning(fmt::format_string<Args...> format, Args&&... args) {
  if (enabled(Level::warning)) {
    write(Level::warning, fmt::format(format, std::forward<Args>(args)...));
  }
}

}  // namespace moekit::log
