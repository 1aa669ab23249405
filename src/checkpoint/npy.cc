#include "checkpoint/npy.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <cstring>
#include <string_view>

#include "base/check.h"
#include "base/json.h"
#include "base/math.h"
#include "checkpoint/error_codes.h"

namespace moekit::checkpoint {
namespace {

constexpr std::string_view kMagic = "\x93NUMPY";
constexpr size_t kMaxAxes = 32;  // NumPy's own limit was 32 for most of its life
constexpr int64_t kMaxHeader = 1 << 20;

/// Reads the header's Python dictionary: {'descr': '<f4', 'fortran_order': False, 'shape': (3, 4),
/// }
class DictReader {
 public:
  DictReader(std::string_view text, const std::string& file) : text_(text), file_(file) {}

  void read(std::string& descr, NpyHeader& header) {
    unsigned seen = 0;
    take('{');
    while (peek() != '}') {
      const std::string key = read_string();
      take(':');
      unsigned bit = 0;
      if (key == "descr") {
        bit = 1;
        descr = read_string();
      } else if (key == "fortran_order") {
        bit = 2;
        header.fortran_order = read_bool();
      } else if (key == "shape") {
        bit = 4;
        header.shape = read_shape();
      }
      if (bit == 0 || (seen & bit) != 0) malformed("the keys descr, fortran_order and shape, once");
      seen |= bit;
      if (peek() != ',') break;
      take(',');
    }
    take('}');
    if (peek() != '\0' || at_ != text_.size()) malformed("nothing after the dictionary");
    if (seen != 7) malformed("the keys descr, fortran_order and shape");
  }

 private:
  [[noreturn]] void malformed(const char* expected) const {
    fail(kCorrupt, "{}: malformed .npy header at character {}: expected {}", file_, at_, expected);
  }
  char peek() {
    while (at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '\n' || text_[at_] == '\t')) {
      ++at_;
    }
    return at_ < text_.size() ? text_[at_] : '\0';
  }
  void take(char c) {
    if (peek() != c || at_ >= text_.size()) malformed(std::string(1, c).c_str());
    ++at_;
  }
  std::string read_string() {
    const char quote = peek();
    if (quote != '\'' && quote != '"') malformed("a string");
    const size_t end = text_.find(quote, ++at_);
    if (end == std::string_view::npos) malformed("a closing quote");
    std::string out(text_.substr(at_, end - at_));
    at_ = end + 1;
    return out;
  }
  bool read_bool() {
    peek();
    for (const auto& [word, value] :
         {std::pair<std::string_view, bool>{"True", true}, {"False", false}}) {
      if (text_.substr(at_).starts_with(word)) {
        at_ += word.size();
        return value;
      }
    }
    malformed("True or False");
  }
  std::vector<int64_t> read_shape() {
    std::vector<int64_t> shape;
    take('(');
    while (peek() != ')') {
      if (shape.size() >= kMaxAxes) malformed("fewer axes");
      int64_t value = 0;
      const char* first = text_.data() + at_;
      const auto [end, error] = std::from_chars(first, text_.data() + text_.size(), value);
      if (error != std::errc() || value < 0) malformed("a non-negative integer");
      at_ += static_cast<size_t>(end - first);
      shape.push_back(value);
      if (peek() == ')') break;
      take(',');
    }
    take(')');
    return shape;
  }

  std::string_view text_;
  const std::string& file_;
  size_t at_ = 0;
};

DType dtype_of(const std::string& descr, const std::string& file) {
  if (descr == "<f2") return DType::f16;
  if (descr == "<f4") return DType::f32;
  if (descr == "<f8") return DType::f64;
  if (descr == "<i4") return DType::i32;
  if (descr == "<i8") return DType::i64;
  fail(ErrorCode::unsupported,
       "{}: element type {} is not covered (covered: <f2 <f4 <f8 <i4 <i8, little-endian)", file,
       json_quote(descr.substr(0, 40)));
}

}  // namespace

