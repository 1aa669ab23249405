#include "api/x86_features.h"

#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace moekit::api {
namespace {

#if defined(__x86_64__)

struct Registers {
  unsigned a = 0, b = 0, c = 0, d = 0;
};

Registers leaf(unsigned number, unsigned sub = 0) {
  Registers r;
  if (__get_cpuid_count(number, sub, &r.a, &r.b, &r.c, &r.d) == 0) return {};
  return r;
}

bool bit(unsigned word, int index) { return ((word >> index) & 1u) != 0; }

// Which register states the kernel saves (XCR0): bits 1-2 ymm, 5-7 zmm and masks, 17-18 tiles.
uint64_t saved_states(const Registers& basic) {
  if (!bit(basic.c, 27)) return 0;  // OSXSAVE
  unsigned low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (static_cast<uint64_t>(high) << 32) | low;
}

std::string brand() {
  if (leaf(0x80000000).a < 0x80000004) return {};
  char text[49] = {};
  for (unsigned i = 0; i < 3; ++i) {
    const Registers r = leaf(0x80000002 + i);
    const unsigned words[4] = {r.a, r.b, r.c, r.d};
    std::memcpy(text + 16 * i, words, sizeof words);
  }
  std::string name = text;
  while (!name.empty() && name.back() == ' ') name.pop_back();
  return name.substr(
      name.find_first_not_of(' ') == std::string::npos ? 0 : name.find_first_not_of(' '));
}

X86Features detect() {
  X86Features f;
  const Registers basic = leaf(1), extended = leaf(7), extended1 = leaf(7, 1);
  const uint64_t saved = saved_states(basic);
  const bool ymm = (saved & 0x6) == 0x6;
  const bool zmm = ymm && (saved & 0xe0) == 0xe0;
  const bool tiles = (saved & 0x60000) == 0x60000;
  f.avx2 = ymm && bit(extended.b, 5);
  f.fma = ymm && bit(basic.c, 12);
  f.f16c = ymm && bit(basic.c, 29);
  f.avx512f = zmm && bit(extended.b, 16);
  f.avx512dq = zmm && bit(extended.b, 17);
  f.avx512bw = zmm && bit(extended.b, 30);
  f.avx512vl = zmm && bit(extended.b, 31);
  f.avx512_vbmi = zmm && bit(extended.c, 1);
  f.avx512_vnni = zmm && bit(extended.c, 11);
  f.avx512_fp16 = zmm && bit(extended.d, 23);
  f.avx512_bf16 = zmm && bit(extended1.a, 5);
  f.avx_vnni = ymm && bit(extended1.a, 4);
  f.amx_bf16 = tiles && bit(extended.d, 22);
  f.amx_tile = tiles && bit(extended.d, 24);
  f.amx_int8 = tiles && bit(extended.d, 25);
  f.model = brand();
  return f;
}

#else

X86Features detect() { return {}; }

#endif

}  // namespace

std::vector<std::string> X86Features::names() const {
  const std::pair<bool, const char*> all[] = {
      {avx2, "avx2"},
      {fma, "fma"},
      {f16c, "f16c"},
      {avx512f, "avx512f"},
      {avx512bw, "avx512bw"},
      {avx512vl, "avx512vl"},
      {avx512dq, "avx512dq"},
      {avx512_vbmi, "avx512_vbmi"},
      {avx512_vnni, "avx512_vnni"},
      {avx512_bf16, "avx512_bf16"},
      {avx512_fp16, "avx512_fp16"},
      {avx_vnni, "avx_vnni"},
      {amx_tile, "amx_tile"},
      {amx_bf16, "amx_bf16"},
      {amx_int8, "amx_int8"},
  };
  std::vector<std::string> found;
  for (const auto& [present, name] : all) {
    if (present) found.emplace_back(name);
  }
  return found;
}

const X86Features& x86_features() {
  static const X86Features features = detect();
  return features;
}

}  // namespace moekit::api
