// Tensor files for programs: reading by reference with the flag in errors, writing a run's results.
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <vector>

#include "base/check.h"
#include "moekit/tensor_file.h"
#include "moekit/tools.h"

namespace moekit {

OwnedTensor load_tensor(const std::string& reference, const std::string& flag) {
  try {
    FileTensor file = read_tensor(reference);
    return {file.view, std::move(file.keep_alive)};
  } catch (const Error& e) {
    // An element type that no input may have is a well-formed file that does not fit.
    const ErrorCode code =
        e.code() == ErrorCode::unsupported ? ErrorCode::invalid_argument : e.code();
    throw Error(code, fmt::format("{}: {}", flag, e.what()));
  }
}

void check_output_path(const std::string& path) {
  MOEKIT_CHECK(path.ends_with(".npy") || path.ends_with(".safetensors"),
               "--output {}: expected a file name that ends in .npy or .safetensors", path);
  check_writable_path("--output", path);
}

void check_writable_path(const std::string& flag, const std::string& path) {
  struct stat status {};
  MOEKIT_CHECK(stat(path.c_str(), &status) != 0 || !S_ISDIR(status.st_mode),
               "{} {}: expected a file, got a directory", flag, path);
  const size_t slash = path.rfind('/');
  const std::string folder = slash == std::string::npos ? "."
                             : slash == 0               ? "/"
                                                        : path.substr(0, slash);
  MOEKIT_CHECK(stat(folder.c_str(), &status) == 0 && S_ISDIR(status.st_mode),
               "{} {}: expected its folder to exist, {} does not", flag, path, folder);
  MOEKIT_CHECK(access(folder.c_str(), W_OK | X_OK) == 0,
               "{} {}: expected a folder that can be written, {}: {}", flag, path, folder,
               std::strerror(errno));
}

void save_outputs(const std::string& path, const RankedOutputs& outputs, int64_t num_tokens,
                  const MoeConfig& config) {
  check_output_path(path);
  auto view = [&](const auto& buffer, DType dtype, int64_t width) {
    return TensorView::contiguous(buffer.data(), dtype, {num_tokens, width});
  };
  const TensorView output = view(outputs.output, DType::f32, config.hidden);
  if (path.ends_with(".npy")) return write_npy(path, output);
  std::vector<NamedTensor> tensors = {
      {"output", output},
      {"topk_ids", view(outputs.topk_ids, DType::i32, config.top_k)},
      {"topk_weights", view(outputs.topk_weights, DType::f32, config.top_k)}};
  // With routing given by the caller there are no logits.
  if (num_tokens == 0 || !outputs.router_logits.empty()) {
    tensors.push_back(
        {"router_logits", view(outputs.router_logits, DType::f32, config.num_experts)});
  }
  write_safetensors(path, tensors);
}

}  // namespace moekit
