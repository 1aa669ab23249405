#include "base/log.h"

#include <spdlog/logger.h>
#include <spdlog/sinks/basic_file_sink.h>
#include <spdlog/sinks/stdout_sinks.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>
#include <mutex>
#include <vector>

#include "base/check.h"

namespace moekit::log {
namespace {

// The threshold is read without the lock on every message; the logger only under it.
std::atomic<Level> threshold{Level::off};
std::mutex mutex;
std::shared_ptr<spdlog::logger> logger;

spdlog::level::level_enum to_spdlog(Level level) {
  switch (level) {
    case Level::debug: return spdlog::level::debug;
    case Level::info: return spdlog::level::info;
    case Level::warning: return spdlog::level::warn;
    case Level::off: return spdlog::level::off;
  }
  return spdlog::level::off;
}

}  // namespace

void configure(const Options& options) {
  std::vector<spdlog::sink_ptr> sinks;
  Level lowest = Level::off;
  if (options.console != Level::off) {
    auto sink = std::make_shared<spdlog::sinks::stderr_sink_mt>();
    sink->set_level(to_spdlog(options.console));
    sink->set_pattern("moekit: %l: %v");
    sinks.push_back(std::move(sink));
    lowest = options.console;
  }
  if (!options.file.empty()) {
    try {
      // spdlog would make missing folders; a mistyped path shall be an error.
      if (std::FILE* probe = std::fopen(options.file.c_str(), "a")) {
        std::fclose(probe);
      } else {
        fail(ErrorCode::invalid_argument,
             "log file {}: expected a path that can be written, got: {}; name another file",
             options.file, std::strerror(errno));
      }
      auto sink = std::make_shared<spdlog::sinks::basic_file_sink_mt>(options.file);
      sink->set_pattern("%Y-%m-%dT%H:%M:%S.%e %P/%t %l %v");
      sinks.push_back(std::move(sink));
    } catch (const spdlog::spdlog_ex& e) {
      fail(ErrorCode::invalid_argument,
           "log file {}: expected a path that can be written, got {}; name another file",
           options.file, e.what());
    }
    lowest = Level::debug;
  }
  std::lock_guard lock(mutex);
  logger.reset();
  if (!sinks.empty()) {
    logger = std::make_shared<spdlog::logger>("moekit", sinks.begin(), sinks.end());
    logger->set_level(to_spdlog(lowest));
    logger->flush_on(spdlog::level::debug);
    logger->set_error_handler([](const std::string&) {});
  }
  threshold.store(lowest, std::memory_order_relaxed);
}

bool enabled(Level level) {
  return level != Level::off && level >= threshold.load(std::memory_order_relaxed);
}

void write(Level level, std::string_view message) noexcept try {
  std::lock_guard lock(mutex);
  if (logger) logger->log(to_spdlog(level), "{}", message);
} catch (...) {
  // Losing a log line is better than losing the run.
}

}  // namespace moekit::log
