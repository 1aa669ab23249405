// Jobs on the OpenMP threads that the program has already. Where another library computes with
// OpenMP in turns with moekit, as torch does, its idle threads spin for milliseconds on the cores
// that moekit's own workers would need.
#pragma once

#include "base/thread_pool.h"

namespace moekit {

/// From now on jobs of ThreadPools whose caller is this thread run on this thread's OpenMP team, or
/// (false) on the pool's own workers again. Returns false, and changes nothing, where the process
/// has loaded no OpenMP that has GOMP_parallel (GNU's, LLVM's, Intel's) in the global scope. Not
/// for the child of a fork.
bool use_openmp_threads(bool on);

/// Runs body(thread) for each thread in [0, num_threads) on the calling thread's OpenMP team, if it
/// uses one; else returns false. Bodies must not wait for each other: the team may be smaller.
bool run_on_openmp_threads(int num_threads, FunctionRef<void(int thread)> body);

}  // namespace moekit
