#include "engine/pack_cache.h"

#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <vector>

#include "base/check.h"
#include "base/file.h"
#include "base/log.h"
#include "base/math.h"
#include "moekit/error.h"
#include "quant/stored_digest.h"

namespace moekit::engine {
namespace {

constexpr uint32_t kByteOrder = 0x01020304;

/// Head of a file; the blob follows at kBlobOffset. Written as it lies in memory: a machine of the
/// other byte order finds another `order`.
struct Head {
  char magic[16] = "moekit packed 1";
  uint32_t order = kByteOrder;
  uint32_t reserved = 0;
  Digest key;
  int64_t bytes = 0;
  Digest content;  ///< of the blob's pieces in order
  Digest head;     ///< of all before it
};
static_assert(sizeof(Head) == 80);
constexpr int64_t kBlobOffset = 4096;

/// Pieces are digested side by side, and each right after it was copied, while it is in the cache.
constexpr int64_t kPiece = int64_t{1} << 20;

Digest digest_of_head(const Head& head) {
  return moekit::digest_of(&head, static_cast<int64_t>(offsetof(Head, head)));
}

Digest combine(const std::vector<Digest>& pieces) {
  Digester all;
  for (const Digest& piece : pieces) all.add(piece);
  return all.result();
}

/// Digests `from`; copies it to `to` where that is not null.
Digest take_pieces(const std::byte* from, std::byte* to, int64_t bytes, ThreadPool& threads) {
  std::vector<Digest> pieces(static_cast<size_t>(ceil_div(bytes, kPiece)));
  auto take = [&](int64_t i, int) {
    const int64_t begin = i * kPiece;
    const int64_t size = std::min(kPiece, bytes - begin);
    const std::byte* piece = from + begin;
    if (to != nullptr) {
      std::memcpy(to + begin, piece, static_cast<size_t>(size));
      piece = to + begin;
    }
    pieces[static_cast<size_t>(i)] = moekit::digest_of(piece, size);
  };
  threads.parallel_for(static_cast<int64_t>(pieces.size()), take);
  return combine(pieces);
}

/// Fills `blob` from the file, or says why that is not what `key` asks for.
std::string read_into(const std::string& path, const Digest& key, std::byte* blob, int64_t bytes,
                      ThreadPool& threads) {
  const MappedFile file(path);
  if (file.size() != kBlobOffset + bytes)
    return fmt::format("expected {} bytes, found {}", kBlobOffset + bytes, file.size());
  Head head;
  std::memcpy(&head, file.data(), sizeof(head));
  const Head expected;
  if (std::memcmp(head.magic, expected.magic, sizeof(head.magic)) != 0 ||
      head.order != kByteOrder || head.head != digest_of_head(head))
    return "its head is damaged";
  if (head.key != key || head.bytes != bytes) return "it belongs to other weights";
  file.will_need(kBlobOffset, bytes);
  if (take_pieces(file.data() + kBlobOffset, blob, bytes, threads) != head.content)
    return "its content is damaged";
  return "";
}

std::string fault_of_reading(const std::string& path, const Digest& key, std::byte* blob,
                             int64_t bytes, ThreadPool& threads) {
  if (!is_file(path)) return "it is not there";
  try {
    return read_into(path, key, blob, bytes, threads);
  } catch (const Error& error) {  // it can't be opened, or went away meanwhile
    return error.what();
  }
}

void write_file(const std::string& path, const Digest& key, const std::byte* blob, int64_t bytes,
                ThreadPool& threads) {
  Head head;
  head.key = key;
  head.bytes = bytes;
  head.content = take_pieces(blob, nullptr, bytes, threads);
  head.head = digest_of_head(head);
  std::vector<std::byte> page(kBlobOffset);
  std::memcpy(page.data(), &head, sizeof(head));
  AtomicFile file(path);
  file.write(page.data(), kBlobOffset);
  file.write(blob, bytes);
  file.commit();
}

}  // namespace

const char* to_string(PackOutcome outcome) {
  switch (outcome) {
    case PackOutcome::off: return "off";
    case PackOutcome::hit: return "hit";
    case PackOutcome::stored: return "stored";
    case PackOutcome::damaged: return "damaged";
    case PackOutcome::not_stored: return "not_stored";
  }
  return "?";
}

PackCache::PackCache(std::string directory) : directory_(std::move(directory)) {
  if (::mkdir(directory_.c_str(), 0777) != 0 && errno != EEXIST) {
    fail(ErrorCode::invalid_argument, "pack cache {}: cannot make the directory: {}", directory_,
         std::strerror(errno));
  }
  MOEKIT_CHECK(is_directory(directory_), "pack cache {}: expected a directory, found a file",
               directory_);
  MOEKIT_CHECK(::access(directory_.c_str(), R_OK | W_OK | X_OK) == 0,
               "pack cache {}: needs to be read and written: {}", directory_, std::strerror(errno));
}

Digest PackCache::key_of(const CanonicalLayer& layer, std::span<const int32_t> local_experts,
                         const WeightLayout& layout, std::string_view isa, ThreadPool& threads) {
  std::vector<Digest> experts(local_experts.size());
  auto digest = [&](int64_t i, int) {
    const auto expert = static_cast<size_t>(local_experts[static_cast<size_t>(i)]);
    experts[static_cast<size_t>(i)] = quant::digest_of(layer.experts[expert]);
  };
  threads.parallel_for(static_cast<int64_t>(experts.size()), digest);
  Digester key;
  key.add(isa);
  key.add(layout.name);
  key.add(layout.row_order);
  key.add(layout.note);
  key.add(layout.encoding);
  for (const WeightScheme* scheme : {&layout.gate_up, &layout.down}) {
    key.add(scheme->format);
    key.add(scheme->group);
    key.add(scheme->zero_points);
  }
  for (int64_t offset : layout.expert_offset) key.add(offset);
  key.add(combine(experts));
  return key.result();
}

std::string PackCache::path_of(const Digest& key) const {
  return directory_ + "/" + key.hex() + ".moekit-pack";
}

PackOutcome PackCache::fill(const Digest& key, std::byte* blob, int64_t bytes, ThreadPool& threads,
                            FunctionRef<void()> pack) const {
  if (bytes == 0) return PackOutcome::off;
  const std::string path = path_of(key);
  const std::string fault = fault_of_reading(path, key, blob, bytes, threads);
  if (fault.empty()) return PackOutcome::hit;
  const bool damaged = is_file(path);
  if (damaged) log::warning("pack cache: {}: {}; it is packed and written anew", path, fault);
  pack();
  try {
    write_file(path, key, blob, bytes, threads);
  } catch (const Error& error) {
    log::warning("pack cache: {}", error.what());
    return PackOutcome::not_stored;
  }
  return damaged ? PackOutcome::damaged : PackOutcome::stored;
}

}  // namespace moekit::engine
