#include "engine/plan_agreement.h"

#include <algorithm>
#include <cstring>

#include "base/check.h"

namespace moekit::engine {
namespace {

/// What a rank shows first; texts follow only where these differ.
struct Card {
  uint64_t hash = 0;
  int64_t failed = 0;
  int64_t text_bytes = 0;
};

std::string text_of(std::span<const PlanField> fields) {
  std::string text;
  for (const PlanField& field : fields) {
    text += field.name;
    text += '\0';
    text += field.value;
    text += '\0';
  }
  return text;
}

std::string text_of(std::exception_ptr failure) {
  try {
    std::rethrow_exception(failure);
  } catch (const std::exception& error) {
    return error.what();
  } catch (...) {
    return "an exception of unknown type";
  }
}

std::vector<PlanField> fields_of(const std::string& text) {
  std::vector<PlanField> fields;
  for (size_t at = 0; at < text.size();) {
    const size_t name_end = text.find('\0', at);
    const size_t value_end = text.find('\0', name_end + 1);
    fields.push_back(
        {text.substr(at, name_end - at), text.substr(name_end + 1, value_end - name_end - 1)});
    at = value_end + 1;
  }
  return fields;
}

/// The texts of all ranks; the cards say how long each is.
std::vector<std::string> gather_texts(comm::Communicator& comm, int64_t layer,
                                      const std::vector<Card>& cards, const std::string& mine) {
  int64_t longest = 1;
  for (const Card& card : cards) longest = std::max(longest, card.text_bytes);
  std::string padded = mine;
  padded.resize(static_cast<size_t>(longest), '\0');
  std::string all(static_cast<size_t>(longest) * cards.size(), '\0');
  comm.allgather(padded.data(), all.data(), longest, {"plan: fields", 0, layer});
  std::vector<std::string> texts;
  for (size_t r = 0; r < cards.size(); ++r) {
    texts.push_back(
        all.substr(r * static_cast<size_t>(longest), static_cast<size_t>(cards[r].text_bytes)));
  }
  return texts;
}

/// The part of a long value around its first difference from `other`.
std::string excerpt(const std::string& value, const std::string& other) {
  constexpr size_t kShown = 60;
  if (value.size() <= kShown) return value;
  const auto [mine, theirs] = std::mismatch(value.begin(), value.end(), other.begin(), other.end());
  const auto at = static_cast<size_t>(mine - value.begin());
  const size_t first = at > kShown / 2 ? at - kShown / 2 : 0;
  return (first > 0 ? "..." : "") + value.substr(first, kShown) +
         (first + kShown < value.size() ? "..." : "");
}

[[noreturn]] void fail_difference(const std::string& name, int rank, const std::string& mine,
                                  const std::string& theirs) {
  fail(ErrorCode::invalid_argument,
       "the plans of ranks 0 and {} differ in {}: rank 0 has {}, rank {} has {}; every rank must "
       "make the layer from the same weights with the same options, version and instruction set",
       rank, name, excerpt(mine, theirs), rank, excerpt(theirs, mine));
}

/// Throws for the first field in which any rank differs from rank 0.
void compare(const std::vector<std::string>& texts) {
  std::vector<std::vector<PlanField>> plans;
  size_t most = 0;
  for (const std::string& text : texts) {
    plans.push_back(fields_of(text));
    most = std::max(most, plans.back().size());
  }
  const PlanField absent{"", "(absent)"};
  for (size_t i = 0; i < most; ++i) {
    const PlanField& first = i < plans[0].size() ? plans[0][i] : absent;
    for (size_t r = 1; r < plans.size(); ++r) {
      const PlanField& other = i < plans[r].size() ? plans[r][i] : absent;
      if (first.name == other.name && first.value == other.value) continue;
      if (first.name == other.name)
        fail_difference(first.name, static_cast<int>(r), first.value, other.value);
      fail_difference("their list of fields", static_cast<int>(r), first.name, other.name);
    }
  }
}

}  // namespace

uint64_t hash_of(std::span<const PlanField> fields) {
  uint64_t hash = 0xcbf29ce484222325ull;  // FNV-1a
  for (const char c : text_of(fields)) {
    hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3ull;
  }
  return hash;
}

std::string hash_text(uint64_t hash) { return fmt::format("{:016x}", hash); }

int64_t agree_on_capacity(comm::Communicator& comm, int64_t layer, int64_t max_tokens) {
  if (comm.size() == 1) return max_tokens;
  std::vector<int64_t> all(static_cast<size_t>(comm.size()));
  comm.allgather(&max_tokens, all.data(), sizeof(int64_t), {"plan: token capacity", 0, layer});
  return *std::max_element(all.begin(), all.end());
}

void refuse_layer(comm::Communicator* comm, std::exception_ptr failure) {
  if (comm != nullptr && comm->size() > 1) {
    try {
      const int64_t layer = comm->number_layer();
      agree_on_capacity(*comm, layer, 0);
      agree_on_plan(*comm, layer, {}, failure);
    } catch (...) {  // `failure` itself, or what came of an exchange that it is the cause of
    }
  }
  std::rethrow_exception(failure);
}

void agree_on_plan(comm::Communicator& comm, int64_t layer, std::span<const PlanField> fields,
                   std::exception_ptr failure) {
  if (comm.size() == 1) {
    if (failure) std::rethrow_exception(failure);
    return;
  }
  const std::string text = failure ? text_of(failure) : text_of(fields);
  const Card mine{hash_of(fields), failure ? 1 : 0, static_cast<int64_t>(text.size())};
  std::vector<Card> cards(static_cast<size_t>(comm.size()));
  std::vector<std::string> texts;
  try {
    comm.allgather(&mine, cards.data(), sizeof(Card), {"plan: hash", 0, layer});
    const bool agreed = std::all_of(cards.begin(), cards.end(), [&](const Card& card) {
      return card.failed == 0 && card.hash == mine.hash;
    });
    if (agreed) return;
    texts = gather_texts(comm, layer, cards, text);
  } catch (...) {
    if (failure) std::rethrow_exception(failure);  // the cause; the exchange only suffers from it
    throw;
  }
  if (failure) std::rethrow_exception(failure);
  try {
    for (size_t r = 0; r < cards.size(); ++r) {
      MOEKIT_CHECK_AS(ErrorCode::comm, cards[r].failed == 0, "rank {} could not make its plan: {}",
                      r, texts[r]);
    }
    compare(texts);
    fail(ErrorCode::internal, "the hashes of plans differ, their fields do not");
  } catch (const Error& error) {
    comm.note_refusal(error);  // every rank has the same texts
    throw;
  }
}

}  // namespace moekit::engine
