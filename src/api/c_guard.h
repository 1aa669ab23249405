// The wall between C++ and C: exceptions become a status and the thread's last error.
#pragma once

#include <exception>
#include <new>

#include "base/check.h"
#include "moekit/c_api.h"

namespace moekit::c {

/// Keeps the message as this thread's last error; returns the code's status.
moekit_status remember(ErrorCode code, const char* message) noexcept;
/// What moekit_last_error() returns.
const char* last_error() noexcept;

/// Runs `body`; whatever it throws becomes a status and the thread's last error.
template <typename F>
moekit_status guarded(F&& body) noexcept {
  try {
    body();
    return MOEKIT_OK;
  } catch (const Error& e) {
    return remember(e.code(), e.what());
  } catch (const std::bad_alloc&) {
    return remember(ErrorCode::out_of_memory, "the C++ heap has no memory left");
  } catch (const std::exception& e) {
    return remember(ErrorCode::internal, e.what());
  } catch (...) {
    return remember(ErrorCode::internal, "an exception of unknown type");
  }
}

/// The target of a pointer that may not be NULL.
template <typename T>
T& required(T* pointer, const char* name) {
  MOEKIT_CHECK(pointer != nullptr, "{} is NULL", name);
  return *pointer;
}

}  // namespace moekit::c
