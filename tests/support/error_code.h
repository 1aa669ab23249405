// What a call ends with.
#pragma once

#include <string>

#include "moekit/error.h"

namespace moekit::test {

/// The code of the Error that `body` throws, and its words; ok where it throws none.
template <typename Body>
ErrorCode code_of(Body&& body, std::string* text = nullptr) {
  try {
    body();
  } catch (const Error& e) {
    if (text != nullptr) *text = e.what();
    return e.code();
  }
  return ErrorCode::ok;
}

}  // namespace moekit::test
