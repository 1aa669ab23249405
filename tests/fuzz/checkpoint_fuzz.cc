// Fuzzes the checkpoint reader: an input is a config.json, a zero byte, and a second file. The
// first byte says what the second file is. Whatever comes, the reader ends in a result or in an
// Error.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>

#include "moekit/checkpoint.h"
#include "moekit/error.h"
#include "moekit/tensor_file.h"
#include "problem/canonical_layer.h"
#include "quant/stored_codec.h"

namespace {

namespace fs = std::filesystem;
using moekit::StoredExpert;
using moekit::StoredMatrix;

/// One directory of the process, in memory where the system has such a place.
const std::string& directory() {
  static const std::string path = [] {
    const char* base = fs::is_directory("/dev/shm") ? "/dev/shm" : "/tmp";
    std::string pattern = std::string(base) + "/moekit_fuzz_XXXXXX";
    std::string made = ::mkdtemp(pattern.data());
    static std::string at_exit;
    at_exit = made;
    std::atexit([] { fs::remove_all(at_exit); });
    return made;
  }();
  return path;
}

void write(const std::string& name, std::string_view bytes) {
  std::ofstream(directory() + "/" + name, std::ios::binary | std::ios::trunc) << bytes;
}

/// Decodes the corners and the middle, so that a wrong stride or offset shows as a bad access.
void touch(const StoredMatrix& m) {
  if (m.empty()) return;
  for (const int64_t row : {int64_t{0}, m.rows / 2, m.rows - 1}) {
    for (const int64_t col : {int64_t{0}, m.cols / 2, m.cols - 1}) {
      float w = 0;
      moekit::quant::decode_weights(m, row, col, 1, &w);
      moekit::quant::scale_at(m, row, col);
      moekit::quant::zero_at(m, row, col);
    }
  }
}

void touch(const StoredExpert& e) {
  for (const StoredMatrix* m : {&e.gate, &e.up, &e.down}) touch(*m);
  for (const moekit::StoredVector* v : {&e.gate_bias, &e.up_bias, &e.down_bias}) {
    if (!v->empty()) moekit::quant::element(*v, v->size - 1);
  }
}

void read_checkpoint() {
  try {
    moekit::inspect_checkpoint(directory(), true);
  } catch (const moekit::Error&) {
  }
  try {
    const auto layer = moekit::load_canonical(directory(), -1);
    touch(layer->router.weight);
    for (size_t e = 0; e < layer->experts.size(); e += 1 + layer->experts.size() / 8) {
      touch(layer->experts[e]);
    }
    touch(layer->experts.back());
    touch(layer->shared);
    touch(layer->latent_in);
  } catch (const moekit::Error&) {
  }
}

void read_tensor_file(const std::string& name, std::string_view bytes) {
  write(name, bytes);
  try {
    for (const moekit::FileTensor& t : moekit::read_tensors(directory() + "/" + name)) {
      volatile uint8_t sink = 0;
      const int64_t size = t.view.num_elements() * moekit::bytes_of(t.view.dtype);
      if (size > 0) sink = static_cast<const uint8_t*>(t.view.data)[size - 1];
      (void)sink;
    }
  } catch (const moekit::Error&) {
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 2) return 0;
  const std::string_view input(reinterpret_cast<const char*>(data) + 1, size - 1);
  const size_t cut = std::min(input.find('\0'), input.size());
  const std::string_view first = input.substr(0, cut);
  const std::string_view second = input.substr(std::min(cut + 1, input.size()));
  std::error_code ignored;
  switch (data[0] % 4) {
    case 0:  // one file of weights
      fs::remove(directory() + "/model.safetensors.index.json", ignored);
      write("config.json", first);
      write("model.safetensors", second);
      read_checkpoint();
      break;
    case 1:  // an index over the weights of an earlier input
      write("config.json", first);
      write("model.safetensors.index.json", second);
      read_checkpoint();
      break;
    case 2: read_tensor_file("x.npy", input); break;
    case 3: read_tensor_file("x.safetensors", input); break;
  }
  return 0;
}
