// Waiting on a 32-bit word with a deadline: a short spin, then a futex sleep. std::atomic::wait
// has no deadline, and a condition variable would put a lock into every meeting of ranks.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace moekit::comm {

/// Who may wait on a word: threads of one process, or processes that share its page.
enum class WordScope : uint8_t { process, shared };

/// Sleeps while `word` holds `seen`, at most until `until`. Spurious returns are legal: the caller
/// looks at the word again.
void sleep_on(const std::atomic<uint32_t>& word, uint32_t seen,
              std::chrono::steady_clock::time_point until, WordScope scope = WordScope::process);

/// Wakes every sleeper of `word`. Store the new value first.
void wake_all(std::atomic<uint32_t>& word, WordScope scope = WordScope::process);

/// One step of a spin loop: tells the core that it waits.
void spin_pause();

}  // namespace moekit::comm
