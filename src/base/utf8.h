// UTF-8 as RFC 3629 has it.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace moekit {

/// Bytes of the well-formed sequence that `text` begins with: 1 to 4. 0 where it begins with none:
/// stray or missing continuation bytes, overlong forms, surrogates, code points beyond U+10FFFF, no
/// text.
size_t utf8_sequence(std::string_view text);

/// `text` for a terminal or a log: control characters (C0, DEL and C1) and bytes that are no UTF-8
/// as \xNN, a line break as \n, a tab as \t.
std::string printable_text(std::string_view text);

}  // namespace moekit
