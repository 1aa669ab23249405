// Json and JsonPlace: values built from what JsonScanner reads, and getters that name their place.
#include "base/json.h"

#include <limits>
#include <unordered_set>

#include "base/check.h"
#include "base/file.h"

namespace moekit {
namespace {

const char* kind_name(Json::Kind kind) {
  switch (kind) {
    case Json::Kind::null: return "null";
    case Json::Kind::boolean: return "a boolean";
    case Json::Kind::number: return "a number";
    case Json::Kind::string: return "a string";
    case Json::Kind::array: return "an array";
    case Json::Kind::object: return "an object";
  }
  return "?";
}

}  // namespace

// ---- Json

const std::vector<Json::Member>& Json::members() const {
  static const std::vector<Member> kNone;
  return members_ ? *members_ : kNone;
}

const Json* Json::find(std::string_view key) const {
  for (const Member& member : members()) {
    if (member.first == key) return &member.second;
  }
  return nullptr;
}

Json Json::read(JsonScanner& scanner, std::string_view file) {
  Json json;
  json.kind_ = scanner.peek();
  switch (json.kind_) {
    case Kind::null: scanner.read_null(); break;
    case Kind::boolean: json.boolean_ = scanner.read_bool(); break;
    case Kind::number: json.number_ = scanner.read_number(); break;
    case Kind::string: json.string_ = scanner.read_string(); break;
    case Kind::array: {
      auto element = [&] { json.elements_.push_back(read(scanner, file)); };
      scanner.read_array(element);
      break;
    }
    case Kind::object: {
      json.members_ = std::make_shared<std::vector<Member>>();
      std::unordered_set<std::string> seen;
      auto member = [&](std::string& key) {
        MOEKIT_CHECK_AS(ErrorCode::corrupt_file, seen.insert(key).second,
                        "{}: expected each key of a JSON object once, came duplicate key {}; {}",
                        file, json_quote(key), kDamagedFile);
        json.members_->emplace_back(std::move(key), read(scanner, file));
      };
      scanner.read_object(member);
      break;
    }
  }
  return json;
}

Json Json::parse(std::string_view text, std::string_view file) {
  JsonScanner scanner(text, file);
  Json json = read(scanner, file);
  scanner.finish();
  return json;
}

Json Json::parse_file(const std::string& path, int64_t max_bytes, ErrorCode missing) {
  const std::string text = read_file(path, max_bytes, missing);
  return parse(text, path);
}

// ---- JsonPlace

std::string JsonPlace::where() const { return path_.empty() ? file_ : file_ + ": " + path_; }

void JsonPlace::expected(std::string_view what) const {
  if (value_ == nullptr) {
    fail(ErrorCode::corrupt_file,
         "{}: expected {}, but the key is missing; add it, or fetch the file again", where(), what);
  }
  std::string came = kind_name(value_->kind());
  if (value_->kind() == Json::Kind::number) {
    const JsonNumber& n = value_->number();
    came = n.is_integer ? fmt::format("{}", n.integer) : fmt::format("{}", n.real);
  } else if (value_->kind() == Json::Kind::string) {
    came = json_quote(value_->string().substr(0, 80));
  }
  fail(ErrorCode::corrupt_file, "{}: expected {}, came {}; correct it, or fetch the file again",
       where(), what, came);
}

JsonPlace JsonPlace::at(std::string_view key) const {
  std::string path = path_.empty() ? std::string(key) : path_ + "." + std::string(key);
  if (!present()) return JsonPlace(nullptr, file_, std::move(path));
  if (value_->kind() != Json::Kind::object) expected("an object");
  return JsonPlace(value_->find(key), file_, std::move(path));
}

std::vector<JsonPlace> JsonPlace::elements() const {
  if (!is(Json::Kind::array)) expected("an array");
  std::vector<JsonPlace> places;
  places.reserve(value_->elements().size());
  for (size_t i = 0; i < value_->elements().size(); ++i) {
    places.push_back(JsonPlace(&value_->elements()[i], file_, fmt::format("{}[{}]", path_, i)));
  }
  return places;
}

std::vector<std::pair<std::string, JsonPlace>> JsonPlace::members() const {
  if (!is(Json::Kind::object)) expected("an object");
  std::vector<std::pair<std::string, JsonPlace>> places;
  for (const Json::Member& m : value_->members()) places.emplace_back(m.first, at(m.first));
  return places;
}

int64_t JsonPlace::as_int() const {
  if (!is(Json::Kind::number)) expected("an integer");
  const JsonNumber& n = value_->number();
  if (n.is_integer) return n.integer;
  // 8.0 is an integer to the tools that write configs; 8.5 and 1e30 are not.
  if (std::abs(n.real) < 9e15 && n.real == std::floor(n.real)) return static_cast<int64_t>(n.real);
  expected("an integer of 64 bits");
}

int64_t JsonPlace::as_int(int64_t low, int64_t high) const {
  const std::string wanted = fmt::format("an integer from {} to {}", low, high);
  if (!is(Json::Kind::number)) expected(wanted);
  const int64_t value = as_int();
  if (value < low || value > high) expected(wanted);
  return value;
}

double JsonPlace::as_double() const {
  if (!is(Json::Kind::number)) expected("a number");
  const JsonNumber& n = value_->number();
  return n.is_integer ? static_cast<double>(n.integer) : n.real;
}

bool JsonPlace::as_bool() const {
  if (!is(Json::Kind::boolean)) expected("true or false");
  return value_->boolean();
}

const std::string& JsonPlace::as_string() const {
  if (!is(Json::Kind::string)) expected("a string");
  return value_->string();
}

std::string json_quote(std::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      out += fmt::format("\\u{:04x}", static_cast<unsigned>(c));
    } else {
      out += c;
    }
  }
  return out + "\"";
}

}  // namespace moekit
