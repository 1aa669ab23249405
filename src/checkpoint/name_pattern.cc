#include "checkpoint/name_pattern.h"

// g++ 12 reports uninitialized members inside its own <regex> when sanitizers change inlining.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <algorithm>
#include <cctype>
#include <regex>

#include "base/check.h"
#include "base/json.h"

namespace moekit::checkpoint {
namespace {

/// Longer patterns are no module names; bounds the compiled expression.
constexpr size_t kMaxPattern = 512;

// libstdc++'s default executor backtracks: exponential in time and deep in stack for hostile
// expressions. Its breadth-first one is linear in the name.
#ifdef __GLIBCXX__
constexpr auto kFlags = std::regex::ECMAScript | std::regex_constants::__polynomial;
#else
constexpr auto kFlags = std::regex::ECMAScript;
#endif

bool glob_matches(std::string_view pattern, std::string_view name) {
  size_t p = 0;
  size_t n = 0;
  size_t star = std::string_view::npos;
  size_t mark = 0;
  while (n < name.size()) {
    if (p < pattern.size() && (pattern[p] == '?' || pattern[p] == name[n])) {
      ++p;
      ++n;
    } else if (p < pattern.size() && pattern[p] == '*') {
      star = p++;
      mark = n;
    } else if (star != std::string_view::npos) {
      p = star + 1;
      n = ++mark;
    } else {
      return false;
    }
  }
  while (p < pattern.size() && pattern[p] == '*') ++p;
  return p == pattern.size();
}

/// The usual expressions, ".*LITERAL", ".*LITERAL.*" and ".*LITERAL$", which need no automaton: one
/// is matched against every module of a model, tens of thousands of them. In `literal` '\0' stands
/// for any character.
struct Substring {
  std::string literal;
  bool at_end = false;

  static bool parse(std::string_view text, Substring& out) {
    if (!text.starts_with(".*")) return false;
    text.remove_prefix(2);
    if (text.ends_with(".*") && !text.ends_with("\\.*")) {
      text.remove_suffix(2);
    } else if (text.ends_with("$") && !text.ends_with("\\$")) {
      text.remove_suffix(1);
      out.at_end = true;
    }
    for (size_t i = 0; i < text.size(); ++i) {
      if (std::isalnum(static_cast<unsigned char>(text[i])) != 0 || text[i] == '_') {
        out.literal += text[i];
      } else if (text[i] == '.') {
        out.literal += '\0';
      } else if (text[i] == '\\' && i + 1 < text.size() && text[i + 1] == '.') {
        out.literal += text[++i];
      } else {
        return false;
      }
    }
    return true;
  }

  bool found_in(std::string_view name) const {
    if (name.size() < literal.size()) return false;
    for (size_t at = at_end ? name.size() - literal.size() : 0; at + literal.size() <= name.size();
         ++at) {
      const bool equal = std::equal(literal.begin(), literal.end(), name.begin() + at,
                                    [](char l, char n) { return l == '\0' || l == n; });
      if (equal) return true;
    }
    return false;
  }
};

}  // namespace

struct NamePattern::Expression {
  bool simple = false;
  Substring substring;
  std::regex regex;
};

NamePattern::NamePattern(std::string text, Syntax syntax) : text_(std::move(text)) {
  if (syntax == Syntax::glob) {
    kind_ = text_.find_first_of("*?") == std::string::npos ? Kind::exact : Kind::glob;
    return;
  }
  if (text_ == "Linear") {
    kind_ = Kind::every;
  } else if (text_.starts_with("re:")) {
    kind_ = Kind::expression;
    MOEKIT_CHECK_AS(ErrorCode::unsupported, text_.size() <= kMaxPattern,
                    "quantization config: a name expression of {} characters is not covered (at "
                    "most {})",
                    text_.size(), kMaxPattern);
    auto expression = std::make_shared<Expression>();
    try {
      expression->simple = Substring::parse(text_.substr(3), expression->substring);
      if (!expression->simple) expression->regex = std::regex(text_.substr(3), kFlags);
      expression_ = std::move(expression);
    } catch (const std::regex_error& error) {
      fail(ErrorCode::unsupported, "quantization config: cannot read the name expression {}: {}",
           json_quote(text_), error.what());
    }
  }
}

bool NamePattern::matches(std::string_view module) const {
  switch (kind_) {
    case Kind::every: return true;
    case Kind::exact:
      return module.starts_with(text_) &&
             (module.size() == text_.size() || module[text_.size()] == '.');
    case Kind::glob: return glob_matches(text_, module);
    case Kind::expression: break;
  }
  if (expression_->simple) return expression_->substring.found_in(module);
  // Python's re.match: anchored at the start, free at the end.
  return std::regex_search(module.begin(), module.end(), expression_->regex,
                           std::regex_constants::match_continuous);
}

}  // namespace moekit::checkpoint
