// Human output: aligned tables and numbers with their units. Plain text, no colour.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace moekit::cli {

/// "1.25 GiB", "640 B".
std::string bytes_text(int64_t bytes);
/// "12.3 us", "4.56 ms", "1.20 s" from microseconds.
std::string time_text(double microseconds);
/// "[#####.....]"
std::string bar_text(int64_t done, int64_t total);
/// Items separated by ", ", or "none".
std::string list_text(const std::vector<std::string>& items);

/// Columns padded to their widest cell. Cells that start with a digit, sign or "-" go right, others
/// left.
class Table {
 public:
  explicit Table(std::vector<std::string> header);
  void add(std::vector<std::string> row);
  void print() const;

 private:
  std::vector<std::vector<std::string>> rows_;
};

/// "name   value" lines under each other.
void print_facts(const std::vector<std::pair<std::string, std::string>>& facts);

}  // namespace moekit::cli
