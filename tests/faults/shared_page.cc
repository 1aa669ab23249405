#include "faults/shared_page.h"

#include <chrono>
#include <stdexcept>
#include <thread>

namespace moekit::faults {
namespace {

constexpr auto kPatience = std::chrono::minutes(2);

/// The meeting in one word, so that arriving and leaving are one step each.
struct Word {
  uint32_t round = 0;
  uint16_t expected = 0;
  uint16_t arrived = 0;

  explicit Word(uint64_t bits)
      : round(static_cast<uint32_t>(bits >> 32)),
        expected(static_cast<uint16_t>(bits >> 16)),
        arrived(static_cast<uint16_t>(bits)) {}
  uint64_t bits() const { return uint64_t{round} << 32 | uint64_t{expected} << 16 | arrived; }

  void go_on_when_all_are_here() {
    if (arrived < expected) return;
    ++round;
    arrived = 0;
  }
};

/// Returns the round that was changed.
template <typename Change>
uint32_t update(std::atomic<uint64_t>& word, const Change& change) {
  uint64_t old = word.load();
  for (;;) {
    Word next(old);
    change(next);
    next.go_on_when_all_are_here();
    if (word.compare_exchange_weak(old, next.bits())) return Word(old).round;
  }
}

}  // namespace

Meeting::Meeting(int size) { state_->word.store(static_cast<uint64_t>(size) << 16); }

void Meeting::arrive_and_wait() {
  const uint32_t round = update(state_->word, [](Word& w) { ++w.arrived; });
  const auto until = std::chrono::steady_clock::now() + kPatience;
  for (int look = 0; Word(state_->word.load()).round == round; ++look) {
    if (look < 50) {
      std::this_thread::yield();
      continue;
    }
    if (std::chrono::steady_clock::now() > until)
      throw std::runtime_error("a rank did not come to a step");
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
}

void Meeting::leave() {
  update(state_->word, [](Word& w) { --w.expected; });
}

}  // namespace moekit::faults
