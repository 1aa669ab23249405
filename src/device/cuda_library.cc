#include "device/cuda_library.h"

#include <dlfcn.h>

#include <mutex>
#include <utility>

#include "base/plugin.h"
#include "moekit/version.h"

namespace moekit::device {

CudaLibrary find_cuda_library() {
  static std::mutex mutex;
  static CudaLibrary opened;
  const std::lock_guard lock(mutex);
  if (opened.plugin != nullptr) return opened;
  CudaLibrary found;
  const auto takes = [&](void* library) {
    const auto entry = reinterpret_cast<CudaPluginEntry*>(dlsym(library, kCudaPluginEntry));
    found.plugin = entry != nullptr ? entry(kCudaPluginInterface, MOEKIT_VERSION) : nullptr;
    return found.plugin != nullptr;
  };
  // NODELETE: the CUDA runtime leaves exit handlers behind.
  OpenedPlugin file = open_plugin("libmoekit_cuda.so", "MOEKIT_CUDA_PLUGIN",
                                  RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE, takes);
  found.path = std::move(file.path);
  found.reason = std::move(file.reason);
  found.broken = file.broken;
  if (found.plugin != nullptr) opened = found;
  return found;
}

}  // namespace moekit::device
