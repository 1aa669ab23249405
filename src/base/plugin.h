// Finds and opens a plug-in library of moekit.
#pragma once

#include <string>

#include "base/thread_pool.h"  // FunctionRef

namespace moekit {

struct OpenedPlugin {
  void* library = nullptr;  ///< null: none serves
  std::string path;         ///< of the library
  std::string reason;       ///< why none does
  bool broken = false;      ///< there is a file, which does not serve
};

/// The first library that opens with these flags of dlopen and that `takes(library)` finds to be of
/// this version, of: the one that environment variable `variable` names, alone; beside the library
/// or program that this code is in, and in the lib folder of its prefix; where the loader looks.
/// Never throws for lack of one.
OpenedPlugin open_plugin(const char* file, const char* variable, int flags,
                         FunctionRef<bool(void* library)> takes);

}  // namespace moekit
