#include "checkpoint/safetensors.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>

#include "base/check.h"
#include "base/json.h"
#include "base/math.h"
#include "checkpoint/error_codes.h"

namespace moekit::checkpoint {
namespace {

/// The format's own limit; a longer header is hostile or no header at all.
constexpr uint64_t kMaxHeaderBytes = 100'000'000;
/// More axes than any tool writes; bounds a shape's memory.
constexpr size_t kMaxAxes = 16;

struct DTypeName {
  const char* name;
  DType dtype;
};
constexpr std::array kDTypeNames = {
    DTypeName{"F64", DType::f64},         DTypeName{"F32", DType::f32},
    DTypeName{"F16", DType::f16},         DTypeName{"BF16", DType::bf16},
    DTypeName{"F8_E4M3", DType::f8_e4m3}, DTypeName{"F8_E5M2", DType::f8_e5m2},
    DTypeName{"F8_E8M0", DType::f8_e8m0}, DTypeName{"F4", DType::f4_e2m1},
    DTypeName{"I64", DType::i64},         DTypeName{"I32", DType::i32},
    DTypeName{"I16", DType::i16},         DTypeName{"I8", DType::i8},
    DTypeName{"U64", DType::u64},         DTypeName{"U32", DType::u32},
    DTypeName{"U16", DType::u16},         DTypeName{"U8", DType::u8},
    DTypeName{"BOOL", DType::boolean}};

/// Bytes of a tensor, or corrupt_file when shape and dtype make no whole number of bytes in int64.
int64_t bytes_of_shape(const TensorEntry& entry, const std::string& file) {
  // A zero makes the tensor empty, whatever the other axes say.
  if (std::ranges::find(entry.shape, 0) != entry.shape.end()) return 0;
  int64_t bits = bits_of(entry.dtype);
  for (const int64_t axis : entry.shape) {
    if (__builtin_mul_overflow(bits, axis, &bits)) {
      fail(kCorrupt,
           "{}: tensor {}: expected a size that fits into 64 bits, came shape [{}] of {}; {}", file,
           entry.name, fmt::join(entry.shape, ", "), safetensors_name(entry.dtype), kDamagedFile);
    }
  }
  MOEKIT_CHECK_AS(kCorrupt, bits % 8 == 0,
                  "{}: tensor {}: expected a whole number of bytes, came {}; {}", file, entry.name,
                  describe(entry), kDamagedFile);
  return bits / 8;
}

/// Parses header text into entries whose offsets still count from the start of the data.
class HeaderReader {
 public:
  HeaderReader(std::string_view text, const std::string& file, int64_t data_bytes)
      : scanner_(text, file), file_(file), data_bytes_(data_bytes) {}

  void read(std::vector<TensorEntry>& entries,
            std::vector<std::pair<std::string, std::string>>& metadata) {
    bool has_metadata = false;
    auto member = [&](std::string& key) {
      if (key == "__metadata__") {
        MOEKIT_CHECK_AS(kCorrupt, !has_metadata,
                        "{}: expected \"__metadata__\" once, came a duplicate; {}", file_,
                        kDamagedFile);
        has_metadata = true;
        read_metadata(metadata);
      } else {
        entries.push_back(read_entry(std::move(key)));
      }
    };
    if (scanner_.peek() != JsonScanner::Kind::object) scanner_.expected("an object of tensors");
    scanner_.read_object(member);
    scanner_.finish();
  }

 private:
  void read_metadata(std::vector<std::pair<std::string, std::string>>& metadata) {
    auto member = [&](std::string& key) {
      metadata.emplace_back(std::move(key), scanner_.read_string());
    };
    scanner_.read_object(member);
  }

  DType read_dtype(const std::string& tensor) {
    const std::string name = scanner_.read_string();
    for (const DTypeName& known : kDTypeNames) {
      if (name == known.name) return known.dtype;
    }
    fail(
        kCorrupt,
        "{}: tensor {}: expected a dtype of safetensors, came {}; convert the tensor, or fetch the "
        "file again",
        file_, tensor, json_quote(name.substr(0, 40)));
  }

  /// A non-negative integer; fractions, signs and overflow are refused by the tensor's name.
  int64_t read_size(const std::string& tensor, const char* what) {
    if (scanner_.peek() != JsonScanner::Kind::number) {
      scanner_.expected(fmt::format("a non-negative integer in {} of tensor {}", what, tensor));
    }
    const JsonNumber n = scanner_.read_number();
    MOEKIT_CHECK_AS(kCorrupt, n.is_integer && n.integer >= 0,
                    "{}: tensor {}: expected non-negative integers in {}, came {}; {}", file_,
                    tensor, what, n.real, kDamagedFile);
    return n.integer;
  }

