// moekit_layer_run in apache-tvm-ffi's calling convention, so that the tensors of its frameworks
// (torch, JAX, CuPy, NumPy) and their current CUDA stream arrive without a copy and without Python
// code. Needs neither its headers nor its library: what is used of its binary interface is written
// down here, from tvm/ffi/c_api.h of 0.1.x.
#include <dlfcn.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "api/c_guard.h"
#include "moekit/c_api.h"

namespace {

namespace c = moekit::c;

/// TVMFFIAny: a value with its type, or a pointer to an object.
struct Any {
  int32_t type_index;
  uint32_t zero_padding;
  union {
    int64_t integer;
    void* pointer;
  };
};
static_assert(sizeof(Any) == 16 && std::is_standard_layout_v<Any>);

// TVMFFITypeIndex: what a tensor comes as, and none.
constexpr int32_t kNone = 0, kInteger = 1, kTensorPointer = 7, kTensorObject = 70;
/// sizeof(TVMFFIObject), the head of an object; its DLTensor follows.
constexpr size_t kObjectHead = 24;

/// The DLTensor of an argument, which is a moekit_tensor; null for None.
const moekit_tensor* tensor_of(const Any& value, const char* name) {
  switch (value.type_index) {
    case kNone: return nullptr;
    case kTensorPointer: return static_cast<const moekit_tensor*>(value.pointer);
    case kTensorObject:
      return reinterpret_cast<const moekit_tensor*>(static_cast<const char*>(value.pointer) +
                                                    kObjectHead);
    default:
      moekit::fail(moekit::ErrorCode::invalid_argument,
                   "{}: expected a tensor or None, got tvm-ffi type {}", name, value.type_index);
  }
}

/// The stream that tvm-ffi has for a device: the framework's own, noted when its tensor was passed.
void* current_stream(const moekit_device& device) {
  using GetStream = void*(int32_t device_type, int32_t device_id);
  // The caller has it loaded; where it is linked statically there is no stream to ask for.
  static GetStream* const get_stream = [] {
    void* library = dlopen("libtvm_ffi.so", RTLD_LAZY | RTLD_NOLOAD);
    return library == nullptr ? nullptr
                              : reinterpret_cast<GetStream*>(dlsym(library, "TVMFFIEnvGetStream"));
  }();
  MOEKIT_CHECK_AS(moekit::ErrorCode::unsupported, get_stream != nullptr,
                  "libtvm_ffi.so has no TVMFFIEnvGetStream; call moekit_layer_run with a stream");
  return get_stream(device.device_type, device.device_id);
}

/// `args`: layer, hidden, topk_ids, topk_weights, output.
moekit_status run(const Any* args, int32_t num_args) {
  constexpr int32_t kNumArgs = 5;
  MOEKIT_CHECK(args != nullptr && num_args == kNumArgs,
               "expected {} arguments (layer, hidden, topk_ids, topk_weights, output), got {}",
               kNumArgs, num_args);
  MOEKIT_CHECK(args[0].type_index == kInteger,
               "layer: expected the address of a moekit_layer, got tvm-ffi type {}",
               args[0].type_index);
  moekit_run_args a{};
  a.struct_size = sizeof a;
  a.hidden = tensor_of(args[1], "hidden");
  a.topk_ids = tensor_of(args[2], "topk_ids");
  a.topk_weights = tensor_of(args[3], "topk_weights");
  a.output = tensor_of(args[4], "output");
  constexpr int32_t kCuda = 2;
  if (a.hidden != nullptr && a.hidden->device.device_type == kCuda) {
    a.stream = current_stream(a.hidden->device);
  }
  return moekit_layer_run(reinterpret_cast<const moekit_layer*>(args[0].integer), &a);
}

}  // namespace

/// A TVMFFISafeCallType under the name by which tvm-ffi's loaders look for functions. `result`
/// becomes the status; moekit_last_error() has the words. Never fails in tvm-ffi's own sense.
extern "C" MOEKIT_C_API int __tvm_ffi_moekit_layer_run(void* /*self*/, const Any* args,
                                                       int32_t num_args, Any* result) {
  moekit_status status = MOEKIT_OK;
  const moekit_status read = c::guarded([&] { status = run(args, num_args); });
  *result =
      Any{.type_index = kInteger, .zero_padding = 0, .integer = read != MOEKIT_OK ? read : status};
  return 0;
}
