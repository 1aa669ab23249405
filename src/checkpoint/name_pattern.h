// Patterns for module names in quantization configs: exact names, "re:" expressions, globs.
#pragma once

#include <memory>
#include <string>
#include <string_view>

namespace moekit::checkpoint {

class NamePattern {
 public:
  enum class Syntax : uint8_t {
    compressed_tensors,  ///< "re:..." matches from the start of the name; "Linear" is every module
    glob,                ///< '*' and '?'; a name without them also covers its children
  };

  /// Throws unsupported when an expression cannot be read.
  NamePattern(std::string text, Syntax syntax);

  bool matches(std::string_view module) const;
  /// Exact names come before expressions, expressions before classes.
  int precedence() const { return static_cast<int>(kind_); }

 private:
  enum class Kind : uint8_t { exact, expression, glob, every };
  struct Expression;

  Kind kind_ = Kind::exact;
  std::string text_;
  std::shared_ptr<const Expression> expression_;
};

}  // namespace moekit::checkpoint
