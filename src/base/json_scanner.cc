// JsonScanner: the only reader of bytes that a stranger may have written as JSON.
#include <charconv>
#include <cmath>
#include <limits>

#include "base/check.h"
#include "base/json.h"
#include "base/utf8.h"

namespace moekit {
namespace {

void append_utf8(std::string& out, uint32_t code) {
  if (code < 0x80) {
    out += static_cast<char>(code);
  } else if (code < 0x800) {
    out += static_cast<char>(0xc0 | (code >> 6));
    out += static_cast<char>(0x80 | (code & 0x3f));
  } else if (code < 0x10000) {
    out += static_cast<char>(0xe0 | (code >> 12));
    out += static_cast<char>(0x80 | ((code >> 6) & 0x3f));
    out += static_cast<char>(0x80 | (code & 0x3f));
  } else {
    out += static_cast<char>(0xf0 | (code >> 18));
    out += static_cast<char>(0x80 | ((code >> 12) & 0x3f));
    out += static_cast<char>(0x80 | ((code >> 6) & 0x3f));
    out += static_cast<char>(0x80 | (code & 0x3f));
  }
}

bool is_digit(char c) { return c >= '0' && c <= '9'; }

/// ASCII that a string holds as it is.
bool stands_for_itself(char c) {
  const auto byte = static_cast<unsigned char>(c);
  return byte >= 0x20 && byte < 0x80 && c != '"' && c != '\\';
}
}  // namespace

void JsonScanner::expected(std::string_view what) const {
  std::string came = "the end of the text";
  if (at_ < text_.size()) {
    const auto byte = static_cast<unsigned char>(text_[at_]);
    came = byte > 0x20 && byte < 0x7f ? fmt::format("'{}'", text_[at_])
                                      : fmt::format("byte 0x{:02x}", byte);
  }
  fail(ErrorCode::corrupt_file, "{}: malformed JSON at byte {}: expected {}, came {}; {}", file_,
       at_, what, came, kDamagedFile);
}

char JsonScanner::next_char() {
  while (at_ < text_.size()) {
    const char c = text_[at_];
    if (c != ' ' && c != '\t' && c != '\n' && c != '\r') return c;
    ++at_;
  }
  return '\0';
}

void JsonScanner::take(char c, const char* what) {
  if (next_char() != c || at_ >= text_.size()) expected(what);
  ++at_;
}

void JsonScanner::take_literal(std::string_view literal) {
  next_char();
  if (text_.substr(at_, literal.size()) != literal) expected(literal);
  at_ += literal.size();
}

void JsonScanner::enter() {
  if (++depth_ > kMaxDepth) {
    fail(ErrorCode::corrupt_file,
         "{}: expected at most {} nested JSON values, came more at byte {}; {}", file_, kMaxDepth,
         at_, kDamagedFile);
  }
}

JsonScanner::Kind JsonScanner::peek() {
  switch (const char c = next_char()) {
    case 'n': return Kind::null;
    case 't':
    case 'f': return Kind::boolean;
    case '"': return Kind::string;
    case '[': return Kind::array;
    case '{': return Kind::object;
    case '-':
    case 'N':
    case 'I': return Kind::number;
    default:
      if (is_digit(c)) return Kind::number;
      expected("a value");
  }
}

void JsonScanner::read_null() { take_literal("null"); }

bool JsonScanner::read_bool() {
  if (next_char() == 't') {
    take_literal("true");
    return true;
  }
  take_literal("false");
  return false;
}

JsonNumber JsonScanner::read_number() {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  JsonNumber number;
  next_char();
  const std::string_view rest = text_.substr(at_);
  for (const auto& [literal, value] : {std::pair<std::string_view, double>{"NaN", std::nan("")},
                                       {"Infinity", kInfinity},
                                       {"-Infinity", -kInfinity}}) {
    if (rest.starts_with(literal)) {
      at_ += literal.size();
      number.real = value;
      return number;
    }
  }
  const size_t begin = at_;
  auto digits = [&] {
    if (at_ >= text_.size() || !is_digit(text_[at_])) expected("a digit");
    while (at_ < text_.size() && is_digit(text_[at_])) ++at_;
  };
  if (text_[at_] == '-') ++at_;
  if (at_ < text_.size() && text_[at_] == '0') {
    ++at_;
    if (at_ < text_.size() && is_digit(text_[at_])) expected("no digit after a leading zero");
  } else {
    digits();
  }
  number.is_integer = true;
  if (at_ < text_.size() && text_[at_] == '.') {
    ++at_;
    number.is_integer = false;
    digits();
  }
  if (at_ < text_.size() && (text_[at_] == 'e' || text_[at_] == 'E')) {
    ++at_;
    number.is_integer = false;
    if (at_ < text_.size() && (text_[at_] == '+' || text_[at_] == '-')) ++at_;
    digits();
  }
  const char* first = text_.data() + begin;
  const char* last = text_.data() + at_;
  if (number.is_integer) {
    number.is_integer = std::from_chars(first, last, number.integer).ec == std::errc();
  }
  // Out of a double's range: from_chars leaves the value alone; such a number is never a size.
  if (std::from_chars(first, last, number.real).ec != std::errc()) number.real = kInfinity;
  return number;
}

uint32_t JsonScanner::read_hex4() {
  uint32_t code = 0;
  for (int i = 0; i < 4; ++i) {
    const char c = at_ < text_.size() ? text_[at_] : '\0';
    uint32_t digit = 0;
    if (is_digit(c)) {
      digit = static_cast<uint32_t>(c - '0');
    } else if (c >= 'a' && c <= 'f') {
      digit = static_cast<uint32_t>(c - 'a' + 10);
    } else if (c >= 'A' && c <= 'F') {
      digit = static_cast<uint32_t>(c - 'A' + 10);
    } else {
      expected("four hexadecimal digits");
    }
    code = code * 16 + digit;
    ++at_;
  }
  return code;
}

void JsonScanner::append_escape(std::string& out) {
  if (at_ >= text_.size()) expected("an escape");
  const char c = text_[at_++];
  switch (c) {
    case '"':
    case '\\':
    case '/': out += c; return;
    case 'b': out += '\b'; return;
    case 'f': out += '\f'; return;
    case 'n': out += '\n'; return;
    case 'r': out += '\r'; return;
    case 't': out += '\t'; return;
    case 'u': break;
    default: --at_; expected("a legal escape");
  }
  uint32_t code = read_hex4();
  if (code >= 0xdc00 && code < 0xe000) expected("a high surrogate before a low one");
  if (code >= 0xd800 && code < 0xdc00) {
    if (text_.substr(at_, 2) != "\\u") expected("a low surrogate");
    at_ += 2;
    const uint32_t low = read_hex4();
    if (low < 0xdc00 || low >= 0xe000) expected("a low surrogate");
    code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
  }
  append_utf8(out, code);
}

void JsonScanner::append_sequence(std::string& out) {
  const size_t bytes = utf8_sequence(text_.substr(at_));
  if (bytes == 0) expected("well-formed UTF-8 inside a string");
  out += text_.substr(at_, bytes);
  at_ += bytes;
}

std::string JsonScanner::read_string() {
  take('"', "a string");
  std::string out;
  while (true) {
    size_t end = at_;
    while (end < text_.size() && stands_for_itself(text_[end])) ++end;
    out += text_.substr(at_, end - at_);
    at_ = end;
    if (at_ >= text_.size()) expected("the closing quote of a string");
    const char c = text_[at_];
    if (static_cast<unsigned char>(c) < 0x20) expected("no control character inside a string");
    if (static_cast<unsigned char>(c) >= 0x80) {
      append_sequence(out);
      continue;
    }
    ++at_;
    if (c == '"') return out;
    append_escape(out);
  }
}

void JsonScanner::read_object(FunctionRef<void(std::string& key)> body) {
  take('{', "an object");
  enter();
  if (next_char() == '}') {
    ++at_;
    --depth_;
    return;
  }
  while (true) {
    if (next_char() != '"') expected("a member name");
    std::string key = read_string();
    take(':', "':'");
    body(key);
    if (next_char() == '}') break;
    take(',', "',' or '}'");
  }
  ++at_;
  --depth_;
}

void JsonScanner::read_array(FunctionRef<void()> body) {
  take('[', "an array");
  enter();
  if (next_char() == ']') {
    ++at_;
    --depth_;
    return;
  }
  while (true) {
    body();
    if (next_char() == ']') break;
    take(',', "',' or ']'");
  }
  ++at_;
  --depth_;
}

void JsonScanner::skip_value() {
  auto element = [this] { skip_value(); };
  auto member = [this](std::string&) { skip_value(); };
  switch (peek()) {
    case Kind::null: read_null(); break;
    case Kind::boolean: read_bool(); break;
    case Kind::number: read_number(); break;
    case Kind::string: read_string(); break;
    case Kind::array: read_array(element); break;
    case Kind::object: read_object(member); break;
  }
}

void JsonScanner::finish() {
  next_char();
  if (at_ != text_.size()) expected("the end of the document");
}

}  // namespace moekit
