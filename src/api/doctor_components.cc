// The optional parts of a machine: GPUs, toolkit, NCCL, MPI. Everything is opened on demand and
// closed again; nothing here links against what it looks for.
#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <functional>
#include <initializer_list>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "api/doctor.h"
#include "base/env.h"
#include "device/cuda_library.h"
#include "moekit/communicator.h"

namespace moekit::api {
namespace {

namespace fs = std::filesystem;

struct CloseLibrary {
  void operator()(void* library) const { dlclose(library); }
};
using Library = std::unique_ptr<void, CloseLibrary>;

/// The first of `names` that loads. `error` collects why the others did not.
Library open_first(std::initializer_list<const char*> names, std::string& found,
                   std::string& error) {
  for (const char* name : names) {
    if (void* library = dlopen(name, RTLD_LAZY | RTLD_LOCAL)) {
      found = name;
      return Library(library);
    }
    const char* reason = dlerror();
    if (reason != nullptr) error = reason;
  }
  return nullptr;
}

template <typename Function>
Function* symbol(const Library& library, const char* name) {
  return reinterpret_cast<Function*>(dlsym(library.get(), name));
}

/// "12.4" from the driver's 12040.
std::string dotted(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

/// A program on PATH, or an empty path.
fs::path on_path(const std::string& program) {
  std::istringstream path(env("PATH"));
  std::error_code ignored;
  for (std::string folder; std::getline(path, folder, ':');) {
    const fs::path candidate = fs::path(folder) / program;
    if (!folder.empty() && fs::is_regular_file(candidate, ignored)) return candidate;
  }
  return {};
}

/// The driver's entry points, named as its documentation names them.
struct CudaDriver {
  using Init = int(unsigned);
  using Count = int(int*);
  using Name = int(char*, int, int);
  using Memory = int(size_t*, int);
  using Attribute = int(int*, int, int);

  explicit CudaDriver(const Library& library)
      : init(symbol<Init>(library, "cuInit")),
        version(symbol<Count>(library, "cuDriverGetVersion")),
        count(symbol<Count>(library, "cuDeviceGetCount")),
        name(symbol<Name>(library, "cuDeviceGetName")),
        memory(symbol<Memory>(library, "cuDeviceTotalMem_v2")),
        attribute(symbol<Attribute>(library, "cuDeviceGetAttribute")) {}
  bool complete() const { return init && version && count && name && memory && attribute; }

  Init* init;
  Count* version;
  Count* count;
  Name* name;
  Memory* memory;
  Attribute* attribute;
};

// CUdevice_attribute values, stable since CUDA 2 (cuda.h).
constexpr int kMultiprocessorCount = 16;
constexpr int kComputeMajor = 75;
constexpr int kComputeMinor = 76;

GpuReport look_at_gpu(const CudaDriver& driver, int index) {
  GpuReport gpu;
  gpu.index = index;
  std::array<char, 128> name{};
  if (driver.name(name.data(), static_cast<int>(name.size()) - 1, index) == 0) {
    gpu.name = name.data();
  }
  int major = 0, minor = 0;
  driver.attribute(&major, kComputeMajor, index);
  driver.attribute(&minor, kComputeMinor, index);
  driver.attribute(&gpu.multiprocessors, kMultiprocessorCount, index);
  gpu.arch = std::to_string(major) + "." + std::to_string(minor);
  size_t bytes = 0;
  if (driver.memory(&bytes, index) == 0) gpu.memory_bytes = static_cast<int64_t>(bytes);
  return gpu;
}

/// Roots where toolkits stand when nothing names one, the newest numbered one first.
std::vector<fs::path> usual_toolkits() {
  std::vector<fs::path> numbered;
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator("/usr/local", ignored)) {
    if (entry.path().filename().string().starts_with("cuda-")) numbered.push_back(entry.path());
  }
  std::sort(numbered.begin(), numbered.end(), std::greater<>());
  std::vector<fs::path> roots = {"/usr/local/cuda"};
  roots.insert(roots.end(), numbered.begin(), numbered.end());
  for (const char* root : {"/opt/cuda", "/usr/lib/cuda", "/usr/lib/nvidia-cuda-toolkit"}) {
    roots.emplace_back(root);
  }
  return roots;
}

/// The compiler that a build would find: by variable, on PATH, in the usual places.
fs::path find_nvcc() {
  std::vector<fs::path> places;
  if (const std::string compiler = env("CUDACXX"); !compiler.empty()) places.emplace_back(compiler);
  for (const char* variable : {"CUDA_HOME", "CUDA_PATH"}) {
    const std::string root = env(variable);
    if (!root.empty()) places.push_back(fs::path(root) / "bin/nvcc");
  }
  places.push_back(on_path("nvcc"));
  for (const fs::path& root : usual_toolkits()) places.push_back(root / "bin/nvcc");
  std::error_code ignored;
  for (const fs::path& place : places) {
    if (!place.empty() && fs::is_regular_file(place, ignored)) return place;
  }
  return {};
}

/// What `PROGRAM --version` prints; empty when it can't be run.
std::string version_text(const fs::path& program) {
  std::string quoted = "'";
  for (char c : program.string()) quoted += c == '\'' ? std::string("'\\''") : std::string(1, c);
  const std::string command = quoted + "' --version 2>/dev/null </dev/null";
  FILE* output = popen(command.c_str(), "r");
  if (output == nullptr) return {};
  std::string text;
  std::array<char, 256> line{};
  while (text.size() < 4096 && fgets(line.data(), line.size(), output)) text += line.data();
  pclose(output);
  return text;
}

/// "13.0.88" from "... release 13.0, V13.0.88"; empty when there is none.
std::string version_in(const std::string& text) {
  const size_t at = text.find(", V");
  if (at == std::string::npos) return {};
  return text.substr(at + 3, text.find_first_not_of("0123456789.", at + 3) - (at + 3));
}

ComponentReport look_at_toolkit() {
  ComponentReport part;
  part.name = "cuda toolkit";
  const fs::path nvcc = find_nvcc();
  if (nvcc.empty()) {
    part.detail = "no nvcc on PATH, under CUDA_HOME or in the usual places such as /usr/local/cuda";
    return part;
  }
  // The compiler itself is asked: not every toolkit brings a file that tells.
  part.version = version_in(version_text(nvcc));
  part.found = !part.version.empty();
  part.detail = nvcc.string();
  if (!part.found) part.detail += " --version tells no version";
  return part;
}

ComponentReport look_at_nccl() {
  ComponentReport part;
  part.name = "nccl";
  const Library library = open_first({"libnccl.so.2", "libnccl.so"}, part.detail, part.detail);
  if (!library) return part;
  part.found = true;
  int version = 0;
  if (auto* get = symbol<int(int*)>(library, "ncclGetVersion"); get && get(&version) == 0) {
    // 2.9 and later: major * 10000 + minor * 100 + patch (nccl.h).
    part.version = std::to_string(version / 10000) + "." + std::to_string(version % 10000 / 100) +
                   "." + std::to_string(version % 100);
  }
  return part;
}

ComponentReport look_at_mpi() {
  ComponentReport part;
  part.name = "mpi";
  const Library library =
      open_first({"libmpi.so.40", "libmpi.so.12", "libmpi.so"}, part.detail, part.detail);
  if (!library) return part;
  part.found = true;
  // Callable before MPI_Init (MPI 3.1, 8.1.1); the buffer is larger than any implementation's
  // maximum.
  std::array<char, 16384> text{};
  int length = 0;
  if (auto* get = symbol<int(char*, int*)>(library, "MPI_Get_library_version");
      get && get(text.data(), &length) == 0) {
    part.version = std::string(text.data());
    part.version = part.version.substr(0, part.version.find_first_of("\n,"));
  }
  if (const fs::path launcher = on_path("mpirun"); !launcher.empty()) {
    part.detail += ", " + launcher.string();
  }
  return part;
}

/// moekit's own half of MPI.
ComponentReport look_at_mpi_plugin() {
  const MpiSupport support = find_mpi();
  ComponentReport part;
  part.name = "mpi plug-in";
  part.found = support.available;
  part.version = support.library;
  part.detail = support.available ? support.path : support.reason;
  return part;
}

/// moekit's own half of CUDA.
ComponentReport look_at_cuda_plugin() {
  const device::CudaLibrary library = device::find_cuda_library();
  ComponentReport part;
  part.name = "cuda plug-in";
  part.found = library.plugin != nullptr;
  if (part.found) {
    part.version = library.plugin->library();
    part.detail = library.path + ", kernels for " + library.plugin->targets() + ", " +
                  std::to_string(library.plugin->num_gpus()) + " usable GPU(s)";
  } else {
    part.detail = library.reason;
  }
  return part;
}

}  // namespace

void look_at_gpus(MachineReport& report) {
  std::ifstream file("/proc/driver/nvidia/version");
  std::string line;
  if (std::getline(file, line)) {
    // "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  ...": the first word with a dot.
    std::istringstream words(line);
    for (std::string word; words >> word;) {
      if (word.find('.') != std::string::npos &&
          std::isdigit(static_cast<unsigned char>(word[0]))) {
        report.driver = word;
        break;
      }
    }
  }
  ComponentReport part;
  part.name = "cuda driver";
  const Library library = open_first({"libcuda.so.1", "libcuda.so"}, part.detail, part.detail);
  if (library) {
    const CudaDriver driver(library);
    int version = 0, count = 0;
    if (!driver.complete()) {
      part.detail += ": entry points are missing";
    } else if (const int status = driver.init(0); status != 0) {
      part.detail += ": cuInit failed with status " + std::to_string(status);
    } else {
      part.found = true;
      if (driver.version(&version) == 0) report.cuda_driver_api = dotted(version);
      part.version = report.cuda_driver_api;
      if (driver.count(&count) != 0) count = 0;
      for (int i = 0; i < count; ++i) report.gpus.push_back(look_at_gpu(driver, i));
    }
  }
  report.components.push_back(std::move(part));
}

void look_at_components(MachineReport& report) {
  report.components.push_back(look_at_toolkit());
  report.components.push_back(look_at_cuda_plugin());
  report.components.push_back(look_at_nccl());
  report.components.push_back(look_at_mpi());
  report.components.push_back(look_at_mpi_plugin());
}

}  // namespace moekit::api
