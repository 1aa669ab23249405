// The moekit program: parses the command line, runs one verb, maps errors to exit codes and one
// line on stderr.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <csignal>
#include <cstdio>
#include <exception>
#include <new>
#include <string>

#include "moekit/describe.h"
#include "moekit/error.h"
#include "moekit/tools.h"
#include "rank_process.h"
#include "session.h"

namespace moekit::cli {
namespace {

int exit_code_of(ErrorCode code) {
  switch (code) {
    case ErrorCode::ok: return 0;
    case ErrorCode::invalid_argument: return 2;
    case ErrorCode::unsupported: return 3;
    case ErrorCode::corrupt_file: return 4;
    case ErrorCode::out_of_memory: return 5;
    case ErrorCode::comm: return 6;
    case ErrorCode::timeout: return 7;
    case ErrorCode::cuda: return 8;
    case ErrorCode::internal: return 70;
  }
  return 70;
}

/// The one line that scripts look for: breaks inside the message are joined.
int report(ErrorCode code, const std::string& message) {
  std::string line;
  for (char c : with_rank(message)) {
    if (c == '\n' || c == '\r') {
      if (!line.empty() && line.back() != ' ') line += ' ';
    } else {
      line += c;
    }
  }
  while (!line.empty() && line.back() == ' ') line.pop_back();
  line = printable(line);  // names come from files and paths
  std::fflush(stdout);
  fmt::print(stderr, "moekit: {}: {}\n", to_string(code), line);
  desert_ranks(exit_code_of(code), fmt::format("{}: {}", to_string(code), message));
  return exit_code_of(code);
}

std::string unknown_verb(const CLI::App& app, const std::string& word) {
  std::string verbs;
  for (const CLI::App* verb : app.get_subcommands([](const CLI::App*) { return true; }))
    verbs += (verbs.empty() ? "" : ", ") + verb->get_name();
  return fmt::format("no verb is called \"{}\"; choose one of {}, or see moekit --help", word,
                     verbs);
}

/// An empty value is a script's unset variable; it must not look like a flag that was left out.
void refuse_empty_values(CLI::App& app) {
  const auto is_given = [](const std::string& value) {
    return value.empty() ? std::string("expected a value, got an empty one; leave the flag out")
                         : std::string();
  };
  for (CLI::App* verb : app.get_subcommands([](const CLI::App*) { return true; })) {
    for (CLI::Option* option : verb->get_options()) {
      if (option->get_items_expected_min() > 0) option->check(is_given);
    }
  }
}

int run(int argc, char** argv) {
  CLI::App app{"moekit: the fused Mixture-of-Experts layer", "moekit"};
  app.set_version_flag("--version", std::string("moekit ") + version());
  app.require_subcommand(1);
  app.footer("`moekit VERB --help` shows the flags of a verb and an example.");
  Session session;
  add_inspect(app, session);
  add_run(app, session);
  add_check(app, session);
  add_explain(app, session);
  add_bench(app, session);
  add_combos(app, session);
  add_profile(app, session);
  add_quantize(app, session);
  add_doctor(app, session);
  refuse_empty_values(app);
  const auto is_meant = [&](const CLI::App* verb) { return verb->get_name() == argv[1]; };
  if (argc > 1 && argv[1][0] != '-' && app.get_subcommands(is_meant).empty())
    return report(ErrorCode::invalid_argument, unknown_verb(app, argv[1]));
  try {
    app.parse(argc, argv);  // runs the verb's callback
  } catch (const CLI::Success& e) {
    return app.exit(e);  // --help, --version
  } catch (const CLI::ParseError& e) {
    return report(ErrorCode::invalid_argument,
                  fmt::format("{}; see moekit --help or moekit VERB --help", e.what()));
  }
  if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0) {
    return report(
        ErrorCode::invalid_argument,
        "expected a standard output that can be written, got a write error; free space or "
        "redirect it elsewhere");
  }
  leave_ranks();
  return session.exit_code;
}

}  // namespace
}  // namespace moekit::cli

int main(int argc, char** argv) {
  using moekit::ErrorCode;
  std::signal(SIGXFSZ, SIG_IGN);  // a file-size limit becomes a write error, cleaned up like others
  try {
    return moekit::cli::run(argc, argv);
  } catch (const moekit::Error& e) {
    return moekit::cli::report(e.code(), e.what());
  } catch (const std::bad_alloc&) {
    return moekit::cli::report(
        ErrorCode::out_of_memory,
        "expected enough memory for the layer and one call, got none; use fewer tokens or a "
        "smaller problem");
  } catch (const std::exception& e) {
    return moekit::cli::report(
        ErrorCode::internal,
        fmt::format("expected no exception here, got \"{}\"; please report this", e.what()));
  }
}
