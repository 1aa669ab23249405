// Counter-based random numbers: every value is a pure function of (seed, stream, index), so inputs
// are the same on every machine, in any order and from any thread. No libm: only integer operations
// and exact or correctly rounded float operations.
//
// Generator: Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2,
// 3", SC 2011).
#pragma once

#include <array>
#include <cstdint>

namespace moekit {

/// One Philox4x32-10 block: counter and key to 128 random bits.
constexpr std::array<uint32_t, 4> philox4x32(std::array<uint32_t, 4> counter,
                                             std::array<uint32_t, 2> key) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53} * counter[0];
    const uint64_t b = uint64_t{0xCD9E8D57} * counter[2];
    counter = {static_cast<uint32_t>(b >> 32) ^ counter[1] ^ key[0], static_cast<uint32_t>(b),
               static_cast<uint32_t>(a >> 32) ^ counter[3] ^ key[1], static_cast<uint32_t>(a)};
    key[0] += 0x9E3779B9;
    key[1] += 0xBB67AE85;
  }
  return counter;
}

/// A named stream of one seed. Streams and seeds are independent of each other.
class Rng {
 public:
  constexpr Rng(uint64_t seed, uint64_t stream) : seed_(seed), stream_(stream) {}

  /// 128 random bits of `index`.
  constexpr std::array<uint32_t, 4> block(uint64_t index) const {
    return philox4x32({static_cast<uint32_t>(index), static_cast<uint32_t>(index >> 32),
                       static_cast<uint32_t>(stream_), static_cast<uint32_t>(stream_ >> 32)},
                      {static_cast<uint32_t>(seed_), static_cast<uint32_t>(seed_ >> 32)});
  }
  constexpr uint64_t bits(uint64_t index) const {
    const auto b = block(index);
    return b[0] | static_cast<uint64_t>(b[1]) << 32;
  }
  /// Uniform in [0, 1), a multiple of 2^-24.
  constexpr float uniform(uint64_t index) const {
    return static_cast<float>(block(index)[0] >> 8) * 0x1p-24f;
  }
  /// Uniform in [0, n), n >= 1 (bias below n * 2^-64).
  constexpr uint64_t below(uint64_t index, uint64_t n) const {
    return static_cast<uint64_t>((static_cast<unsigned __int128>(bits(index)) * n) >> 64);
  }
  /// Mean 0, variance 1, bell-shaped, within +-4.9: the sum of eight 16-bit uniforms, whose
  /// standard deviation is 65536 * sqrt(2 / 3).
  constexpr float normal(uint64_t index) const {
    const auto b = block(index);
    int32_t sum = 0;
    for (uint32_t word : b)
      sum += static_cast<int32_t>(word & 0xffff) + static_cast<int32_t>(word >> 16);
    return static_cast<float>(2 * sum - 8 * 65535) * (0.5f / 53509.921f);
  }

 private:
  uint64_t seed_;
  uint64_t stream_;
};

}  // namespace moekit
