#include "base/openmp_threads.h"

#include <dlfcn.h>

#include <type_traits>

namespace moekit {
namespace {

/// Of libgomp's ABI, which the other runtimes have as well.
struct OpenMp {
  void (*parallel)(void (*body)(void*), void* data, unsigned num_threads, unsigned flags);
  int (*thread_num)();
  int (*num_threads)();
  int (*max_threads)();
};

/// Null where the process has none.
const OpenMp* loaded_openmp() {
  OpenMp found{};
  const auto find = [](const char* name, auto& function) {
    function =
        reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(RTLD_DEFAULT, name));
    return function != nullptr;
  };
  if (!find("GOMP_parallel", found.parallel) || !find("omp_get_thread_num", found.thread_num) ||
      !find("omp_get_num_threads", found.num_threads) ||
      !find("omp_get_max_threads", found.max_threads)) {
    return nullptr;
  }
  // Kept: a library that torch has loaded is never unloaded.
  static const OpenMp openmp = found;
  return &openmp;
}

thread_local const OpenMp* openmp_of_this_thread = nullptr;

struct Job {
  const OpenMp& openmp;
  int num_threads;
  FunctionRef<void(int)> body;
};

void run_share(void* data) {
  const Job& job = *static_cast<const Job*>(data);
  const int team = job.openmp.num_threads();
  for (int thread = job.openmp.thread_num(); thread < job.num_threads; thread += team) {
    job.body(thread);
  }
}

}  // namespace

bool use_openmp_threads(bool on) {
  const OpenMp* found = on ? loaded_openmp() : nullptr;
  if (on && found == nullptr) return false;
  openmp_of_this_thread = found;
  return true;
}

bool run_on_openmp_threads(int num_threads, FunctionRef<void(int)> body) {
  if (openmp_of_this_thread == nullptr) return false;
  // Always the team that the others use: libgomp ends threads and starts new ones where its size
  // changes.
  const int team = openmp_of_this_thread->max_threads();
  if (team < num_threads) return false;
  Job job{*openmp_of_this_thread, num_threads, body};
  job.openmp.parallel(run_share, &job, static_cast<unsigned>(team), 0);
  return true;
}

}  // namespace moekit
