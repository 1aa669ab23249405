#include "report.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cstdio>

#include "moekit/describe.h"

namespace moekit::cli {
namespace {

/// Columns on the screen: UTF-8 continuation bytes take none.
size_t width_of(const std::string& text) {
  return static_cast<size_t>(
      std::count_if(text.begin(), text.end(), [](unsigned char c) { return (c & 0xc0) != 0x80; }));
}

bool is_number(const std::string& text) {
  if (text.empty()) return false;
  const size_t at = text[0] == '-' || text[0] == '+' ? 1 : 0;
  return at >= text.size() || std::isdigit(static_cast<unsigned char>(text[at])) != 0;
}

}  // namespace

std::string bytes_text(int64_t bytes) {
  constexpr std::array<const char*, 5> kUnits = {"B", "KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(bytes);
  size_t unit = 0;
  while (value >= 1024 && unit + 1 < kUnits.size()) {
    value /= 1024;
    ++unit;
  }
  if (unit == 0) return fmt::format("{} B", bytes);
  return fmt::format("{:.2f} {}", value, kUnits[unit]);
}

std::string time_text(double microseconds) {
  if (microseconds < 1e3) return fmt::format("{:.1f} us", microseconds);
  if (microseconds < 1e6) return fmt::format("{:.2f} ms", microseconds / 1e3);
  return fmt::format("{:.2f} s", microseconds / 1e6);
}

std::string bar_text(int64_t done, int64_t total) {
  constexpr int64_t kWidth = 24;
  const double part = static_cast<double>(done) / static_cast<double>(std::max<int64_t>(1, total));
  const auto filled = static_cast<size_t>(kWidth * std::clamp(part, 0.0, 1.0));
  return "[" + std::string(filled, '#') + std::string(kWidth - filled, '.') + "]";
}

std::string list_text(const std::vector<std::string>& items) {
  return items.empty() ? "none" : fmt::format("{}", fmt::join(items, ", "));
}

Table::Table(std::vector<std::string> header) { rows_.push_back(std::move(header)); }

void Table::add(std::vector<std::string> row) {
  for (std::string& cell : row) cell = printable(cell);
  rows_.push_back(std::move(row));
}

void Table::print() const {
  std::vector<size_t> widths(rows_[0].size(), 0);
  std::vector<bool> right(rows_[0].size(), rows_.size() > 1);
  for (size_t r = 0; r < rows_.size(); ++r) {
    for (size_t c = 0; c < widths.size(); ++c) {
      widths[c] = std::max(widths[c], width_of(rows_[r][c]));
      if (r > 0 && !is_number(rows_[r][c])) right[c] = false;
    }
  }
  for (const auto& row : rows_) {
    std::string line;
    for (size_t c = 0; c < widths.size(); ++c) {
      const std::string gap(widths[c] - width_of(row[c]), ' ');
      if (c > 0) line += "  ";
      line += right[c] ? gap + row[c] : row[c] + gap;
    }
    line.erase(line.find_last_not_of(' ') + 1);
    fmt::print("{}\n", line);
  }
}

void print_facts(const std::vector<std::pair<std::string, std::string>>& facts) {
  size_t widest = 0;
  for (const auto& [name, value] : facts) widest = std::max(widest, width_of(name));
  for (const auto& [name, value] : facts) {
    fmt::print("{}{}  {}\n", name, std::string(widest - width_of(name), ' '), printable(value));
  }
}

}  // namespace moekit::cli
