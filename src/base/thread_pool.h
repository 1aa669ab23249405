// ThreadPool: the calling thread plus N-1 parked workers, owned by a handle. No allocation and no
// lock per call.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

namespace moekit {

/// Non-owning reference to a callable; lives for the duration of one call.
template <typename Signature>
class FunctionRef;
template <typename R, typename... Args>
class FunctionRef<R(Args...)> {
 public:
  template <typename F>
  FunctionRef(F& f)  // NOLINT(google-explicit-constructor): a callable converts at the call site
      : object_(const_cast<void*>(static_cast<const void*>(&f))),
        call_([](void* object, Args... args) -> R { return (*static_cast<F*>(object))(args...); }) {
  }
  R operator()(Args... args) const { return call_(object_, args...); }

 private:
  void* object_;
  R (*call_)(void*, Args...);
};

/// One caller at a time. Workers spin for a bounded time after a job, then sleep on a futex
/// (std::atomic::wait).
class ThreadPool {
 public:
  /// num_threads >= 1, the caller included. Throws invalid_argument otherwise.
  explicit ThreadPool(int num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const { return num_threads_; }

  /// Runs body(thread) once on each thread, thread 0 being the caller; returns when all are done.
  /// body must not throw.
  void run(FunctionRef<void(int thread)> body);

  /// Runs body(0) here and body(thread) on every worker that comes before body(0) has returned;
  /// returns when all these are done. For work that body(0) can do alone: a worker that slept takes
  /// longer to wake than a small layer takes. body must not throw.
  void run_awake(FunctionRef<void(int thread)> body);

  /// Runs body(task, thread) for every task in [0, num_tasks), handed out dynamically one at a
  /// time. body must not throw.
  void parallel_for(int64_t num_tasks, FunctionRef<void(int64_t task, int thread)> body);

 private:
  void worker(int thread);

  void publish(FunctionRef<void(int)>& body);
  void wait_for(uint32_t workers) const;
  bool join(uint32_t generation);

  /// Low half of gate_: how many workers are inside the job, and whether it takes no more.
  static constexpr uint64_t kClosed = uint64_t{1} << 31;

  int num_threads_;
  const FunctionRef<void(int)>* body_ = nullptr;
  std::atomic<uint32_t> generation_{0};  // a step wakes the workers
  std::atomic<uint64_t> gate_{kClosed};  // generation << 32 | kClosed | workers that joined
  std::atomic<uint32_t> finished_{0};    // workers that left the current job
  std::atomic<bool> stop_{false};
  std::vector<std::thread> workers_;
};

/// CPUs that this process may run on (affinity mask, cgroup quota rounded up), at least 1.
int usable_cpus();

}  // namespace moekit
