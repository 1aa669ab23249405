#include "base/digest.h"

#include <fmt/format.h>

#include <new>

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace moekit {
namespace {

XXH3_state_t* state(void* p) { return static_cast<XXH3_state_t*>(p); }

Digest digest(XXH128_hash_t hash) { return {hash.low64, hash.high64}; }

}  // namespace

std::string Digest::hex() const { return fmt::format("{:016x}{:016x}", high, low); }

Digest digest_of(const void* data, int64_t bytes) {
  return digest(XXH3_128bits(data, static_cast<size_t>(bytes)));
}

Digester::Digester() : state_(XXH3_createState()) {
  if (state_ == nullptr) throw std::bad_alloc();
  XXH3_128bits_reset(state(state_));
}

Digester::~Digester() { XXH3_freeState(state(state_)); }

void Digester::add(const void* data, int64_t bytes) {
  if (bytes > 0) XXH3_128bits_update(state(state_), data, static_cast<size_t>(bytes));
}

Digest Digester::result() const { return digest(XXH3_128bits_digest(state(state_))); }

}  // namespace moekit
