// JSON reading: a pull scanner over bytes in memory, a small value tree, and getters whose errors
// name file, path, expected and came. Strict RFC 8259, UTF-8 included, plus the literals NaN,
// Infinity and -Infinity, which Python writes into model configs.
//
// Our own rather than nlohmann-json, which writes our reports, because these files may be hostile
// or damaged: a header of 100 MB must not become a tree of gigabytes before its first entry is
// checked, repeated keys must be seen, depth is bounded, and every error says at which byte of
// which file.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/thread_pool.h"  // FunctionRef
#include "moekit/error.h"

namespace moekit {

/// What to do about bytes that cannot be what was written: the end of such an error.
inline constexpr std::string_view kDamagedFile =
    "the file is damaged or truncated: fetch it again, or repair it";

/// A JSON number: exact when it is written as an integer that fits, else a double.
struct JsonNumber {
  bool is_integer = false;  ///< written without fraction and exponent, and inside int64
  int64_t integer = 0;
  double real = 0.0;
};

/// Reads one document front to back without building it, so memory is bounded by what the caller
/// keeps. Every error is corrupt_file and names `file` and the byte offset.
class JsonScanner {
 public:
  /// `text` and `file` outlive the scanner.
  JsonScanner(std::string_view text, std::string_view file) : text_(text), file_(file) {}

  enum class Kind : uint8_t { null, boolean, number, string, array, object };
  /// Kind of the value at the cursor; consumes white space only.
  Kind peek();

  void read_null();
  bool read_bool();
  JsonNumber read_number();
  std::string read_string();
  /// Calls body(key) at each member; body reads the value. Repeated keys are the caller's business.
  void read_object(FunctionRef<void(std::string& key)> body);
  /// Calls body() at each element; body reads the value.
  void read_array(FunctionRef<void()> body);
  /// Reads any value and drops it.
  void skip_value();
  /// Throws unless only white space follows.
  void finish();
  /// Throws corrupt_file: "FILE: malformed JSON at byte N: expected WHAT, came ...".
  [[noreturn]] void expected(std::string_view what) const;

 private:
  static constexpr int kMaxDepth = 64;

  char next_char();  ///< skips white space; '\0' at the end
  void take(char c, const char* what);
  void take_literal(std::string_view literal);
  void append_escape(std::string& out);
  void append_sequence(std::string& out);
  uint32_t read_hex4();
  void enter();

  std::string_view text_;
  std::string_view file_;
  size_t at_ = 0;
  int depth_ = 0;
};

/// A parsed value. Object members keep the file's order; keys are unique.
class Json {
 public:
  using Kind = JsonScanner::Kind;
  using Member = std::pair<std::string, Json>;

  Kind kind() const { return kind_; }
  bool boolean() const { return boolean_; }
  const JsonNumber& number() const { return number_; }
  const std::string& string() const { return string_; }
  const std::vector<Json>& elements() const { return elements_; }
  const std::vector<Member>& members() const;
  /// Null when this is no object or has no such member.
  const Json* find(std::string_view key) const;

  /// Parses a whole document. Throws corrupt_file; a repeated key is named.
  static Json parse(std::string_view text, std::string_view file);
  /// Reads and parses a file of at most `max_bytes`.
  static Json parse_file(const std::string& path, int64_t max_bytes = 64 << 20,
                         ErrorCode missing = ErrorCode::corrupt_file);

 private:
  static Json read(JsonScanner& scanner, std::string_view file);

  Kind kind_ = Kind::null;
  bool boolean_ = false;
  JsonNumber number_;
  std::string string_;
  std::vector<Json> elements_;
  std::shared_ptr<std::vector<Member>> members_;
};

/// A place in a document: a value or its absence, and how to name it in an error. Null counts as
/// absent, as model configs mean it. Every getter throws corrupt_file with path, expected and came.
class JsonPlace {
 public:
  JsonPlace(const Json& root, std::string file) : value_(&root), file_(std::move(file)) {}

  bool present() const { return value_ != nullptr && value_->kind() != Json::Kind::null; }
  /// Absent stays absent, so chains need no checks; a member of what is no object throws.
  JsonPlace at(std::string_view key) const;
  std::vector<JsonPlace> elements() const;                         ///< of an array
  std::vector<std::pair<std::string, JsonPlace>> members() const;  ///< of an object

  int64_t as_int() const;
  /// An integer in [low, high].
  int64_t as_int(int64_t low, int64_t high) const;
  double as_double() const;
  bool as_bool() const;
  const std::string& as_string() const;

  int64_t int_or(int64_t low, int64_t high, int64_t otherwise) const {
    return present() ? as_int(low, high) : otherwise;
  }
  double double_or(double otherwise) const { return present() ? as_double() : otherwise; }
  bool bool_or(bool otherwise) const { return present() ? as_bool() : otherwise; }
  std::string string_or(std::string otherwise) const { return present() ? as_string() : otherwise; }

  bool is(Json::Kind kind) const { return present() && value_->kind() == kind; }
  /// "config.json: quantization_config.ignore"
  std::string where() const;
  /// Throws corrupt_file naming the place.
  [[noreturn]] void expected(std::string_view what) const;

 private:
  JsonPlace(const Json* value, std::string file, std::string path)
      : value_(value), file_(std::move(file)), path_(std::move(path)) {}

  const Json* value_ = nullptr;
  std::string file_;
  std::string path_;
};

/// `text` as a JSON string literal, quotes included.
std::string json_quote(std::string_view text);

}  // namespace moekit
