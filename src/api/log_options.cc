// version() and the log's switch for programs.
#include "base/log.h"
#include "moekit/tools.h"

namespace moekit {

const char* version() { return MOEKIT_VERSION; }

void configure_log(const LogOptions& options) {
  auto level = [](LogLevel l) {
    switch (l) {
      case LogLevel::debug: return log::Level::debug;
      case LogLevel::info: return log::Level::info;
      case LogLevel::warning: return log::Level::warning;
      case LogLevel::off: return log::Level::off;
    }
    return log::Level::off;
  };
  log::configure({level(options.console), options.file});
}

}  // namespace moekit
