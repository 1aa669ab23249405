// Placement files: {"experts_of_rank": [[...], ...]}.
#include <limits>
#include <utility>

#include "base/check.h"
#include "base/file.h"
#include "base/json.h"
#include "moekit/placement.h"
#include "problem/placement.h"

namespace moekit {
namespace {

// 1024 ranks that hold 65536 experts each take less.
constexpr int64_t kMaxFileBytes = int64_t{512} << 20;

/// The lists of a file, with every rule of Placement checked: a file that breaks one is corrupt.
ExpertPlacement parse_placement(const std::string& path, int64_t num_experts) {
  const Json root = Json::parse_file(path, kMaxFileBytes, ErrorCode::invalid_argument);
  const JsonPlace top(root, path);
  if (!top.is(Json::Kind::object)) {
    top.expected("an object with \"experts_of_rank\": [[...], ...]");
  }
  const JsonPlace lists = top.at("experts_of_rank");
  if (!lists.is(Json::Kind::array)) lists.expected("a list of experts for each rank");
  Placement placement;
  for (const JsonPlace& list : lists.elements()) {
    if (!list.is(Json::Kind::array)) list.expected("a list of expert ids");
    std::vector<int32_t>& experts = placement.experts_of_rank.emplace_back();
    for (const JsonPlace& id : list.elements()) {
      experts.push_back(static_cast<int32_t>(id.as_int(0, num_experts - 1)));
    }
  }
  try {
    return ExpertPlacement::from_lists(num_experts, std::move(placement.experts_of_rank));
  } catch (const Error& e) {
    fail(ErrorCode::corrupt_file, "{}: {}", path, e.what());
  }
}

}  // namespace

Placement load_placement(const std::string& path, int64_t num_experts, int num_ranks) {
  MOEKIT_CHECK(num_experts >= 1 && num_experts <= std::numeric_limits<int32_t>::max(),
               "a placement file is read for 1 to {} experts, got {}",
               std::numeric_limits<int32_t>::max(), num_experts);
  MOEKIT_CHECK(is_file(path), "{}: no such placement file", path);
  const ExpertPlacement placement = parse_placement(path, num_experts);
  MOEKIT_CHECK(placement.num_ranks() == num_ranks,
               "{}: lists experts of {} ranks, the layer runs on {}", path, placement.num_ranks(),
               num_ranks);
  return placement.lists();
}

void save_placement(const std::string& path, const Placement& placement) {
  std::string text = "{\"experts_of_rank\": [";
  const char* rank_comma = "\n  ";
  for (const auto& list : placement.experts_of_rank) {
    text += rank_comma;
    rank_comma = ",\n  ";
    text += '[';
    const char* comma = "";
    for (const int32_t expert : list) {
      text += comma;
      text += std::to_string(expert);
      comma = ", ";
    }
    text += ']';
  }
  text += "\n]}\n";
  write_file_atomically(path, text);
}

}  // namespace moekit