NpyHeader parse_npy(const MappedFile& file) {
  const std::string& path = file.path();
  const int64_t size = file.size();
  const char* bytes = reinterpret_cast<const char*>(file.data());
  MOEKIT_CHECK_AS(kCorrupt, size >= 10 && std::string_view(bytes, 6) == kMagic,
                  "{}: expected a .npy file (magic \\x93NUMPY), came something else", path);
  const int version = static_cast<uint8_t>(bytes[6]);
  MOEKIT_CHECK_AS(kCorrupt, version >= 1 && version <= 3,
                  "{}: expected .npy version 1, 2 or 3, came {}", path, version);
  const int64_t length_bytes = version == 1 ? 2 : 4;
  MOEKIT_CHECK_AS(kCorrupt, size >= 8 + length_bytes, "{}: truncated .npy header", path);
  int64_t length = 0;
  for (int64_t i = length_bytes - 1; i >= 0; --i) {
    length = (length << 8) | static_cast<uint8_t>(bytes[8 + i]);
  }
  NpyHeader header;
  header.data_offset = 8 + length_bytes + length;
  MOEKIT_CHECK_AS(kCorrupt, length <= kMaxHeader && header.data_offset <= size,
                  "{}: a .npy header of {} bytes does not fit into the file of {} (truncated?)",
                  path, length, size);
  std::string descr;
  DictReader({bytes + 8 + length_bytes, static_cast<size_t>(length)}, path).read(descr, header);
  header.dtype = dtype_of(descr, path);
  int64_t elements = 1;
  const bool empty = std::ranges::find(header.shape, 0) != header.shape.end();
  for (const int64_t axis : header.shape) {
    elements = empty ? 0 : checked_mul(elements, axis, path.c_str(), kCorrupt);
  }
  header.num_elements = elements;
  const int64_t wanted = checked_mul(elements, bytes_of(header.dtype), path.c_str(), kCorrupt);
  MOEKIT_CHECK_AS(kCorrupt, size - header.data_offset == wanted,
                  "{}: shape ({}) of {} needs {} bytes of data, came {}", path,
                  fmt::join(header.shape, ", "), descr, wanted, size - header.data_offset);
  return header;
}

void copy_fortran_order(const NpyHeader& header, const std::byte* data, std::byte* out) {
  const size_t unit = static_cast<size_t>(bytes_of(header.dtype));
  const size_t rank = header.shape.size();
  std::vector<int64_t> strides(rank, 1);
  for (size_t a = 1; a < rank; ++a) strides[a] = strides[a - 1] * header.shape[a - 1];
  std::vector<int64_t> at(rank, 0);
  for (int64_t i = 0; i < header.num_elements; ++i) {
    int64_t offset = 0;
    for (size_t a = 0; a < rank; ++a) offset += at[a] * strides[a];
    std::memcpy(out + static_cast<size_t>(i) * unit, data + static_cast<size_t>(offset) * unit,
                unit);
    for (size_t a = rank; a-- > 0;) {
      if (++at[a] < header.shape[a]) break;
      at[a] = 0;
    }
  }
}

std::string npy_header_f32(const std::vector<int64_t>& shape) {
  std::string dict = fmt::format("{{'descr': '<f4', 'fortran_order': False, 'shape': ({}{}), }}",
                                 fmt::join(shape, ", "), shape.size() == 1 ? "," : "");
  // Data starts at a multiple of 64, as NumPy writes it; the header ends with a line feed.
  const size_t total = static_cast<size_t>(round_up(static_cast<int64_t>(dict.size()) + 11, 64));
  dict.resize(total - 11, ' ');
  dict += '\n';
  std::string header(kMagic);
  header += '\x01';
  header += '\0';
  header += static_cast<char>(dict.size() & 255);
  header += static_cast<char>(dict.size() >> 8);
  return header + dict;
}

}  // namespace moekit::checkpoint
