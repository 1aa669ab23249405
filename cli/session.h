// Session: what every verb shares: the flags that say how to speak, and the streams that it speaks
// on.
#pragma once

#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>

namespace moekit::cli {

/// Flags of every verb. Result text and JSON go to stdout; progress and warnings to stderr, on a
/// terminal only.
struct Session {
  bool json = false;
  bool quiet = false;
  bool verbose = false;
  std::string log_file;
  int exit_code = 0;  ///< set by a verb whose check did not hold

  void add_flags(CLI::App& verb);
  /// Turns the library's log on as the flags say.
  void configure_log() const;
  /// One JSON object on a line of its own. Numbers that JSON has no words for (NaN, inf) become
  /// null.
  void print_json(const nlohmann::ordered_json& object) const;
  /// "moekit: warning: ..." for a person at a terminal.
  void warn(const std::string& message) const;
};

/// A progress line on stderr that overwrites itself; silent when stderr is no terminal or --quiet
/// is given.
class Progress {
 public:
  explicit Progress(const Session& session);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  void step(const std::string& text);
  /// Redraws the last step with a bar: bytes done, of how many, and how long the rest will take.
  void bar(int64_t done, int64_t total);
  /// For PlanOptions::packing_progress: bar(), or nothing where nobody looks.
  std::function<void(int64_t, int64_t)> of_packing();
  /// Takes the line away, so that results stand alone.
  void clear();

 private:
  void draw(const std::string& text);

  bool active_;
  std::string text_;
  std::chrono::steady_clock::time_point since_;
  bool dirty_ = false;
};

// Each adds its verb to the program, with flags, help and an example.
void add_inspect(CLI::App& app, Session& session);
void add_run(CLI::App& app, Session& session);
void add_check(CLI::App& app, Session& session);
void add_explain(CLI::App& app, Session& session);
void add_combos(CLI::App& app, Session& session);
void add_profile(CLI::App& app, Session& session);
void add_bench(CLI::App& app, Session& session);
void add_quantize(CLI::App& app, Session& session);
void add_doctor(CLI::App& app, Session& session);

}  // namespace moekit::cli
