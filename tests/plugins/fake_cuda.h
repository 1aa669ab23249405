// What a fake libmoekit_cuda.so has seen, for tests that load it.
#pragma once

#include <cstdint>

struct moekit_fake_cuda {
  int32_t num_gpus; /* that it shows; tests may write */
  int32_t arch_number;
  int32_t fail_runs; /* this many runs throw Error{cuda} */
  int64_t uploads, finishes, workspaces, runs, device_runs;
  int32_t kernels;      /* ExpertKernels of the last layer */
  const char* knobs;    /* of the last run */
  const void* stream;   /* of the last run */
  const char* row_type; /* of the last run: "f32" or "bf16" */
  int64_t free_bytes;   /* that it shows; 0: 1 GiB */
  int64_t allocations, graphs, probes;
  double off_by; /* added to every value of an output */
};

extern "C" moekit_fake_cuda* moekit_fake_cuda_state();