  std::vector<int64_t> read_sizes(const std::string& tensor, const char* what, size_t limit) {
    std::vector<int64_t> sizes;
    auto element = [&] {
      MOEKIT_CHECK_AS(kCorrupt, sizes.size() < limit,
                      "{}: tensor {}: expected at most {} numbers in {}, came more; {}", file_,
                      tensor, limit, what, kDamagedFile);
      sizes.push_back(read_size(tensor, what));
    };
    scanner_.read_array(element);
    return sizes;
  }

  TensorEntry read_entry(std::string name) {
    TensorEntry entry;
    entry.name = std::move(name);
    std::vector<int64_t> offsets;
    unsigned seen = 0;
    auto once = [&](unsigned bit, const char* key) {
      MOEKIT_CHECK_AS(kCorrupt, (seen & bit) == 0,
                      "{}: tensor {}: expected \"{}\" once, came a duplicate; {}", file_,
                      entry.name, key, kDamagedFile);
      seen |= bit;
    };
    auto member = [&](std::string& key) {
      if (key == "dtype") {
        once(1, "dtype");
        entry.dtype = read_dtype(entry.name);
      } else if (key == "shape") {
        once(2, "shape");
        entry.shape = read_sizes(entry.name, "shape", kMaxAxes);
      } else if (key == "data_offsets") {
        once(4, "data_offsets");
        offsets = read_sizes(entry.name, "data_offsets", 2);
      } else {
        fail(kCorrupt, "{}: tensor {}: expected dtype, shape and data_offsets, came key {}; {}",
             file_, entry.name, json_quote(key.substr(0, 40)), kDamagedFile);
      }
    };
    scanner_.read_object(member);
    MOEKIT_CHECK_AS(kCorrupt, seen == 7 && offsets.size() == 2,
                    "{}: tensor {}: expected dtype, shape and two data_offsets, came less; {}",
                    file_, entry.name, kDamagedFile);
    entry.begin = offsets[0];
    entry.end = offsets[1];
    MOEKIT_CHECK_AS(
        kCorrupt, entry.begin <= entry.end && entry.end <= data_bytes_,
        "{}: tensor {}: expected data_offsets inside the {} bytes of data, came [{}, {}]; {}",
        file_, entry.name, data_bytes_, entry.begin, entry.end, kDamagedFile);
    const int64_t bytes = bytes_of_shape(entry, file_);
    MOEKIT_CHECK_AS(kCorrupt, entry.bytes() == bytes,
                    "{}: tensor {}: expected {} bytes for {}, came {} by data_offsets [{}, {}]; {}",
                    file_, entry.name, bytes, describe(entry), entry.bytes(), entry.begin,
                    entry.end, kDamagedFile);
    return entry;
  }

