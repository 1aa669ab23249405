// Digest: a 128-bit fingerprint of bytes (XXH3), to recognise content that was seen before. It is
// no defence against somebody who wants a collision.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>

namespace moekit {

struct Digest {
  uint64_t low = 0;
  uint64_t high = 0;
  friend bool operator==(const Digest&, const Digest&) = default;
  std::string hex() const;  ///< 32 digits, the same on every machine
};

Digest digest_of(const void* data, int64_t bytes);

/// Fingerprint of a sequence of pieces. Not thread-safe; move-only.
class Digester {
 public:
  Digester();
  ~Digester();
  Digester(const Digester&) = delete;
  Digester& operator=(const Digester&) = delete;

  void add(const void* data, int64_t bytes);
  void add(std::string_view text) {  // its length too, so that neighbours can't be confused
    add(static_cast<int64_t>(text.size()));
    add(text.data(), static_cast<int64_t>(text.size()));
  }
  template <typename T>
  requires std::is_arithmetic_v<T> || std::is_enum_v<T>
  void add(T value) { add(&value, sizeof(value)); }
  void add(const Digest& digest) {
    add(digest.low);
    add(digest.high);
  }
  Digest result() const;

 private:
  void* state_;
};

}  // namespace moekit
