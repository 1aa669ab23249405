#include "session.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cstdio>

#include "moekit/tools.h"
#include "report.h"

namespace moekit::cli {

void Session::add_flags(CLI::App& verb) {
  verb.add_flag("--json", json, "Machine-readable output: one JSON object, or one a row");
  verb.add_flag("--quiet", quiet, "No progress and no warnings");
  verb.add_flag("--verbose", verbose, "Say on stderr what is being done");
  verb.add_option("--log", log_file, "Append a detailed log to FILE")->type_name("FILE");
}

void Session::configure_log() const {
  LogOptions options;
  if (verbose) {
    options.console = LogLevel::debug;
  } else if (!quiet && isatty(STDERR_FILENO) != 0) {
    options.console = LogLevel::warning;
  }
  options.file = log_file;
  moekit::configure_log(options);
}

void Session::print_json(const nlohmann::ordered_json& object) const {
  // Text from files may not be UTF-8; a replacement character beats a failed verb.
  const std::string text = object.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  std::fwrite(text.data(), 1, text.size(), stdout);
  std::fputc('\n', stdout);
  std::fflush(stdout);
}

void Session::warn(const std::string& message) const {
  if (quiet || isatty(STDERR_FILENO) == 0) return;
  fmt::print(stderr, "moekit: warning: {}\n", message);
}

Progress::Progress(const Session& session)
    : active_(!session.quiet && !session.verbose && isatty(STDERR_FILENO) != 0) {}

Progress::~Progress() { clear(); }

void Progress::clear() {
  if (dirty_) fmt::print(stderr, "\r\033[K");
  dirty_ = false;
}

void Progress::step(const std::string& text) {
  text_ = text;
  since_ = std::chrono::steady_clock::now();
  draw(text);
}

void Progress::bar(int64_t done, int64_t total) {
  std::string text = fmt::format("{} {} {} of {}", text_, bar_text(done, total), bytes_text(done),
                                 bytes_text(total));
  const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - since_;
  if (done > 0) {
    text += fmt::format(", {:.0f} s left", spent.count() / static_cast<double>(done) *
                                               static_cast<double>(total - done));
  }
  draw(text);
}

std::function<void(int64_t, int64_t)> Progress::of_packing() {
  if (!active_) return {};
  return [this](int64_t done, int64_t total) { bar(done, total); };
}

void Progress::draw(const std::string& text) {
  if (!active_) return;
  fmt::print(stderr, "\r\033[K{}", text);
  std::fflush(stderr);
  dirty_ = true;
}

}  // namespace moekit::cli
