// MOEKIT_CHECK and fail(): the only ways in which moekit throws. Every message says what was
// expected, what came, what to do.
#pragma once

#include <fmt/format.h>

#include <utility>

#include "moekit/error.h"

namespace moekit {

/// Throws Error{code} with the formatted message.
template <typename... Args>
[[noreturn]] void fail(ErrorCode code, fmt::format_string<Args...> format, Args&&... args) {
  throw Error(code, fmt::format(format, std::forward<Args>(args)...));
}

}  // namespace moekit

/// Throws invalid_argument unless `cond` holds. The message is mandatory.
#define MOEKIT_CHECK(cond, ...)                                                      \
  do {                                                                               \
    if (!(cond)) ::moekit::fail(::moekit::ErrorCode::invalid_argument, __VA_ARGS__); \
  } while (0)

/// Throws Error{code} unless `cond` holds.
#define MOEKIT_CHECK_AS(code, cond, ...)              \
  do {                                                \
    if (!(cond)) ::moekit::fail((code), __VA_ARGS__); \
  } while (0)

/// Our own invariants: throws `internal`; compiled out in release builds unless MOEKIT_DCHECKS is
/// set.
#if !defined(NDEBUG) || defined(MOEKIT_DCHECKS)
#define MOEKIT_DCHECK(cond, ...) MOEKIT_CHECK_AS(::moekit::ErrorCode::internal, cond, __VA_ARGS__)
#else
#define MOEKIT_DCHECK(cond, ...) \
  do {                           \
  } while (0)
#endif
