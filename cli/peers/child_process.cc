#include "peers/child_process.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstring>
#include <thread>

#include "moekit/error.h"
#include "peers/refuse.h"

extern char** environ;

namespace moekit::cli {
namespace {

using Clock = std::chrono::steady_clock;

// Descriptors of ours stay above those that a child is given.
constexpr int kFirstOwn = 64;
constexpr int kFirstGiven = 3;
constexpr auto kTimeToLeave = std::chrono::seconds(2);

/// The same file under a number that no child expects, closed in children.
int moved_up(int descriptor) {
  const int moved = fcntl(descriptor, F_DUPFD_CLOEXEC, kFirstOwn);
  close(descriptor);
  return moved;
}

/// Repeats `step(done)`, which moves some bytes, until all have moved.
template <typename Step>
void move_all(int64_t bytes, Step&& step) {
  for (int64_t done = 0; done < bytes;) {
    const ssize_t moved = step(done);
    if (moved < 0 && errno == EINTR) continue;
    if (moved <= 0) {
      throw Error(ErrorCode::out_of_memory,
                  fmt::format("expected {} bytes of memory to share with another program: {}",
                              bytes, std::strerror(errno)));
    }
    done += moved;
  }
}

}  // namespace

SharedFile::SharedFile() : descriptor_(memfd_create("moekit", MFD_CLOEXEC)) {
  if (descriptor_ >= 0) descriptor_ = moved_up(descriptor_);
  if (descriptor_ < 0) {
    throw Error(ErrorCode::out_of_memory,
                fmt::format("memory to share with another program: {}", std::strerror(errno)));
  }
}

SharedFile::~SharedFile() { close(descriptor_); }

void SharedFile::resize(int64_t bytes) const {
  if (ftruncate(descriptor_, bytes) != 0) {
    throw Error(ErrorCode::out_of_memory,
                fmt::format("expected {} bytes of memory to share with another program: {}", bytes,
                            std::strerror(errno)));
  }
}

void SharedFile::write(const void* data, int64_t bytes, int64_t at) const {
  move_all(bytes, [&](int64_t done) {
    return pwrite(descriptor_, static_cast<const char*>(data) + done,
                  static_cast<size_t>(bytes - done), at + done);
  });
}

void SharedFile::read(void* data, int64_t bytes, int64_t at) const {
  move_all(bytes, [&](int64_t done) {
    return pread(descriptor_, static_cast<char*>(data) + done, static_cast<size_t>(bytes - done),
                 at + done);
  });
}

ChildProcess::ChildProcess(const std::vector<std::string>& command,
                           const std::vector<const SharedFile*>& files) {
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0)
    refuse(fmt::format("a socket for {}: {}", command[0], std::strerror(errno)));
  socket_ = moved_up(ends[0]);
  const int theirs = moved_up(ends[1]);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, theirs, STDIN_FILENO);
  posix_spawn_file_actions_adddup2(&actions, theirs, STDOUT_FILENO);
  posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, "/dev/null", O_WRONLY, 0);
  for (size_t i = 0; i < files.size(); ++i) {
    posix_spawn_file_actions_adddup2(&actions, files[i]->descriptor(),
                                     kFirstGiven + static_cast<int>(i));
  }
  std::vector<char*> arguments;
  for (const std::string& word : command) arguments.push_back(const_cast<char*>(word.c_str()));
  arguments.push_back(nullptr);
  const int status =
      posix_spawnp(&process_, arguments[0], &actions, nullptr, arguments.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  close(theirs);
  if (status == 0) return;
  process_ = -1;
  close(socket_);
  refuse(std::strerror(status));
}

ChildProcess::~ChildProcess() {
  close(socket_);  // the end of its input: it leaves
  if (process_ < 0) return;
  const auto until = Clock::now() + kTimeToLeave;
  while (waitpid(process_, nullptr, WNOHANG) == 0) {
    if (Clock::now() >= until) {
      kill(process_, SIGKILL);
      waitpid(process_, nullptr, 0);
      return;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

void ChildProcess::lost(const std::string& how) {
  if (process_ >= 0) {
    kill(process_, SIGKILL);
    waitpid(process_, nullptr, 0);
    process_ = -1;
  }
  lost_ = how;
  refuse(how);
}

std::string ChildProcess::read_line(std::chrono::seconds deadline) {
  const auto until = Clock::now() + deadline;
  for (;;) {
    const size_t end = received_.find('\n');
    if (end != std::string::npos) {
      std::string line = received_.substr(0, end);
      received_.erase(0, end + 1);
      return line;
    }
    const auto left =
        std::chrono::duration_cast<std::chrono::milliseconds>(until - Clock::now()).count();
    if (left <= 0) lost(fmt::format("gave no answer within {} s", deadline.count()));
    pollfd wait{socket_, POLLIN, 0};
    if (poll(&wait, 1, static_cast<int>(left)) <= 0) continue;
    char buffer[65536];
    const ssize_t count = recv(socket_, buffer, sizeof(buffer), 0);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) lost("ended without an answer");
    received_.append(buffer, static_cast<size_t>(count));
  }
}

nlohmann::json ChildProcess::ask(const nlohmann::json& question, std::chrono::seconds deadline) {
  if (process_ < 0) refuse(lost_);
  const std::string line = question.dump() + "\n";
  for (size_t sent = 0; sent < line.size();) {
    const ssize_t count = send(socket_, line.data() + sent, line.size() - sent, MSG_NOSIGNAL);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) lost("ended without an answer");
    sent += static_cast<size_t>(count);
  }
  const std::string text = read_line(deadline);
  nlohmann::json answer = nlohmann::json::parse(text, nullptr, false);
  if (!answer.is_object()) lost(fmt::format("answered \"{}\"", text.substr(0, 200)));
  if (answer.contains("error")) refuse(answer["error"].get<std::string>());
  return answer;
}

}  // namespace moekit::cli
