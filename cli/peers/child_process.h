// A program that answers questions: one line of JSON in, one out, over a socket that is its
// standard input and output. Ends with its owner.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace moekit::cli {

/// Memory that two processes share by its descriptor.
class SharedFile {
 public:
  /// Throws out_of_memory.
  SharedFile();
  ~SharedFile();
  SharedFile(const SharedFile&) = delete;
  SharedFile& operator=(const SharedFile&) = delete;

  int descriptor() const { return descriptor_; }
  void resize(int64_t bytes) const;
  void write(const void* data, int64_t bytes, int64_t at) const;
  void read(void* data, int64_t bytes, int64_t at) const;

 private:
  int descriptor_ = -1;
};

class ChildProcess {
 public:
  /// Starts command[0], looked up on PATH, with `files` as its descriptors 3, 4, ... and nowhere to
  /// write errors. Throws unsupported.
  ChildProcess(const std::vector<std::string>& command,
               const std::vector<const SharedFile*>& files);
  ~ChildProcess();
  ChildProcess(const ChildProcess&) = delete;
  ChildProcess& operator=(const ChildProcess&) = delete;

  /// Throws unsupported: it ended, gave no answer in time, or answered with {"error": text}.
  nlohmann::json ask(const nlohmann::json& question, std::chrono::seconds deadline);

 private:
  std::string read_line(std::chrono::seconds deadline);
  [[noreturn]] void lost(const std::string& how);

  pid_t process_ = -1;
  int socket_ = -1;
  std::string lost_;  ///< how, once it is
  std::string received_;
};

}  // namespace moekit::cli
