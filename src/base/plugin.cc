#include "base/plugin.h"

#include <dlfcn.h>

#include <algorithm>
#include <filesystem>
#include <iterator>
#include <string>
#include <vector>

#include "base/env.h"

namespace moekit {
namespace {

namespace fs = std::filesystem;

/// Where wheels put libraries, under the prefix of an environment whose programs lie in `folder`.
std::vector<fs::path> wheel_folders(const fs::path& folder) {
  std::vector<fs::path> folders;
  std::error_code ignored;
  fs::directory_iterator python(folder / "../lib", ignored);
  for (; python != fs::directory_iterator(); python.increment(ignored)) {
    if (!python->path().filename().string().starts_with("python3")) continue;
    for (const char* packages : {"site-packages", "dist-packages"}) {
      folders.push_back(python->path() / packages / "moekit/lib");
    }
  }
  return folders;
}

/// Paths to try, in order.
std::vector<std::string> plugin_paths(const char* file, const char* variable) {
  std::vector<std::string> paths;
  if (const std::string named = env(variable); !named.empty()) return {named};
  std::error_code ignored;
  std::vector<fs::path> folders;
  Dl_info info{};
  if (dladdr(reinterpret_cast<const void*>(&plugin_paths), &info) != 0 &&
      info.dli_fname != nullptr) {
    // A program found through PATH has a name without a folder.
    const fs::path self(info.dli_fname);
    if (self.has_parent_path())
      folders.push_back(fs::weakly_canonical(self, ignored).parent_path());
  }
  folders.push_back(fs::read_symlink("/proc/self/exe", ignored).parent_path());
  for (const fs::path& folder : folders) {
    std::vector<fs::path> places{folder, folder / "lib", folder / "../" MOEKIT_LIBDIR};
    std::ranges::move(wheel_folders(folder), std::back_inserter(places));
    for (const fs::path& at : places) {
      if (fs::exists(at / file, ignored)) paths.push_back((at / file).string());
    }
  }
  paths.emplace_back(file);
  return paths;
}

}  // namespace

OpenedPlugin open_plugin(const char* file, const char* variable, int flags,
                         FunctionRef<bool(void* library)> takes) {
  OpenedPlugin found;
  const auto add_reason = [&](const std::string& more) {
    found.reason += (found.reason.empty() ? "" : "; ") + more;
  };
  for (const std::string& path : plugin_paths(file, variable)) {
    // The last path is the bare name, with which the loader finds nothing in most builds.
    found.broken = found.broken || path != file;
    void* library = dlopen(path.c_str(), flags);
    if (library == nullptr) {
      const char* error = dlerror();
      add_reason(error != nullptr ? error : path);
    } else if (takes(library)) {
      return {.library = library, .path = path};
    } else {
      dlclose(library);
      add_reason(path + " belongs to another version of moekit");
    }
  }
  return found;
}

}  // namespace moekit
