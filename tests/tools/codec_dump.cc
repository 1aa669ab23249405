// The codecs behind pipes, so that another language can check them: raw little-endian values on
// stdin and stdout.
//   codec_dump decode FORMAT            fp32 values of all codes of f16, bf16, e4m3, e5m2, e2m1,
//   e8m0 codec_dump encode FORMAT            fp32 in, codes out (two bytes each for f16 and bf16,
//   else one) codec_dump row SCHEME SCALE WIDTH   fp32 rows in, quantized and dequantized rows out
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <functional>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include "problem/spec.h"
#include "quant/row_codec.h"
#include "tensor/float_formats.h"

namespace {

using namespace moekit;

struct Format {
  int num_codes;
  std::function<float(int)> decode;
  std::function<int(float)> encode;  // empty: decode only
  int code_bytes;
};

const std::map<std::string, Format>& formats() {
  static const std::map<std::string, Format> all = {
      {"f16", {65536, [](int c) { return f16_to_f32(static_cast<uint16_t>(c)); }, f32_to_f16, 2}},
      {"bf16",
       {65536, [](int c) { return bf16_to_f32(static_cast<uint16_t>(c)); }, f32_to_bf16, 2}},
      {"e4m3", {256, [](int c) { return e4m3_to_f32(static_cast<uint8_t>(c)); }, f32_to_e4m3, 1}},
      {"e5m2", {256, [](int c) { return e5m2_to_f32(static_cast<uint8_t>(c)); }, f32_to_e5m2, 1}},
      {"e2m1", {16, [](int c) { return e2m1_to_f32(static_cast<uint8_t>(c)); }, f32_to_e2m1, 1}},
      {"e8m0", {256, [](int c) { return e8m0_to_f32(static_cast<uint8_t>(c)); }, {}, 1}},
  };
  return all;
}

std::vector<float> read_input() {
  std::vector<float> values;
  float chunk[4096];
  for (size_t n; (n = std::fread(chunk, sizeof(float), 4096, stdin)) > 0;) {
    values.insert(values.end(), chunk, chunk + n);
  }
  return values;
}

void write_output(const void* data, size_t bytes) {
  if (std::fwrite(data, 1, bytes, stdout) != bytes) throw std::runtime_error("short write");
}

void decode(const Format& format) {
  std::vector<float> values;
  for (int code = 0; code < format.num_codes; ++code) values.push_back(format.decode(code));
  write_output(values.data(), values.size() * sizeof(float));
}

void encode(const Format& format) {
  std::vector<uint8_t> codes;
  for (float x : read_input()) {
    const int code = format.encode(x);
    codes.push_back(static_cast<uint8_t>(code));
    if (format.code_bytes == 2) codes.push_back(static_cast<uint8_t>(code >> 8));
  }
  write_output(codes.data(), codes.size());
}

void rows(const std::string& scheme_text, float scale, int64_t width) {
  const ActivationScheme scheme = parse_activation_scheme(scheme_text);
  quant::check_static_scale(scheme, scale);
  std::vector<float> x = read_input();
  for (int64_t first = 0; first + width <= static_cast<int64_t>(x.size()); first += width) {
    quant::round_trip_row(scheme, scale, x.data() + first, width);
  }
  write_output(x.data(), x.size() * sizeof(float));
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const std::string verb = argc > 2 ? argv[1] : "";
    const std::string what = argc > 2 ? argv[2] : "";
    if (verb == "decode" && argc == 3) {
      decode(formats().at(what));
    } else if (verb == "encode" && argc == 3 && formats().at(what).encode) {
      encode(formats().at(what));
    } else if (verb == "row" && argc == 5) {
      rows(what, std::strtof(argv[3], nullptr), std::atoll(argv[4]));
    } else {
      std::fputs("usage: codec_dump decode|encode FORMAT | row SCHEME SCALE WIDTH\n", stderr);
      return 2;
    }
    return 0;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "codec_dump: %s\n", e.what());
    return 1;
  }
}
