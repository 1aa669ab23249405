// oneDNN at run time: libdnnl.so.2 or .so.3, opened by name, with the few functions of its C
// interface that one matrix product needs. Nothing of it is needed to build. What differs between
// the two majors ends here.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

namespace moekit::cli::onednn {

enum class Type : int { bf16 = 2, f32 = 3 };

struct Functions;

/// A handle of the library with the function that ends it.
using Handle = std::unique_ptr<void, std::function<void(void*)>>;

/// Shape, type and layout of a matrix. Descriptors made by the library live in what they came from.
class Descriptor {
 public:
  const void* get() const { return handle_ ? handle_.get() : value_.get(); }

 private:
  friend class Library;
  Handle handle_;                       // 3.x: an object
  std::shared_ptr<std::byte[]> value_;  // 2.x: a struct by value
};

/// One argument of an execution.
struct Argument {
  int id;
  void* memory;
};
inline constexpr int kSource = 1, kDestination = 17, kWeights = 33, kBias = 41;

/// A product of fixed shapes, ready to run.
struct Matmul {
  Handle description, primitive;
  std::string implementation;
  const void* weights = nullptr;  ///< descriptor of its weights, owned by `description`
};

class Library {
 public:
  /// `path` empty: by name, newest major first. Uses `num_threads` OpenMP threads of the calling
  /// thread from here on. Throws unsupported: not found, a version of another interface, or built
  /// without OpenMP.
  Library(const std::string& path, int num_threads);
  ~Library();
  Library(const Library&) = delete;
  Library& operator=(const Library&) = delete;

  const std::string& version() const { return version_; }

  /// [rows, cols] with these strides in elements.
  Descriptor matrix(int64_t rows, int64_t cols, Type type, int64_t row_stride,
                    int64_t col_stride) const;
  /// [rows, cols] in whatever layout the library prefers.
  Descriptor any_layout(int64_t rows, int64_t cols, Type type) const;
  /// destination [M, N] = source [M, K] x weights [K, N] (+ bias [1, N]; null: none). False when
  /// the library has no implementation.
  bool make_matmul(const void* source, const void* weights, const void* bias,
                   const void* destination, Matmul& matmul) const;
  int64_t bytes_of(const void* descriptor) const;
  /// `data` null: to be set before it is used.
  Handle memory(const void* descriptor, void* data) const;
  void set_data(void* memory, void* data) const;
  /// Copies between layouts.
  void reorder(const void* from, void* source, const void* to, void* destination) const;
  void execute(const Matmul& matmul, std::initializer_list<Argument> arguments) const;

  /// body(thread, num_threads) on the library's own OpenMP threads.
  void on_threads(const std::function<void(int, int)>& body) const;

 private:
  void open(const std::string& path);
  void read_version();
  void load_functions();
  void use_threads(int num_threads);
  void run(void* primitive, const Argument* arguments, int count) const;

  void* library_ = nullptr;
  std::unique_ptr<Functions> f_;
  int major_ = 0;
  std::string version_;
  Handle engine_, stream_;
  int num_threads_ = 1;
};

}  // namespace moekit::cli::onednn
