#include "peers/onednn_library.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include "peers/refuse.h"

namespace moekit::cli::onednn {

// Signatures of the C interface. Enumerators travel as int, objects and descriptors as pointers.
struct Functions {
  int (*engine_create)(void**, int, size_t);
  int (*engine_destroy)(void*);
  int (*stream_create)(void**, void*, unsigned);
  int (*stream_destroy)(void*);
  int (*stream_wait)(void*);
  int (*memory_create)(void**, const void*, void*, void*);
  int (*memory_destroy)(void*);
  int (*memory_set_data_handle)(void*, void*);
  size_t (*memory_desc_get_size)(const void*);
  int (*primitive_desc_destroy)(void*);
  int (*primitive_desc_query)(const void*, int, int, void*);
  const void* (*primitive_desc_query_md)(const void*, int, int);
  int (*reorder_primitive_desc_create)(void**, const void*, void*, const void*, void*, const void*);
  int (*primitive_create)(void**, const void*);
  int (*primitive_destroy)(void*);
  int (*primitive_execute)(const void*, void*, int, const Argument*);
  // 2.x: descriptors are structs of the caller's.
  int (*memory_desc_init_by_strides)(void*, int, const int64_t*, int, const int64_t*);
  int (*memory_desc_init_by_tag)(void*, int, const int64_t*, int, int);
  int (*matmul_desc_init)(void*, const void*, const void*, const void*, const void*);
  int (*primitive_desc_create)(void**, const void*, const void*, void*, const void*);
  // 3.x: they are objects.
  int (*memory_desc_create_with_strides)(void**, int, const int64_t*, int, const int64_t*);
  int (*memory_desc_create_with_tag)(void**, int, const int64_t*, int, int);
  int (*memory_desc_destroy)(void*);
  int (*matmul_primitive_desc_create)(void**, void*, const void*, const void*, const void*,
                                      const void*, const void*);
  // Of the OpenMP run time that the library brings along.
  void (*omp_set_num_threads)(int);
  int (*omp_get_thread_num)();
  void (*gomp_parallel)(void (*)(void*), void*, unsigned, unsigned);
};

namespace {

struct Version {
  int major, minor, patch;
  const char* hash;
  unsigned cpu_runtime, gpu_runtime;
};

constexpr unsigned kOpenMp = 2;
constexpr int kCpu = 1, kInOrder = 1, kAnyTag = 1;
constexpr int kQueryImplementation = 8, kQueryWeights = 131;
constexpr int kUnimplemented = 3;
// Structs of 2.x take 696 bytes (memory descriptor) and four of them and a bit (matmul); room for
// minor versions that add fields.
constexpr size_t kDescriptorBytes = 4096, kMatmulBytes = 16384;

void check(int status, const char* what) {
  if (status != 0) refuse(fmt::format("oneDNN: {} failed with status {}", what, status));
}

std::shared_ptr<std::byte[]> room(size_t bytes) {
  return std::shared_ptr<std::byte[]>(new std::byte[bytes]{});
}

/// What GOMP_parallel hands to each thread.
struct Team {
  const std::function<void(int, int)>* body;
  int (*thread_num)();
  int num_threads;
};

void run_member(void* data) {
  const auto& team = *static_cast<const Team*>(data);
  (*team.body)(team.thread_num(), team.num_threads);
}

}  // namespace

Library::Library(const std::string& path, int num_threads) : f_(std::make_unique<Functions>()) {
  open(path);
  read_version();
  load_functions();
  use_threads(num_threads);
  void* handle = nullptr;
  check(f_->engine_create(&handle, kCpu, 0), "dnnl_engine_create");
  engine_ = Handle(handle, f_->engine_destroy);
  check(f_->stream_create(&handle, engine_.get(), kInOrder), "dnnl_stream_create");
  stream_ = Handle(handle, f_->stream_destroy);
}

// Stays loaded: its OpenMP threads live as long as the process.
Library::~Library() = default;

void Library::open(const std::string& path) {
  if (!path.empty()) {
    library_ = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library_ == nullptr)
      refuse(fmt::format("oneDNN: expected a library in \"{}\": {}", path, dlerror()));
    return;
  }
  for (const char* name : {"libdnnl.so.3", "libdnnl.so.2"}) {
    library_ = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (library_ != nullptr) return;
  }
  refuse(
      "oneDNN is not installed: the loader finds neither libdnnl.so.3 nor libdnnl.so.2; install it "
      "(Debian: libdnnl2), or name the file with --peer-dnnl or MOEKIT_DNNL");
}

