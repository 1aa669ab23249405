// A fake CUDA plug-in in place of the GPU's, with a fresh state for each test.
#pragma once

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

#include "support/run_layer.h"
#include "tests/plugins/fake_cuda.h"

namespace moekit::test {

/// The fake's state, the plug-in being loaded by moekit's own loader.
inline moekit_fake_cuda& fake() {
  static moekit_fake_cuda* const state = [] {
    void* library = dlopen(MOEKIT_FAKE_CUDA, RTLD_NOW | RTLD_LOCAL);
    using State = moekit_fake_cuda*();
    return reinterpret_cast<State*>(dlsym(library, "moekit_fake_cuda_state"))();
  }();
  return *state;
}

class CudaPlugin : public testing::Test {
 protected:
  static void SetUpTestSuite() { setenv("MOEKIT_CUDA_PLUGIN", MOEKIT_FAKE_CUDA, 1); }
  void SetUp() override {
    fake() = {.num_gpus = 1, .arch_number = 90, .kernels = -1, .knobs = "", .row_type = ""};
  }
};

inline PlanOptions gpu_options(const std::string& backend = "") {
  PlanOptions options = options_for(backend);
  options.device.type = DeviceType::cuda;
  options.combine_dtype = DType::bf16;
  options.batch_invariant = false;
  options.hidden_dtype = DType::bf16;
  return options;
}

}  // namespace moekit::test
