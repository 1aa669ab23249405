// Errors of moekit: one exception type with a closed set of codes. Codes map to C status codes
// (c_api.h), to Python exceptions and to exit codes of the command line.
#pragma once

#include <stdexcept>
#include <string>

#include "moekit/export.h"

namespace moekit {

enum class ErrorCode {
  ok = 0,
  invalid_argument = 1,  ///< the caller passed something wrong
  unsupported = 2,       ///< well-formed, but no back-end covers it
  out_of_memory = 3,
  cuda = 4,
  comm = 5,          ///< a peer or a transport failed
  timeout = 6,       ///< a wait reached its deadline
  corrupt_file = 7,  ///< a checkpoint, tensor file or cache is malformed or contradicts itself
  internal = 8,      ///< a broken invariant of moekit itself
};

/// The name used in messages and on stderr: "invalid_argument", ...
constexpr const char* to_string(ErrorCode code) {
  switch (code) {
    case ErrorCode::ok: return "ok";
    case ErrorCode::invalid_argument: return "invalid_argument";
    case ErrorCode::unsupported: return "unsupported";
    case ErrorCode::out_of_memory: return "out_of_memory";
    case ErrorCode::cuda: return "cuda";
    case ErrorCode::comm: return "comm";
    case ErrorCode::timeout: return "timeout";
    case ErrorCode::corrupt_file: return "corrupt_file";
    case ErrorCode::internal: return "internal";
  }
  return "internal";
}

/// Every exception that leaves moekit. what() says what was expected, what came and what to do.
class MOEKIT_API Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& message) : std::runtime_error(message), code_(code) {}
  ErrorCode code() const noexcept { return code_; }

 private:
  ErrorCode code_;
};

}  // namespace moekit
