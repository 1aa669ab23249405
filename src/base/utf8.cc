#include "base/utf8.h"

#include <fmt/format.h>

#include <cstdint>

namespace moekit {
namespace {

/// Bytes of a sequence by its first one, and what the second may be; further ones are 0x80 to 0xbf.
struct Lead {
  size_t bytes;
  uint8_t low, high;
};

Lead lead_of(uint8_t first) {
  if (first < 0x80) return {1, 0, 0};
  if (first < 0xc2) return {0, 0, 0};  // continuation bytes, and overlong forms of two
  if (first < 0xe0) return {2, 0x80, 0xbf};
  if (first == 0xe0) return {3, 0xa0, 0xbf};  // below: overlong
  if (first == 0xed) return {3, 0x80, 0x9f};  // above: surrogates
  if (first < 0xf0) return {3, 0x80, 0xbf};
  if (first == 0xf0) return {4, 0x90, 0xbf};  // below: overlong
  if (first < 0xf4) return {4, 0x80, 0xbf};
  if (first == 0xf4) return {4, 0x80, 0x8f};  // above: beyond U+10FFFF
  return {0, 0, 0};
}

}  // namespace

size_t utf8_sequence(std::string_view text) {
  if (text.empty()) return 0;
  const Lead lead = lead_of(static_cast<uint8_t>(text[0]));
  if (lead.bytes > text.size()) return 0;
  for (size_t i = 1; i < lead.bytes; ++i) {
    const auto byte = static_cast<uint8_t>(text[i]);
    const uint8_t low = i == 1 ? lead.low : 0x80;
    const uint8_t high = i == 1 ? lead.high : 0xbf;
    if (byte < low || byte > high) return 0;
  }
  return lead.bytes;
}

std::string printable_text(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  while (!text.empty()) {
    const auto first = static_cast<uint8_t>(text[0]);
    const size_t bytes = utf8_sequence(text);
    const bool c1 = bytes == 2 && first == 0xc2 && static_cast<uint8_t>(text[1]) < 0xa0;
    if (first == '\n') {
      out += "\\n";
    } else if (first == '\t') {
      out += "\\t";
    } else if (bytes == 0 || first < 0x20 || first == 0x7f) {
      out += fmt::format("\\x{:02x}", first);
    } else if (c1) {
      out += fmt::format("\\x{:02x}\\x{:02x}", first, static_cast<uint8_t>(text[1]));
    } else {
      out += text.substr(0, bytes);
    }
    text.remove_prefix(bytes == 0 ? 1 : bytes);
  }
  return out;
}

}  // namespace moekit
