// The CUDA plug-in, opened on demand.
#pragma once

#include <string>

#include "device/cuda_plugin.h"

namespace moekit::device {

struct CudaLibrary {
  const CudaPlugin* plugin = nullptr;  ///< null: this build has no CUDA
  std::string path;                    ///< of the plug-in
  std::string reason;                  ///< why there is none
  bool broken = false;                 ///< there is a file, which does not serve
};

/// Opens libmoekit_cuda.so, or the file that MOEKIT_CUDA_PLUGIN names. One that was opened stays.
/// Never throws for lack of it.
CudaLibrary find_cuda_library();

}  // namespace moekit::device