void Library::read_version() {
  using Read = const Version* (*)();
  const auto read = reinterpret_cast<Read>(dlsym(library_, "dnnl_version"));
  if (read == nullptr) refuse("oneDNN: the library has no dnnl_version; is it libdnnl?");
  const Version& v = *read();
  major_ = v.major;
  version_ = fmt::format("{}.{}.{}", v.major, v.minor, v.patch);
  if (v.major != 2 && v.major != 3) {
    refuse(fmt::format("oneDNN {}: only the interfaces of 2.x and 3.x are known here", version_));
  }
  if ((v.cpu_runtime & kOpenMp) == 0) {
    refuse(fmt::format(
        "oneDNN {} was built without OpenMP: it cannot be given the threads of this bench",
        version_));
  }
}

void Library::load_functions() {
  const auto load = [&](auto& function, const char* name) {
    void* symbol = dlsym(library_, name);
    if (symbol == nullptr) refuse(fmt::format("oneDNN {} has no {}", version_, name));
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(symbol);
  };
  Functions& f = *f_;
  load(f.engine_create, "dnnl_engine_create");
  load(f.engine_destroy, "dnnl_engine_destroy");
  load(f.stream_create, "dnnl_stream_create");
  load(f.stream_destroy, "dnnl_stream_destroy");
  load(f.stream_wait, "dnnl_stream_wait");
  load(f.memory_create, "dnnl_memory_create");
  load(f.memory_destroy, "dnnl_memory_destroy");
  load(f.memory_set_data_handle, "dnnl_memory_set_data_handle");
  load(f.memory_desc_get_size, "dnnl_memory_desc_get_size");
  load(f.primitive_desc_destroy, "dnnl_primitive_desc_destroy");
  load(f.primitive_desc_query, "dnnl_primitive_desc_query");
  load(f.primitive_desc_query_md, "dnnl_primitive_desc_query_md");
  load(f.reorder_primitive_desc_create, "dnnl_reorder_primitive_desc_create");
  load(f.primitive_create, "dnnl_primitive_create");
  load(f.primitive_destroy, "dnnl_primitive_destroy");
  load(f.primitive_execute, "dnnl_primitive_execute");
  if (major_ == 2) {
    load(f.memory_desc_init_by_strides, "dnnl_memory_desc_init_by_strides");
    load(f.memory_desc_init_by_tag, "dnnl_memory_desc_init_by_tag");
    load(f.matmul_desc_init, "dnnl_matmul_desc_init");
    load(f.primitive_desc_create, "dnnl_primitive_desc_create");
  } else {
    load(f.memory_desc_create_with_strides, "dnnl_memory_desc_create_with_strides");
    load(f.memory_desc_create_with_tag, "dnnl_memory_desc_create_with_tag");
    load(f.memory_desc_destroy, "dnnl_memory_desc_destroy");
    load(f.matmul_primitive_desc_create, "dnnl_matmul_primitive_desc_create");
  }
  load(f.omp_set_num_threads, "omp_set_num_threads");
  load(f.omp_get_thread_num, "omp_get_thread_num");
  load(f.gomp_parallel, "GOMP_parallel");
}

void Library::use_threads(int num_threads) {
  num_threads_ = num_threads;
  f_->omp_set_num_threads(num_threads);
}

Descriptor Library::matrix(int64_t rows, int64_t cols, Type type, int64_t row_stride,
                           int64_t col_stride) const {
  const std::array<int64_t, 2> dims = {rows, cols}, strides = {row_stride, col_stride};
  Descriptor d;
  if (major_ == 2) {
    d.value_ = room(kDescriptorBytes);
    check(f_->memory_desc_init_by_strides(d.value_.get(), 2, dims.data(), static_cast<int>(type),
                                          strides.data()),
          "dnnl_memory_desc_init_by_strides");
    return d;
  }
  void* handle = nullptr;
  check(f_->memory_desc_create_with_strides(&handle, 2, dims.data(), static_cast<int>(type),
                                            strides.data()),
        "dnnl_memory_desc_create_with_strides");
  d.handle_ = Handle(handle, f_->memory_desc_destroy);
  return d;
}

