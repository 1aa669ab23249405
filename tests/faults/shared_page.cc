#include "faults/shared_page.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <stdexcept>
#include <system_error>
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

void* map_shared(size_t bytes, const std::string& file) {
  const auto fail = [&](const char* what) {
    throw std::system_error(errno, std::generic_category(), what + (" " + file));
  };
  int descriptor = -1;
  if (!file.empty()) {
    descriptor = open(file.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (descriptor < 0 || ftruncate(descriptor, static_cast<off_t>(bytes)) != 0) fail("open");
  }
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                      file.empty() ? MAP_SHARED | MAP_ANONYMOUS : MAP_SHARED, descriptor, 0);
  if (memory == MAP_FAILED) fail("mmap");
  if (descriptor >= 0) close(descriptor);
  return memory;
}

Meeting::Meeting(int size, const std::string& file) : state_(file) {
  uint64_t untouched = 0;  // another process may have come first
  state_->word.compare_exchange_strong(untouched, static_cast<uint64_t>(size) << 16);
}

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