  JsonScanner scanner_;
  const std::string& file_;
  int64_t data_bytes_;
};

}  // namespace

const char* safetensors_name(DType dtype) {
  for (const DTypeName& known : kDTypeNames) {
    if (known.dtype == dtype) return known.name;
  }
  return "?";
}

std::string describe(const TensorEntry& entry) {
  return fmt::format("{} [{}]", safetensors_name(entry.dtype), fmt::join(entry.shape, ", "));
}

std::shared_ptr<const SafetensorsFile> SafetensorsFile::open(const std::string& path,
                                                             ErrorCode missing) {
  std::shared_ptr<SafetensorsFile> file(new SafetensorsFile(MappedFile(path, missing)));
  file->parse();
  return file;
}

void SafetensorsFile::parse() {
  const int64_t size = map_.size();
  MOEKIT_CHECK_AS(kCorrupt, size >= 8, "{}: expected a safetensors file, came only {} bytes; {}",
                  path(), size, kDamagedFile);
  MOEKIT_CHECK_AS(kCorrupt, std::memcmp(map_.data(), "version ", 8) != 0,
                  "{}: expected a safetensors file, came the pointer of Git LFS to one; fetch it "
                  "with `git lfs pull`",
                  path());
  uint64_t length = 0;
  for (int i = 7; i >= 0; --i) length = (length << 8) | static_cast<uint8_t>(map_.data()[i]);
  MOEKIT_CHECK_AS(kCorrupt, length <= kMaxHeaderBytes,
                  "{}: expected a safetensors header of at most {} bytes, came {} (not a "
                  "safetensors file?); {}",
                  path(), kMaxHeaderBytes, length, kDamagedFile);
  MOEKIT_CHECK_AS(kCorrupt, static_cast<int64_t>(length) <= size - 8,
                  "{}: expected a header of {} bytes, came a file of {}; {}", path(), length, size,
                  kDamagedFile);
  const char* text = reinterpret_cast<const char*>(map_.data()) + 8;
  MOEKIT_CHECK_AS(
      kCorrupt, length >= 2 && text[0] == '{',
      "{}: expected a safetensors header that starts with '{{', came {} (not a safetensors file?); "
      "{}",
      path(), length == 0 ? "none" : fmt::format("byte 0x{:02x}", static_cast<uint8_t>(text[0])),
      kDamagedFile);
  const int64_t data_start = 8 + static_cast<int64_t>(length);
  HeaderReader reader({text, length}, path(), size - data_start);
  reader.read(entries_, metadata_);

  std::ranges::sort(entries_, {}, &TensorEntry::name);
  const auto twin = std::ranges::adjacent_find(entries_, {}, &TensorEntry::name);
  MOEKIT_CHECK_AS(kCorrupt, twin == entries_.end(),
                  "{}: expected each tensor once, came duplicate tensor name {} in the header; {}",
                  path(), twin == entries_.end() ? "" : twin->name, kDamagedFile);
  check_extents(size - data_start);
  for (TensorEntry& entry : entries_) {
    entry.begin += data_start;
    entry.end += data_start;
  }
}

void SafetensorsFile::check_extents(int64_t data_bytes) const {
  std::vector<const TensorEntry*> order(entries_.size());
  std::ranges::transform(entries_, order.begin(), [](const TensorEntry& e) { return &e; });
  std::ranges::sort(order, {}, [](const TensorEntry* e) { return std::pair(e->begin, e->end); });
  int64_t at = 0;
  const TensorEntry* previous = nullptr;
  for (const TensorEntry* entry : order) {
    MOEKIT_CHECK_AS(
        kCorrupt, entry->begin >= at,
        "{}: expected tensors that share no byte, came {} and {}, which overlap at byte "
        "{}; {}",
        path(), previous ? previous->name : "", entry->name, entry->begin, kDamagedFile);
    MOEKIT_CHECK_AS(
        kCorrupt, entry->begin == at,
        "{}: expected tensors without gaps, came bytes [{}, {}) before tensor {} that belong "
        "to no tensor; {}",
        path(), at, entry->begin, entry->name, kDamagedFile);
    at = entry->end;
    previous = entry;
  }
  MOEKIT_CHECK_AS(kCorrupt, at == data_bytes,
                  "{}: expected {} bytes of tensor data, came {}: {} trailing bytes belong to no "
                  "tensor; {}",
                  path(), at, data_bytes, data_bytes - at, kDamagedFile);
}

const TensorEntry* SafetensorsFile::find(std::string_view name) const {
  const auto it = std::ranges::lower_bound(entries_, name, {}, &TensorEntry::name);
  return it != entries_.end() && it->name == name ? &*it : nullptr;
}

void write_safetensors(const std::string& path, std::span<const TensorSource> tensors,
                       std::span<const std::pair<std::string, std::string>> metadata) {
  std::string header = "{";
  if (!metadata.empty()) {
    header += "\"__metadata__\":{";
    for (size_t i = 0; i < metadata.size(); ++i) {
      header += fmt::format("{}{}:{}", i ? "," : "", json_quote(metadata[i].first),
                            json_quote(metadata[i].second));
    }
    header += "}";
  }
  int64_t offset = 0;
  for (const TensorSource& t : tensors) {
    TensorEntry entry{t.name, t.dtype, t.shape, 0, 0};
    const int64_t bytes = bytes_of_shape(entry, path);
    MOEKIT_CHECK(bytes == static_cast<int64_t>(t.data.size()),
                 "{}: tensor {}: {} needs {} bytes, came {}", path, t.name, describe(entry), bytes,
                 t.data.size());
    header +=
        fmt::format("{}{}:{{\"dtype\":\"{}\",\"shape\":[{}],\"data_offsets\":[{},{}]}}",
                    header.size() > 1 ? "," : "", json_quote(t.name), safetensors_name(t.dtype),
                    fmt::join(t.shape, ","), offset, offset + bytes);
    offset += bytes;
  }
  header += "}";
  header.resize(static_cast<size_t>(round_up(static_cast<int64_t>(header.size()), 8)), ' ');

  AtomicFile file(path);
  std::array<uint8_t, 8> length{};
  for (size_t i = 0; i < 8; ++i) length[i] = static_cast<uint8_t>(header.size() >> (8 * i));
  file.write(length.data(), 8);
  file.write(header);
  for (const TensorSource& t : tensors) {
    file.write(t.data.data(), static_cast<int64_t>(t.data.size()));
  }
  file.commit();
}

}  // namespace moekit::checkpoint
