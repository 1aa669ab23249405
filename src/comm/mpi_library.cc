#include "comm/mpi_library.h"

#include <dlfcn.h>

#include <cstring>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/plugin.h"
#include "comm/roll_call.h"

namespace moekit::comm {
namespace {

using Clock = std::chrono::steady_clock;

constexpr const char* kPlugin = "libmoekit_mpi.so";
constexpr auto kNap = std::chrono::microseconds(200);

/// Runs a non-blocking step of the whole group until it is done. `absent` says at the deadline who
/// has not come, where that is known.
void wait_for(const MpiLibrary& library, const char* what, std::chrono::nanoseconds deadline,
              const std::function<std::string()>& absent,
              const std::function<int(int* done)>& step) {
  const auto until = Clock::now() + deadline;
  for (int done = 0;;) {
    library.check(step(&done), what);
    if (done != 0) return;
    if (Clock::now() >= until) {
      const std::string known = absent ? absent() : std::string();
      fail(ErrorCode::timeout,
           "{}: waited {} ms for every rank of the MPI communicator: {}; every rank must make the "
           "group, or raise the deadline",
           what, std::chrono::duration_cast<std::chrono::milliseconds>(deadline).count(),
           known.empty() ? "at least one has not come" : known);
    }
    std::this_thread::sleep_for(kNap);
  }
}

class MpiMessages final : public Messages {
 public:
  /// Keeps the transport, and with it the communicator, alive.
  MpiMessages(std::shared_ptr<MpiLibrary> library, std::shared_ptr<MpiTransport> transport,
              moekit_mpi_group* group)
      : library_(std::move(library)),
        transport_(std::move(transport)),
        operations_(library_->table().connect(group)) {
    if (operations_ == nullptr) throw std::bad_alloc();
  }
  ~MpiMessages() override { end(); }
  bool end() noexcept override {
    moekit_mpi_operations* operations = std::exchange(operations_, nullptr);
    return operations == nullptr || library_->table().disconnect(operations) == 0;
  }

  int add_send(int peer, int tag, void* buffer, int64_t bytes, bool synchronous) override {
    int number = -1;
    library_->check(library_->table().add_send(operations_, peer, tag, buffer, bytes,
                                               synchronous ? 1 : 0, &number),
                    "making a persistent send");
    return number;
  }
  int add_receive(int peer, int tag, void* buffer, int64_t bytes) override {
    int number = -1;
    library_->check(library_->table().add_receive(operations_, peer, tag, buffer, bytes, &number),
                    "making a persistent receive");
    return number;
  }
  void start(int operation) override {
    library_->check(library_->table().start_operation(operations_, operation),
                    "starting a message");
  }
  std::span<const int> poll() override {
    const int* ended = nullptr;
    int count = 0;
    library_->check(library_->table().poll(operations_, &ended, &count), "moving messages");
    return {ended, static_cast<size_t>(count)};
  }

