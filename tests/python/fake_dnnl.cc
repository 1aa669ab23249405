// A stand-in for libdnnl with the entry points that bench's peer calls: either interface (2.x
// and 3.x), naive products, an OpenMP run time of one thread after the other. What the environment
// asks for makes it unusable in one way or another, so that tests see each reason on every machine.
//   FAKE_DNNL=major=3,runtime=1,only_ref,no_bf16,wrong
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>

namespace {

constexpr int kBf16 = 2, kOk = 0, kInvalid = 2, kUnimplemented = 3;

bool asked(const char* word) {
  const char* text = std::getenv("FAKE_DNNL");
  return text != nullptr && std::string(text).find(word) != std::string::npos;
}

struct Desc {
  int64_t rows, cols, row_stride, col_stride;
  int type;
  bool any;
};

struct Primitive {
  bool reorder = false, has_bias = false;
  Desc source, weights, destination;
};

struct Memory {
  Desc desc;
  void* data;
};

struct Argument {
  int id;
  Memory* memory;
};

struct Version {
  int major, minor, patch;
  const char* hash;
  unsigned cpu_runtime, gpu_runtime;
};

float load(const Memory& m, int64_t row, int64_t col) {
  const int64_t at = row * m.desc.row_stride + col * m.desc.col_stride;
  if (m.desc.type != kBf16) return static_cast<const float*>(m.data)[at];
  const uint32_t bits = static_cast<uint32_t>(static_cast<const uint16_t*>(m.data)[at]) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

void store(const Memory& m, int64_t row, int64_t col, float value) {
  const int64_t at = row * m.desc.row_stride + col * m.desc.col_stride;
  if (m.desc.type != kBf16) {
    static_cast<float*>(m.data)[at] = value;
    return;
  }
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  static_cast<uint16_t*>(m.data)[at] =
      static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

Desc strided(const int64_t* dims, int type, const int64_t* strides) {
  return {dims[0], dims[1], strides[0], strides[1], type, false};
}

Desc any(const int64_t* dims, int type) { return {dims[0], dims[1], dims[1], 1, type, true}; }

int make_product(void** out, const Desc* source, const Desc* weights, const Desc* bias,
                 const Desc* destination) {
  if (source->cols != weights->rows || weights->cols != destination->cols ||
      source->rows != destination->rows)
    return kInvalid;
  if (source->type == kBf16 && asked("no_bf16")) return kUnimplemented;
  *out = new Primitive{false, bias != nullptr, *source, *weights, *destination};
  static_cast<Primitive*>(*out)->weights.any = false;
  return kOk;
}

int thread_number = 0;

}  // namespace

extern "C" {

const Version* dnnl_version() {
  static const Version version = {
      asked("major=4") ? 4 : asked("major=3") ? 3 : 2, 9, 1, "", asked("runtime=1") ? 1u : 2u, 0};
  return &version;
}
int dnnl_engine_create(void** engine, int kind, size_t) { return *engine = new int(kind), kOk; }
int dnnl_engine_destroy(void* engine) { return delete static_cast<int*>(engine), kOk; }
int dnnl_stream_create(void** stream, void*, unsigned) { return *stream = new int(0), kOk; }
int dnnl_stream_destroy(void* stream) { return delete static_cast<int*>(stream), kOk; }
int dnnl_stream_wait(void*) { return kOk; }

int dnnl_memory_desc_init_by_strides(Desc* d, int, const int64_t* dims, int type,
                                     const int64_t* strides) {
  return *d = strided(dims, type, strides), kOk;
}
int dnnl_memory_desc_init_by_tag(Desc* d, int, const int64_t* dims, int type, int) {
  return *d = any(dims, type), kOk;
}
int dnnl_memory_desc_create_with_strides(void** d, int, const int64_t* dims, int type,
                                         const int64_t* strides) {
  return *d = new Desc(strided(dims, type, strides)), kOk;
}
int dnnl_memory_desc_create_with_tag(void** d, int, const int64_t* dims, int type, int) {
  return *d = new Desc(any(dims, type)), kOk;
}
int dnnl_memory_desc_destroy(void* d) { return delete static_cast<Desc*>(d), kOk; }
size_t dnnl_memory_desc_get_size(const Desc* d) {
  return static_cast<size_t>(d->rows * d->cols * (d->type == kBf16 ? 2 : 4));
}

struct Operation {
  const Desc *source, *weights, *bias, *destination;
};
int dnnl_matmul_desc_init(Operation* o, const Desc* source, const Desc* weights, const Desc* bias,
                          const Desc* destination) {
  return *o = {source, weights, bias, destination}, kOk;
}
int dnnl_primitive_desc_create(void** out, const Operation* o, const void*, void*, const void*) {
  return make_product(out, o->source, o->weights, o->bias, o->destination);
}
int dnnl_matmul_primitive_desc_create(void** out, void*, const Desc* source, const Desc* weights,
                                      const Desc* bias, const Desc* destination, const void*) {
  return make_product(out, source, weights, bias, destination);
}
int dnnl_reorder_primitive_desc_create(void** out, const Desc* source, void*,
                                       const Desc* destination, void*, const void*) {
  *out = new Primitive{true, false, *source, *source, *destination};
  return kOk;
}
int dnnl_primitive_desc_destroy(void* p) { return delete static_cast<Primitive*>(p), kOk; }
int dnnl_primitive_desc_query(const Primitive*, int what, int, const char** text) {
  if (what != 8) return kInvalid;
  *text = asked("only_ref") ? "ref:any" : "fake:rows";
  return kOk;
}
const Desc* dnnl_primitive_desc_query_md(const Primitive* p, int what, int) {
  return what == 131 ? &p->weights : nullptr;
}
int dnnl_primitive_create(void** out, const Primitive* p) { return *out = new Primitive(*p), kOk; }
int dnnl_primitive_destroy(void* p) { return delete static_cast<Primitive*>(p), kOk; }

int dnnl_memory_create(void** out, const Desc* d, void*, void* data) {
  return *out = new Memory{*d, data}, kOk;
}
int dnnl_memory_destroy(void* m) { return delete static_cast<Memory*>(m), kOk; }
int dnnl_memory_set_data_handle(Memory* m, void* data) { return m->data = data, kOk; }

int dnnl_primitive_execute(const Primitive* p, void*, int count, const Argument* arguments) {
  Memory *source = nullptr, *weights = nullptr, *bias = nullptr, *destination = nullptr;
  for (int i = 0; i < count; ++i) {
    switch (arguments[i].id) {
      case 1: source = arguments[i].memory; break;
      case 17: destination = arguments[i].memory; break;
      case 33: weights = arguments[i].memory; break;
      case 41: bias = arguments[i].memory; break;
      default: return kInvalid;
    }
  }
  if (!source || !destination || p->has_bias != (bias != nullptr) ||
      p->reorder != (weights == nullptr))
    return kInvalid;
  if (!source->data || !destination->data || destination->desc.rows != p->destination.rows)
    return kInvalid;
  for (int64_t m = 0; m < p->destination.rows; ++m) {
    for (int64_t n = 0; n < p->destination.cols; ++n) {
      if (p->reorder) {
        store(*destination, m, n, load(*source, m, n));
        continue;
      }
      float sum = bias ? load(*bias, 0, n) : 0.0f;
      for (int64_t k = 0; k < p->source.cols; ++k)
        sum += load(*source, m, k) * load(*weights, k, n);
      store(*destination, m, n, asked("wrong") ? 1.1f * sum : sum);
    }
  }
  return kOk;
}

void omp_set_num_threads(int) {}
int omp_get_thread_num() { return thread_number; }
void GOMP_parallel(void (*body)(void*), void* data, unsigned num_threads, unsigned) {
  for (thread_number = 0; thread_number < static_cast<int>(num_threads); ++thread_number)
    body(data);
}

}  // extern "C"
