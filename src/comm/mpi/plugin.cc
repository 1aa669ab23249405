// libmoekit_mpi.so: MPI behind the table of comm/mpi_plugin.h. Needs no symbol of moekit, so that
// the program and the shared library open the same file. Errors come back as codes: the duplicated
// communicator returns them instead of ending the job.
#include <mpi.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <new>
#include <string>
#include <vector>

#include "comm/mpi_plugin.h"

struct moekit_mpi_group {
  MPI_Comm comm = MPI_COMM_NULL;
  bool has_messages = false;               // has been connected
  MPI_Request request = MPI_REQUEST_NULL;  // of idup, later of the allgather under way
};

struct moekit_mpi_operations {
  MPI_Comm comm = MPI_COMM_NULL;
  std::vector<MPI_Request> requests;
  std::vector<char> receives;  // by operation: boolean
  std::vector<char> active;    // by operation: boolean
  std::vector<int> ended;
};

namespace {

constexpr int64_t kLargestMessage = int64_t{1} << 30;

bool running() {
  int started = 0, ended = 0;
  return MPI_Initialized(&started) == MPI_SUCCESS && started != 0 &&
         MPI_Finalized(&ended) == MPI_SUCCESS && ended == 0;
}

const char* library_name() {
  static const std::string name = [] {
    std::vector<char> text(MPI_MAX_LIBRARY_VERSION_STRING + 1, '\0');
    int length = 0;
    if (MPI_Get_library_version(text.data(), &length) != MPI_SUCCESS) return std::string("MPI");
    const std::string all(text.data());
    return all.substr(0, all.find_first_of("\n,"));
  }();
  return name.c_str();
}

void describe(int error, char* text, int64_t bytes) {
  char words[MPI_MAX_ERROR_STRING + 1] = {};
  int length = 0;
  if (!running() || MPI_Error_string(error, words, &length) != MPI_SUCCESS) {
    std::snprintf(words, sizeof(words), "MPI error %d", error);
  }
  std::snprintf(text, static_cast<size_t>(bytes), "%s", words);
}

int initialized() {
  int started = 0, ended = 0;
  MPI_Initialized(&started);
  MPI_Finalized(&ended);
  return ended != 0 ? -1 : started != 0 ? 1 : 0;
}

int start(int* rank, int* size) {
  int provided = 0;
  int error = MPI_Init_thread(nullptr, nullptr, MPI_THREAD_SERIALIZED, &provided);
  if (error == MPI_SUCCESS) error = MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
  if (error == MPI_SUCCESS) error = MPI_Comm_rank(MPI_COMM_WORLD, rank);
  return error != MPI_SUCCESS ? error : MPI_Comm_size(MPI_COMM_WORLD, size);
}

int finish() { return MPI_Finalize(); }

const void* world() {
  static MPI_Comm comm = MPI_COMM_WORLD;
  return &comm;
}

int open(const void* mpi_comm, moekit_mpi_group** group) {
  auto* made = new (std::nothrow) moekit_mpi_group;
  if (made == nullptr) return MPI_ERR_NO_MEM;
  const int error =
      MPI_Comm_idup(*static_cast<const MPI_Comm*>(mpi_comm), &made->comm, &made->request);
  if (error != MPI_SUCCESS) {
    delete made;
    return error;
  }
  *group = made;
  return MPI_SUCCESS;
}

int test(moekit_mpi_group* group, int* done) {
  return MPI_Test(&group->request, done, MPI_STATUS_IGNORE);
}

int opened(moekit_mpi_group* group, int* done) {
  const int error = test(group, done);
  if (error != MPI_SUCCESS || *done == 0) return error;
  return MPI_Comm_set_errhandler(group->comm, MPI_ERRORS_RETURN);
}

void close(moekit_mpi_group* group) {
  // A collective that never ended holds the communicator; what is left then goes with the process.
  if (group->request != MPI_REQUEST_NULL) return;
  // So does a communicator of messages. Where a group has failed some arrive after its end, and
  // Open MPI would give them to the next communicator, which gets the number of a freed one.
  if (running() && group->comm != MPI_COMM_NULL && !group->has_messages)
    MPI_Comm_free(&group->comm);
  delete group;
}

int rank(const moekit_mpi_group* group, int* rank, int* size, int* largest_tag) {
  int error = MPI_Comm_rank(group->comm, rank);
  if (error == MPI_SUCCESS) error = MPI_Comm_size(group->comm, size);
  int* bound = nullptr;
  int found = 0;
  if (error == MPI_SUCCESS) error = MPI_Comm_get_attr(group->comm, MPI_TAG_UB, &bound, &found);
  *largest_tag = found != 0 ? *bound : 32767;  // what MPI promises at least
  return error;
}

int allgather(moekit_mpi_group* group, const void* send, void* recv, int64_t bytes) {
  if (bytes > kLargestMessage) return MPI_ERR_COUNT;
  const int count = static_cast<int>(bytes);
  return MPI_Iallgather(send, count, MPI_BYTE, recv, count, MPI_BYTE, group->comm, &group->request);
}

moekit_mpi_operations* connect(moekit_mpi_group* group) {
  auto* made = new (std::nothrow) moekit_mpi_operations;
  if (made == nullptr) return nullptr;
  made->comm = group->comm;
  group->has_messages = true;
  return made;
}

int keep(moekit_mpi_operations* operations, MPI_Request request, bool receives, int* number) {
  *number = static_cast<int>(operations->requests.size());
  operations->requests.push_back(request);
  operations->receives.push_back(receives ? 1 : 0);
  operations->active.push_back(0);
  operations->ended.resize(operations->requests.size());
  return MPI_SUCCESS;
}

int add_send(moekit_mpi_operations* operations, int peer, int tag, const void* buffer,
             int64_t bytes, int synchronous, int* number) {
  if (bytes > kLargestMessage) return MPI_ERR_COUNT;
  MPI_Request request = MPI_REQUEST_NULL;
  const auto init = synchronous != 0 ? MPI_Ssend_init : MPI_Send_init;
  const int error =
      init(buffer, static_cast<int>(bytes), MPI_BYTE, peer, tag, operations->comm, &request);
  return error != MPI_SUCCESS ? error : keep(operations, request, false, number);
}

int add_receive(moekit_mpi_operations* operations, int peer, int tag, void* buffer, int64_t bytes,
                int* number) {
  if (bytes > kLargestMessage) return MPI_ERR_COUNT;
  MPI_Request request = MPI_REQUEST_NULL;
  const int error = MPI_Recv_init(buffer, static_cast<int>(bytes), MPI_BYTE, peer, tag,
                                  operations->comm, &request);
  return error != MPI_SUCCESS ? error : keep(operations, request, true, number);
}

int start_operation(moekit_mpi_operations* operations, int number) {
  const auto at = static_cast<size_t>(number);
  const int error = MPI_Start(&operations->requests[at]);
  if (error == MPI_SUCCESS) operations->active[at] = 1;
  return error;
}

int poll(moekit_mpi_operations* operations, const int** ended, int* count) {
  *ended = operations->ended.data();
  *count = 0;
  const int error =
      MPI_Testsome(static_cast<int>(operations->requests.size()), operations->requests.data(),
                   count, operations->ended.data(), MPI_STATUSES_IGNORE);
  if (*count == MPI_UNDEFINED) *count = 0;  // nothing is under way
  for (int i = 0; i < *count; ++i) {
    operations->active[static_cast<size_t>(operations->ended[static_cast<size_t>(i)])] = 0;
  }
  return error;
}

int disconnect(moekit_mpi_operations* operations) {
  int going_on = 0;
  if (running()) {
    for (size_t i = 0; i < operations->requests.size(); ++i) {
      MPI_Request& request = operations->requests[i];
      if (operations->active[i] != 0) {
        // A receive ends here if its message has come, or has not begun to come: then it is taken
        // back. Of a sender that has left MPI's calls the rest of a message may never come.
        if (operations->receives[i] != 0) MPI_Cancel(&request);
        int done = 0;
        if (MPI_Test(&request, &done, MPI_STATUS_IGNORE) != MPI_SUCCESS || done == 0) ++going_on;
      }
      // What is under way goes on; MPI forgets the operation when it has ended.
      MPI_Request_free(&request);
    }
  }
  delete operations;
  return going_on;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) const moekit_mpi_plugin* moekit_mpi_plugin_table(
    uint32_t version) {
  static const moekit_mpi_plugin table = {MOEKIT_MPI_PLUGIN_VERSION,
                                          library_name(),
                                          describe,
                                          initialized,
                                          start,
                                          finish,
                                          world,
                                          open,
                                          opened,
                                          close,
                                          rank,
                                          allgather,
                                          test,
                                          connect,
                                          add_send,
                                          add_receive,
                                          start_operation,
                                          poll,
                                          disconnect};
  return version == MOEKIT_MPI_PLUGIN_VERSION ? &table : nullptr;
}