 private:
  std::shared_ptr<MpiLibrary> library_;
  std::shared_ptr<MpiTransport> transport_;
  moekit_mpi_operations* operations_;
};

}  // namespace

std::shared_ptr<MpiLibrary> MpiLibrary::load() {
  static std::mutex mutex;
  static std::weak_ptr<MpiLibrary> loaded;
  const std::lock_guard lock(mutex);
  if (auto library = loaded.lock()) return library;
  const moekit_mpi_plugin* made = nullptr;
  const auto takes = [&](void* library) {
    const auto table = reinterpret_cast<moekit_mpi_plugin_table_function>(
        dlsym(library, "moekit_mpi_plugin_table"));
    made = table ? table(MOEKIT_MPI_PLUGIN_VERSION) : nullptr;
    return made != nullptr;
  };
  // GLOBAL: components that MPI libraries open themselves look for its symbols. NODELETE: MPI
  // leaves threads and exit handlers behind.
  const OpenedPlugin file =
      open_plugin(kPlugin, "MOEKIT_MPI_PLUGIN", RTLD_NOW | RTLD_GLOBAL | RTLD_NODELETE, takes);
  if (file.library != nullptr) {
    std::shared_ptr<MpiLibrary> opened(new MpiLibrary(file.library, made, file.path));
    loaded = opened;
    return opened;
  }
  fail(ErrorCode::unsupported,
       "transport mpi: expected the plug-in {}, got: {}; install an MPI (Debian and Ubuntu: "
       "libopenmpi-dev, openmpi-bin) and build moekit with -DMOEKIT_MPI=ON, or use --transport "
       "threads",
       kPlugin, file.reason);
}

MpiLibrary::MpiLibrary(void* library, const moekit_mpi_plugin* table, std::string path)
    : library_(library), table_(table), path_(std::move(path)) {}

MpiLibrary::~MpiLibrary() { dlclose(library_); }

void MpiLibrary::check(int status, const char* what) const {
  if (status == 0) return;
  char text[512] = {};
  table_->describe(status, text, sizeof(text));
  fail(ErrorCode::comm, "{}: expected MPI to do it, got \"{}\"", what, text);
}

void MpiLibrary::start(int* rank, int* size) {
  MOEKIT_CHECK(table_->initialized() == 0,
               "MPI is initialized, or was; a program that uses MPI itself passes its own "
               "communicator to make_mpi_ranks");
  RollCall::of_process().come();
  check(table_->start(rank, size), "MPI_Init");
}

void MpiLibrary::finish() {
  if (table_->initialized() != 1) return;
  RollCall::of_process().come();
  check(table_->finish(), "MPI_Finalize");
}

std::shared_ptr<MpiTransport> MpiLibrary::open(const void* mpi_comm,
                                               std::chrono::nanoseconds deadline) {
  MOEKIT_CHECK(table_->initialized() == 1,
               "ranks over MPI: expected MPI to be initialized and not finalized; call MPI_Init "
               "first, and destroy layers before MPI_Finalize");
  std::function<std::string()> absent;
  if (mpi_comm == world()) {
    RollCall::of_process().come();
    absent = [] { return RollCall::of_process().describe(); };
  }
  moekit_mpi_group* group = nullptr;
  check(table_->open(mpi_comm, &group), "duplicating the communicator");
  try {
    wait_for(*this, "duplicating the communicator", deadline, absent,
             [&](int* done) { return table_->opened(group, done); });
    return std::make_shared<MpiTransport>(shared_from_this(), group, absent);
  } catch (...) {
    table_->close(group);
    throw;
  }
}

MpiTransport::MpiTransport(std::shared_ptr<MpiLibrary> library, moekit_mpi_group* group,
                           std::function<std::string()> absent)
    : library_(std::move(library)), group_(group), absent_(std::move(absent)) {
  library_->check(library_->table().rank(group, &rank_, &size_, &largest_tag_),
                  "asking for the rank");
}

MpiTransport::~MpiTransport() { library_->table().close(group_); }

void MpiTransport::allgather(const void* send, void* recv, int64_t bytes,
                             std::chrono::nanoseconds deadline) {
  struct Buffers {
    std::vector<std::byte> send, recv;
  };
  const auto all = static_cast<size_t>(bytes * size_);
  auto buffers = std::make_unique<Buffers>();
  buffers->send.resize(static_cast<size_t>(bytes));
  buffers->recv.resize(all);
  std::memcpy(buffers->send.data(), send, static_cast<size_t>(bytes));
  library_->check(
      library_->table().allgather(group_, buffers->send.data(), buffers->recv.data(), bytes),
      "MPI_Iallgather");
  try {
    wait_for(*library_, "making the group", deadline, absent_,
             [&](int* done) { return library_->table().gathered(group_, done); });
  } catch (...) {
    // MPI has no way to call a collective back: it may still write there.
    static_cast<void>(buffers.release());
    throw;
  }
  std::memcpy(recv, buffers->recv.data(), all);
}

std::unique_ptr<Messages> MpiTransport::connect() {
  return std::make_unique<MpiMessages>(library_, shared_from_this(), group_);
}

void MpiTransport::take_tags(int first, int count) {
  MOEKIT_CHECK_AS(ErrorCode::unsupported, first <= largest_tag_ - count,
                  "this MPI has tags up to {}, all of which have been used by groups of this "
                  "process; make fewer subgroups",
                  largest_tag_);
  next_tag_ = std::max(next_tag_, first + count);
}

}  // namespace moekit::comm
