#include "comm/roll_call.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <exception>
#include <utility>

#include "base/env.h"

namespace moekit::comm {
namespace {

constexpr int kShown = 8;

int number(const std::string& text, int otherwise) {
  int value = 0;
  return std::sscanf(text.c_str(), "%d", &value) == 1 ? value : otherwise;
}

struct Mark {
  int pid = 0, step = 0;  // 0: the rank has left none
};

Mark read_mark(const std::string& path) {
  char text[64] = {};
  const int descriptor = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) return {};
  const ssize_t bytes = read(descriptor, text, sizeof(text) - 1);
  close(descriptor);
  Mark mark;
  if (bytes <= 0 || std::sscanf(text, "%d %d", &mark.pid, &mark.step) != 2) return {};
  return mark;
}

}  // namespace

Launch Launch::of_environment() {
  Launch launch;
  launch.folder = env("OMPI_MCA_orte_jobfam_session_dir");
  launch.job = env("PMIX_NAMESPACE");
  launch.rank = number(env("OMPI_COMM_WORLD_RANK"), -1);
  launch.size = number(env("OMPI_COMM_WORLD_SIZE"), 0);
  launch.local_size = number(env("OMPI_COMM_WORLD_LOCAL_SIZE"), 0);
  return launch;
}

RollCall& RollCall::of_process() {
  static RollCall call(Launch::of_environment());
  return call;
}

std::string RollCall::mark_of(int rank) const {
  return fmt::format("{}/moekit.{}.{}", launch_.folder, launch_.job, rank);
}

void RollCall::come() noexcept {
  const int step = ++step_;
  if (launch_.folder.empty() || launch_.rank < 0) return;
  try {
    const std::string text = fmt::format("{} {}\n", getpid(), step);
    const int descriptor =
        open(mark_of(launch_.rank).c_str(), O_WRONLY | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (descriptor < 0) return;
    // One write at the start: readers see the old mark or the new one, never half of one.
    if (pwrite(descriptor, text.data(), text.size(), 0) < 0) unlink(mark_of(launch_.rank).c_str());
    close(descriptor);
  } catch (const std::exception&) {  // peers then say that this rank has not come
    return;
  }
}

std::string RollCall::describe() const {
  if (launch_.folder.empty() || launch_.rank < 0 || launch_.size < 2) return {};
  const bool whole = launch_.local_size == launch_.size;
  int here = 0, shown = 0;
  std::string absent;
  const auto add = [&](const std::string& words) {
    if (++shown <= kShown) absent += (absent.empty() ? "" : ", ") + words;
  };
  for (int r = 0; r < launch_.size; ++r) {
    const Mark mark = r == launch_.rank ? Mark{getpid(), step_} : read_mark(mark_of(r));
    if (mark.pid == 0) {
      // Of a rank without a mark nobody knows which host it is on, unless there is only this one.
      if (whole) add(fmt::format("rank {} has not come", r));
    } else if (kill(mark.pid, 0) != 0 && errno == ESRCH) {
      add(fmt::format("rank {} has ended (process {})", r, mark.pid));
    } else if (mark.step < step_) {
      add(fmt::format("rank {} has not come", r));
    } else {
      ++here;
    }
  }
  if (shown > kShown) absent += fmt::format(" and {} more", shown - kShown);
  const int expected = whole ? launch_.size : launch_.local_size;
  return fmt::format("rank {} expected {} ranks{}, seen {}{}{}", launch_.rank, expected,
                     whole ? "" : " of this host", here, absent.empty() ? "" : ": ", absent);
}

}  // namespace moekit::comm
