// MpiLibrary: the MPI plug-in, opened on demand, and the message transport above it.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "comm/message_links.h"
#include "comm/mpi_plugin.h"

namespace moekit::comm {

class MpiTransport;

class MpiLibrary : public std::enable_shared_from_this<MpiLibrary> {
 public:
  /// The plug-in; the same as long as somebody holds it. Throws unsupported with what to install.
  static std::shared_ptr<MpiLibrary> load();
  ~MpiLibrary();
  MpiLibrary(const MpiLibrary&) = delete;
  MpiLibrary& operator=(const MpiLibrary&) = delete;

  const moekit_mpi_plugin& table() const { return *table_; }
  std::string description() const { return table_->library; }
  const std::string& path() const { return path_; }
  /// Throws comm with MPI's own words unless `status` is 0.
  void check(int status, const char* what) const;

  void start(int* rank, int* size);
  void finish();
  const void* world() const { return table_->world(); }
  /// Duplicates a communicator of the caller. Collective over it.
  std::shared_ptr<MpiTransport> open(const void* mpi_comm, std::chrono::nanoseconds deadline);

 private:
  MpiLibrary(void* library, const moekit_mpi_plugin* table, std::string path);

  void* library_;
  const moekit_mpi_plugin* table_;
  std::string path_;
};

class MpiTransport final : public MessageTransport,
                           public std::enable_shared_from_this<MpiTransport> {
 public:
  /// `absent` says, where anybody can, which ranks have not come to make a group.
  MpiTransport(std::shared_ptr<MpiLibrary> library, moekit_mpi_group* group,
               std::function<std::string()> absent);
  ~MpiTransport() override;

  int rank() const { return rank_; }
  int size() const { return size_; }
  void allgather(const void* send, void* recv, int64_t bytes, std::chrono::nanoseconds deadline);

  std::string_view name() const override { return "mpi"; }
  std::unique_ptr<Messages> connect() override;
  int next_tag() const override { return next_tag_; }
  void take_tags(int first, int count) override;

 private:
  std::shared_ptr<MpiLibrary> library_;
  moekit_mpi_group* group_;
  std::function<std::string()> absent_;
  int rank_ = 0, size_ = 1, largest_tag_ = 0;
  int next_tag_ = 0;
};

}  // namespace moekit::comm
