#include "api/probe.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>

#include "base/math.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include "api/x86_features.h"
#endif

namespace moekit::api {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Bytes that one thread claims at a time: large enough that claiming costs nothing, small enough
// that threads of unlike speed finish together.
constexpr int64_t kReadChunk = int64_t{4} << 20;
// Arithmetic of one thread per round: about 15 ms at 4 GHz, past the ramp of the clock.
constexpr int64_t kMultiplySteps = 8'000'000;

// A result that the compiler can't prove unused.
std::atomic<uint64_t> sink{0};

// Sums `bytes` (a multiple of 512) in 64-bit lanes; the sum only keeps the loads alive.
uint64_t read_portable(const std::byte* data, int64_t bytes) {
  uint64_t sum[8] = {};
  for (int64_t at = 0; at < bytes; at += 64) {
    uint64_t line[8];
    std::memcpy(line, data + at, 64);
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) sum[i] += line[i];
  }
  return sum[0] + sum[1] + sum[2] + sum[3] + sum[4] + sum[5] + sum[6] + sum[7];
}

// 16 chains of 8 products and sums: what a compiler makes of plain C++, the probe of last resort.
int64_t multiply_portable(int64_t steps, float seed) {
  constexpr int kLanes = 64;
  float acc[kLanes];
  for (int i = 0; i < kLanes; ++i) acc[i] = seed * static_cast<float>(i);
  for (int64_t s = 0; s < steps / 8; ++s) {
    for (float& a : acc) a = a * 0.999f + seed;
  }
  float total = 0;
  for (float a : acc) total += a;
  sink.fetch_add(static_cast<uint64_t>(total > 0), std::memory_order_relaxed);
  return steps / 8 * kLanes * 2;
}

#if defined(__x86_64__)

__attribute__((target("avx2"))) uint64_t read_avx2(const std::byte* data, int64_t bytes) {
  __m256i sum[4] = {_mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256(),
                    _mm256_setzero_si256()};
  for (int64_t at = 0; at < bytes; at += 128) {
    // 2 KiB ahead: the distance that read fastest on Zen 5 (2026-11); small effect elsewhere.
    _mm_prefetch(reinterpret_cast<const char*>(data + at + 2048), _MM_HINT_T0);
    _mm_prefetch(reinterpret_cast<const char*>(data + at + 2112), _MM_HINT_T0);
    // Not unrolled the sums rest in memory, and a Xeon reads a tenth less (2026-12).
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const auto* p = reinterpret_cast<const __m256i*>(data + at) + i;
      sum[i] = _mm256_add_epi64(sum[i], _mm256_load_si256(p));
    }
  }
  alignas(32) uint64_t lanes[4];
  __m256i all =
      _mm256_add_epi64(_mm256_add_epi64(sum[0], sum[1]), _mm256_add_epi64(sum[2], sum[3]));
  _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), all);
  return lanes[0] + lanes[1] + lanes[2] + lanes[3];
}

// Twelve independent chains: two units of four or five cycles latency need ten to stay full.
constexpr int kChains = 12;

__attribute__((target("avx2,fma"))) int64_t multiply_fma_ymm(int64_t steps, float seed) {
  __m256 acc[kChains];
  for (int i = 0; i < kChains; ++i) acc[i] = _mm256_set1_ps(seed * static_cast<float>(i));
  const __m256 a = _mm256_set1_ps(0.5f), b = _mm256_set1_ps(seed);
  for (int64_t s = 0; s < steps; ++s) {
#pragma GCC unroll 12
    for (int i = 0; i < kChains; ++i) acc[i] = _mm256_fmadd_ps(acc[i], a, b);
  }
  __m256 total = acc[0];
  for (int i = 1; i < kChains; ++i) total = _mm256_add_ps(total, acc[i]);
  sink.fetch_add(static_cast<uint64_t>(_mm256_movemask_ps(total)), std::memory_order_relaxed);
  return steps * kChains * 8 * 2;
}

__attribute__((target("avx512f"))) int64_t multiply_fma_zmm(int64_t steps, float seed) {
  __m512 acc[kChains];
  for (int i = 0; i < kChains; ++i) acc[i] = _mm512_set1_ps(seed * static_cast<float>(i));
  const __m512 a = _mm512_set1_ps(0.5f), b = _mm512_set1_ps(seed);
  for (int64_t s = 0; s < steps; ++s) {
#pragma GCC unroll 12
    for (int i = 0; i < kChains; ++i) acc[i] = _mm512_fmadd_ps(acc[i], a, b);
  }
  __m512 total = acc[0];
  for (int i = 1; i < kChains; ++i) total = _mm512_add_ps(total, acc[i]);
  sink.fetch_add(static_cast<uint64_t>(_mm512_reduce_add_ps(total) > 0), std::memory_order_relaxed);
  return steps * kChains * 16 * 2;
}

