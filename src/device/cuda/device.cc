#include "device/cuda/device.h"

#include "base/check.h"

namespace moekit::device {

void check_cuda(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  const ErrorCode code =
      status == cudaErrorMemoryAllocation ? ErrorCode::out_of_memory : ErrorCode::cuda;
  // Clears the errors that do not stick, so that the next call is not blamed for this one.
  cudaGetLastError();
  fail(code, "{} failed: {} ({})", what, cudaGetErrorString(status), cudaGetErrorName(status));
}

int device_count() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) {
    cudaGetLastError();
    return 0;
  }
  return count;
}

Properties properties(int index) {
  cudaDeviceProp raw{};
  check_cuda(cudaGetDeviceProperties(&raw, index), "cudaGetDeviceProperties");
  Properties p;
  p.index = index;
  p.arch = {raw.major, raw.minor, raw.major >= 9};
  p.name = raw.name;
  p.num_sms = raw.multiProcessorCount;
  p.l2_bytes = raw.l2CacheSize;
  p.memory_bytes = static_cast<int64_t>(raw.totalGlobalMem);
  p.shared_bytes_per_block = static_cast<int64_t>(raw.sharedMemPerBlockOptin);
  return p;
}

OnDevice::OnDevice(int index) {
  check_cuda(cudaGetDevice(&before_), "cudaGetDevice");
  if (index != before_) check_cuda(cudaSetDevice(index), "cudaSetDevice");
}

OnDevice::~OnDevice() { cudaSetDevice(before_); }

Event::Event() { check_cuda(cudaEventCreate(&event_), "cudaEventCreate"); }

Event::~Event() {
  if (event_ != nullptr) cudaEventDestroy(event_);
}

void Event::record(cudaStream_t stream) const {
  check_cuda(cudaEventRecord(event_, stream), "cudaEventRecord");
}

void Event::synchronize() const {
  check_cuda(cudaEventSynchronize(event_), "cudaEventSynchronize");
}

double Event::us_since(const Event& earlier) const {
  float ms = 0.0f;
  check_cuda(cudaEventElapsedTime(&ms, earlier.event_, event_), "cudaEventElapsedTime");
  return double{ms} * 1e3;
}

Stream::Stream() {
  check_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
}

Stream::~Stream() {
  if (stream_ != nullptr) cudaStreamDestroy(stream_);
}

void Stream::synchronize() const {
  check_cuda(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
}

DeviceBuffer::DeviceBuffer(int64_t bytes) : size_(bytes) {
  MOEKIT_CHECK(bytes >= 0, "a device buffer needs 0 bytes or more, got {}", bytes);
  if (bytes == 0) return;
  const cudaError_t status = cudaMalloc(&data_, static_cast<size_t>(bytes));
  if (status != cudaSuccess) {
    data_ = nullptr;
    check_cuda(status, fmt::format("cudaMalloc of {} bytes", bytes).c_str());
  }
}

DeviceBuffer::~DeviceBuffer() {
  if (data_ != nullptr) cudaFree(data_);
}

void DeviceBuffer::upload(const void* host, int64_t bytes) const {
  MOEKIT_CHECK(bytes <= size_, "upload of {} bytes into a buffer of {}", bytes, size_);
  check_cuda(cudaMemcpy(data_, host, static_cast<size_t>(bytes), cudaMemcpyHostToDevice),
             "cudaMemcpy to the device");
}

void DeviceBuffer::download(void* host, int64_t bytes) const {
  MOEKIT_CHECK(bytes <= size_, "download of {} bytes from a buffer of {}", bytes, size_);
  check_cuda(cudaMemcpy(host, data_, static_cast<size_t>(bytes), cudaMemcpyDeviceToHost),
             "cudaMemcpy from the device");
}

}  // namespace moekit::device
