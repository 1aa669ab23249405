#include "api/c_guard.h"

#include <string>

namespace moekit::c {
namespace {

struct LastError {
  std::string text;
  const char* shown = "";
};
thread_local LastError last;

}  // namespace

moekit_status remember(ErrorCode code, const char* message) noexcept {
  try {
    last.text = message;
    last.shown = last.text.c_str();
  } catch (...) {  // no memory for the message either
    last.shown = "out of memory";
  }
  return static_cast<moekit_status>(code);
}

const char* last_error() noexcept { return last.shown; }

}  // namespace moekit::c