__attribute__((target("avx512f,avx512bf16"))) int64_t multiply_dpbf16(int64_t steps, float seed) {
  __m512 acc[kChains];
  for (int i = 0; i < kChains; ++i) acc[i] = _mm512_set1_ps(seed * static_cast<float>(i));
  const __m512bh a = _mm512_cvtne2ps_pbh(_mm512_set1_ps(0.5f), _mm512_set1_ps(0.25f));
  const __m512bh b = _mm512_cvtne2ps_pbh(_mm512_set1_ps(seed), _mm512_set1_ps(-seed));
  for (int64_t s = 0; s < steps; ++s) {
#pragma GCC unroll 12
    for (int i = 0; i < kChains; ++i) acc[i] = _mm512_dpbf16_ps(acc[i], a, b);
  }
  __m512 total = acc[0];
  for (int i = 1; i < kChains; ++i) total = _mm512_add_ps(total, acc[i]);
  sink.fetch_add(static_cast<uint64_t>(_mm512_reduce_add_ps(total) > 0), std::memory_order_relaxed);
  return steps * kChains * 32 * 2;
}

#endif

using Reader = uint64_t (*)(const std::byte*, int64_t);
using Multiplier = int64_t (*)(int64_t, float);

Reader choose_reader() {
#if defined(__x86_64__)
  if (x86_features().avx2) return read_avx2;
#endif
  return read_portable;
}

struct NamedMultiplier {
  Multiplier run;
  const char* name;
};

NamedMultiplier choose_multiplier() {
#if defined(__x86_64__)
  const X86Features& f = x86_features();
  if (f.avx512f && f.avx512_bf16) return {multiply_dpbf16, "vdpbf16ps zmm"};
  if (f.avx512f) return {multiply_fma_zmm, "fp32 fma zmm"};
  if (f.avx2 && f.fma) return {multiply_fma_ymm, "fp32 fma ymm"};
#endif
  return {multiply_portable, "portable fp32"};
}

/// What caches do not hold. A sanitized program measures nothing, and keeps up to five times as
/// much for each byte.
int64_t probe_bytes([[maybe_unused]] int64_t last_level_cache_bytes) {
#ifdef MOEKIT_SANITIZED
  return 4 * kReadChunk;
#else
  return round_up(std::max(int64_t{256} << 20, 4 * last_level_cache_bytes), kReadChunk);
#endif
}

}  // namespace

Probe::Probe(int num_threads, int64_t last_level_cache_bytes)
    : threads_(num_threads > 0 ? num_threads : usable_cpus()),
      // Prefetches run past the last chunk, hence the tail.
      memory_(probe_bytes(last_level_cache_bytes) + 4096) {
  best_.threads = threads_.num_threads();
  best_.matrix_instruction = choose_multiplier().name;
  const int64_t chunks = (memory_.size() - 4096) / kReadChunk;
  // Touched by the threads that will read it, so that pages are spread as they will be read.
  auto fill = [&](int64_t chunk, int) {
    std::memset(memory_.data() + chunk * kReadChunk, static_cast<int>(chunk & 0x7f), kReadChunk);
  };
  threads_.parallel_for(chunks, fill);
}

void Probe::round() {
  best_.bandwidth_gbs = std::max(best_.bandwidth_gbs, read_once());
  best_.matrix_tflops = std::max(best_.matrix_tflops, multiply_once());
}

void Probe::copy_round() {
  const int64_t chunks = (memory_.size() - 4096) / kReadChunk / 2;
  auto body = [&](int64_t chunk, int) {
    std::memcpy(memory_.data() + (chunks + chunk) * kReadChunk, memory_.data() + chunk * kReadChunk,
                static_cast<size_t>(kReadChunk));
  };
  const auto start = Clock::now();
  threads_.parallel_for(chunks, body);
  copy_gbs_ =
      std::max(copy_gbs_, static_cast<double>(chunks * kReadChunk) / seconds_since(start) / 1e9);
}

double Probe::read_once() {
  const Reader reader = choose_reader();
  const int64_t chunks = (memory_.size() - 4096) / kReadChunk;
  auto body = [&](int64_t chunk, int) {
    sink.fetch_add(reader(memory_.data() + chunk * kReadChunk, kReadChunk),
                   std::memory_order_relaxed);
  };
  const auto start = Clock::now();
  threads_.parallel_for(chunks, body);
  return static_cast<double>(chunks * kReadChunk) / seconds_since(start) / 1e9;
}

double Probe::multiply_once() {
  const Multiplier multiply = choose_multiplier().run;
  std::atomic<int64_t> flops{0};
  auto body = [&](int thread) {
    flops.fetch_add(multiply(kMultiplySteps, 1e-3f * static_cast<float>(thread + 1)),
                    std::memory_order_relaxed);
  };
  const auto start = Clock::now();
  threads_.run(body);
  return static_cast<double>(flops.load()) / seconds_since(start) / 1e12;
}

}  // namespace moekit::api
