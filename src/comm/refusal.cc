// What a rank remembers of an error that all ranks throw alike.
#include "comm/communicator.h"

namespace moekit::comm {

void Communicator::note_refusal(const Error& error) noexcept {
  const std::lock_guard lock(refusal_mutex_);
  refusal_.emplace(error);  // shares its words: copying an exception allocates nothing
}

std::optional<Error> Communicator::refusal_in(std::string_view reason) const noexcept {
  const std::lock_guard lock(refusal_mutex_);
  if (!refusal_) return std::nullopt;
  const std::string_view words = refusal_->what();
  if (words.empty() || reason.find(words) == std::string_view::npos) return std::nullopt;
  return refusal_;
}

}  // namespace moekit::comm
