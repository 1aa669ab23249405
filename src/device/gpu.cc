#include "device/gpu.h"

#include "base/check.h"
#include "device/cuda_library.h"

namespace moekit::device {

GpuTarget find_gpu(int index, std::string_view arch_name) {
  GpuTarget target;
  target.targets = kUsualTargets;
  if (!arch_name.empty()) target.arch = parse_arch(arch_name);
  const CudaLibrary library = find_cuda_library();
  target.in_build = library.plugin != nullptr;
  if (library.plugin == nullptr) {
    target.missing =
        library.broken
            ? fmt::format("the CUDA plug-in does not load: {}", library.reason)
            : "this build has no CUDA: configure with -DMOEKIT_CUDA=ON, which needs nvcc 13";
    return target;
  }
  target.targets = library.plugin->targets();
  if (target.arch) return target;
  const int count = library.plugin->num_gpus();
  MOEKIT_CHECK(count == 0 || (index >= 0 && index < count),
               "CUDA device {} was asked for, this machine shows {}", index, count);
  if (count > 0) target.arch = library.plugin->gpu(index).arch;
  return target;
}

bool has_code_for(std::string_view targets, const Arch& arch) {
  while (!targets.empty()) {
    const size_t end = targets.find(',');
    const Arch target = parse_arch(targets.substr(0, end));
    targets = end == std::string_view::npos ? std::string_view{} : targets.substr(end + 1);
    if (target.specific ? target == arch
                        : target.major == arch.major && target.minor <= arch.minor) {
      return true;
    }
  }
  return false;
}

}  // namespace moekit::device