Descriptor Library::any_layout(int64_t rows, int64_t cols, Type type) const {
  const std::array<int64_t, 2> dims = {rows, cols};
  Descriptor d;
  if (major_ == 2) {
    d.value_ = room(kDescriptorBytes);
    check(f_->memory_desc_init_by_tag(d.value_.get(), 2, dims.data(), static_cast<int>(type),
                                      kAnyTag),
          "dnnl_memory_desc_init_by_tag");
    return d;
  }
  void* handle = nullptr;
  check(f_->memory_desc_create_with_tag(&handle, 2, dims.data(), static_cast<int>(type), kAnyTag),
        "dnnl_memory_desc_create_with_tag");
  d.handle_ = Handle(handle, f_->memory_desc_destroy);
  return d;
}

bool Library::make_matmul(const void* source, const void* weights, const void* bias,
                          const void* destination, Matmul& matmul) const {
  void* handle = nullptr;
  int status = 0;
  if (major_ == 2) {
    const auto operation = room(kMatmulBytes);
    check(f_->matmul_desc_init(operation.get(), source, weights, bias, destination),
          "dnnl_matmul_desc_init");
    status = f_->primitive_desc_create(&handle, operation.get(), nullptr, engine_.get(), nullptr);
  } else {
    status = f_->matmul_primitive_desc_create(&handle, engine_.get(), source, weights, bias,
                                              destination, nullptr);
  }
  if (status == kUnimplemented) return false;
  check(status, "making a matmul");
  matmul.description = Handle(handle, f_->primitive_desc_destroy);
  check(f_->primitive_create(&handle, matmul.description.get()), "dnnl_primitive_create");
  matmul.primitive = Handle(handle, f_->primitive_destroy);
  const char* name = nullptr;
  check(f_->primitive_desc_query(matmul.description.get(), kQueryImplementation, 0,
                                 static_cast<void*>(&name)),
        "dnnl_primitive_desc_query");
  matmul.implementation = name;
  matmul.weights = f_->primitive_desc_query_md(matmul.description.get(), kQueryWeights, 0);
  if (matmul.weights == nullptr) refuse("oneDNN: a matmul does not tell the layout of its weights");
  return true;
}

int64_t Library::bytes_of(const void* descriptor) const {
  return static_cast<int64_t>(f_->memory_desc_get_size(descriptor));
}

Handle Library::memory(const void* descriptor, void* data) const {
  void* handle = nullptr;
  check(f_->memory_create(&handle, descriptor, engine_.get(), data), "dnnl_memory_create");
  return Handle(handle, f_->memory_destroy);
}

void Library::set_data(void* memory, void* data) const {
  check(f_->memory_set_data_handle(memory, data), "dnnl_memory_set_data_handle");
}

void Library::reorder(const void* from, void* source, const void* to, void* destination) const {
  void* handle = nullptr;
  check(f_->reorder_primitive_desc_create(&handle, from, engine_.get(), to, engine_.get(), nullptr),
        "dnnl_reorder_primitive_desc_create");
  const Handle description(handle, f_->primitive_desc_destroy);
  check(f_->primitive_create(&handle, description.get()), "dnnl_primitive_create");
  const Handle primitive(handle, f_->primitive_destroy);
  const std::array<Argument, 2> arguments = {{{kSource, source}, {kDestination, destination}}};
  run(primitive.get(), arguments.data(), 2);
}

void Library::execute(const Matmul& matmul, std::initializer_list<Argument> arguments) const {
  run(matmul.primitive.get(), arguments.begin(), static_cast<int>(arguments.size()));
}

void Library::run(void* primitive, const Argument* arguments, int count) const {
  check(f_->primitive_execute(primitive, stream_.get(), count, arguments),
        "dnnl_primitive_execute");
  check(f_->stream_wait(stream_.get()), "dnnl_stream_wait");
}

void Library::on_threads(const std::function<void(int, int)>& body) const {
  if (num_threads_ == 1) return body(0, 1);
  Team team{&body, f_->omp_get_thread_num, num_threads_};
  f_->gomp_parallel(run_member, &team, static_cast<unsigned>(num_threads_), 0);
}

}  // namespace moekit::cli::onednn
