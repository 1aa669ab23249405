// The states that a model checker has met: bit strings of any length, each kept once, in the order
// in which they came, so that the set is the queue of a breadth-first search as well.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <vector>

namespace moekit::test {

/// A state on its way into the set or out of it: written once, or read once by the same calls.
class StateBits {
 public:
  static constexpr int kWords = 40;

  StateBits() = default;
  explicit StateBits(const uint64_t* words) : from_(words) {}

  bool reading() const { return from_ != nullptr; }
  const uint64_t* words() const { return words_.data(); }
  int num_words() const { return (at_ + 63) / 64; }

  /// `width` bits.
  template <typename T>
  void field(T& value, int width) {
    if (reading()) {
      value = static_cast<T>(take(width));
    } else {
      put(static_cast<uint64_t>(value), width);
    }
  }

  /// A bit each, and `width` bits for those that are not zero. When read, all are zero before.
  template <size_t N>
  void cells(std::array<uint8_t, N>& values, int width) {
    static_assert(N < 64);
    uint64_t present = 0;
    for (size_t i = 0; i < N && !reading(); ++i) present |= uint64_t{values[i] != 0} << i;
    field(present, N);
    for (; present != 0; present &= present - 1) {
      field(values[static_cast<size_t>(std::countr_zero(present))], width);
    }
  }

 private:
  void put(uint64_t v, int width) {
    if (v >> width != 0) throw std::length_error("a value of the model exceeds its field");
    const int word = at_ / 64, shift = at_ % 64;
    if (word + 1 == kWords) throw std::length_error("a state of the model has no room");
    if (shift == 0) words_[word] = 0;
    words_[word] |= v << shift;
    if (shift + width > 64) words_[word + 1] = v >> (64 - shift);
    at_ += width;
  }

  uint64_t take(int width) {
    const int word = at_ / 64, shift = at_ % 64;
    uint64_t v = from_[word] >> shift;
    if (shift + width > 64) v |= from_[word + 1] << (64 - shift);
    at_ += width;
    return v & ((uint64_t{1} << width) - 1);
  }

  const uint64_t* from_ = nullptr;
  std::array<uint64_t, kWords> words_;  // written up to at_
  int at_ = 0;
};

class StateSet {
 public:
  StateSet() : table_(1 << 12) {}

  size_t size() const { return starts_.size(); }
  /// Stays where it is.
  const uint64_t* operator[](size_t i) const { return at(starts_[i]); }
  size_t bytes() const {
    return 8 * (kBlock * blocks_.size() + table_.size()) + 4 * starts_.capacity();
  }

  /// Whether the state is new. No state may be the beginning of another: what is written says where
  /// it ends.
  bool insert(const StateBits& state) {
    if (2 * size() >= table_.size()) grow();
    const int n = state.num_words();
    const uint64_t hash = hash_of(state.words(), n) & kHash;
    size_t slot = first_slot(hash);
    for (; table_[slot] != 0; slot = (slot + 1) & (table_.size() - 1)) {
      if ((table_[slot] & kHash) == hash && same(table_[slot] & ~kHash, state.words(), n))
        return false;
    }
    append(state.words(), n);
    table_[slot] = hash | size();
    return true;
  }

 private:
  static constexpr size_t kBlock = 1 << 16;  // words
  static constexpr uint64_t kHash = ~uint64_t{0} << 32;

  size_t first_slot(uint64_t hash) const { return (hash >> 32) & (table_.size() - 1); }

  const uint64_t* at(uint32_t start) const {
    return blocks_[start / kBlock].get() + start % kBlock;
  }

  bool same(uint64_t number, const uint64_t* words, int n) const {
    const uint32_t start = starts_[number - 1];
    if (start % kBlock + static_cast<size_t>(n) > kBlock) return false;
    return std::equal(words, words + n, at(start));
  }

  void append(const uint64_t* words, int n) {
    if (blocks_.empty() || used_ + static_cast<size_t>(n) > kBlock) {
      if (blocks_.size() == UINT32_MAX / kBlock) throw std::length_error("too many states");
      blocks_.push_back(std::make_unique<uint64_t[]>(kBlock));
      used_ = 0;
    }
    starts_.push_back(static_cast<uint32_t>((blocks_.size() - 1) * kBlock + used_));
    std::copy_n(words, n, blocks_.back().get() + used_);
    used_ += static_cast<size_t>(n);
  }

  void grow() {
    std::vector<uint64_t> old(2 * table_.size());
    old.swap(table_);
    for (const uint64_t entry : old) {
      if (entry == 0) continue;
      size_t slot = first_slot(entry & kHash);
      while (table_[slot] != 0) slot = (slot + 1) & (table_.size() - 1);
      table_[slot] = entry;
    }
  }

  static uint64_t hash_of(const uint64_t* words, int n) {
    uint64_t h = static_cast<uint64_t>(n);
    for (int i = 0; i < n; ++i) {
      h = (h ^ words[i]) * 0x9E3779B97F4A7C15u;
      h ^= h >> 32;
    }
    return h * 0x9E3779B97F4A7C15u;
  }

  std::vector<std::unique_ptr<uint64_t[]>> blocks_;
  size_t used_ = 0;               // words of the last block
  std::vector<uint32_t> starts_;  // of each state, in words over all blocks
  std::vector<uint64_t> table_;  // open addressing: half a hash and the state's number from 1, or 0
};

}  // namespace moekit::test
