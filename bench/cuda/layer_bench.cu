// Times the routed experts of known models on a GPU: whole layer from (hidden, ids, weights) to
// bf16 rows, one CUDA graph of independent calls, each with its own hidden rows, routing and weight
// copy, so that weights are cold. Prints one JSON object a point.
//
//   bench_cuda [--models a,b] [--formats bf16,fp8,mxfp4,nvfp4,mxfp8] [--tokens 1,8,...]
//              [--routing uniform,zipf] [--replays N] [--form auto|plain|few|shared] [--overlap
//              0|1]
//              [--decode 0|1] [--steps]
//
//   bench_cuda --read-roof      reads 8 GiB, the measure of whatever streams weights
//
// --decode says which chain serves 8 tokens and less (0: split), instead of the members' choice.
// --steps times the steps of the chain one by one (each in a graph of its own) as well.
#include <cuda_bf16.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "device/cuda/device.h"
#include "device/cuda/read_probe.h"
#include "experts/cuda/decode_layer.h"
#include "experts/cuda/split_layer.h"

namespace {

namespace gemm = moekit::kernels::sm90_grouped_gemm;
namespace kernels = moekit::kernels;
using Format = gemm::Format;
using moekit::device::check_cuda;
using moekit::device::DeviceBuffer;
using moekit::experts::cuda::DecodeLayer;
using moekit::experts::cuda::SplitLayer;
using moekit::experts::cuda::SplitLayerSpec;
using moekit::experts::cuda::SplitLayerWeights;

struct Model {
  const char* name;
  int32_t experts, top_k, hidden, inter;
};

constexpr Model kModels[] = {
    {"qwen3-30b-a3b", 128, 8, 2048, 768}, {"qwen3-235b-a22b", 128, 8, 4096, 1536},
    {"deepseek-v3", 256, 8, 7168, 2048},  {"mixtral-8x7b", 8, 2, 4096, 14336},
    {"gpt-oss-120b", 128, 4, 2880, 2880},
};

struct Options {
  std::vector<std::string> models, formats{"bf16", "fp8"}, routing{"uniform"};
  std::vector<int64_t> tokens{1, 8, 64, 512, 4096, 16384};
  moekit::experts::cuda::TaskForm form{};
  int replays = 25;
  bool overlap = true, decode = true, choose = true, steps = false, read_roof = false;
};

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> parts;
  for (size_t at = 0; at <= text.size();) {
    const size_t comma = std::min(text.find(',', at), text.size());
    parts.push_back(text.substr(at, comma - at));
    at = comma + 1;
  }
  return parts;
}

moekit::experts::cuda::TaskForm form_of(const std::string& name) {
  const char* names[] = {"auto", "plain", "few", "shared"};
  const auto* found = std::find(std::begin(names), std::end(names), name);
  if (found == std::end(names)) {
    std::fprintf(stderr, "--form is auto, plain, few or shared, not %s\n", name.c_str());
    std::exit(2);
  }
  return static_cast<moekit::experts::cuda::TaskForm>(found - std::begin(names));
}

Options parse(int argc, char** argv) {
  Options o;
  for (const Model& m : kModels) o.models.push_back(m.name);
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    if (flag == "--steps") {
      o.steps = true;
      continue;
    }
    if (flag == "--read-roof") {
      o.read_roof = true;
      continue;
    }
    const std::string value = i + 1 < argc ? argv[++i] : "";
    if (flag == "--models")
      o.models = split(value);
    else if (flag == "--formats")
      o.formats = split(value);
    else if (flag == "--routing")
      o.routing = split(value);
    else if (flag == "--replays")
      o.replays = std::stoi(value);
    else if (flag == "--form")
      o.form = form_of(value);
    else if (flag == "--overlap")
      o.overlap = value == "1";
    else if (flag == "--decode")
      o.decode = value == "1", o.choose = false;
    else if (flag == "--tokens") {
      o.tokens.clear();
      for (const auto& t : split(value)) o.tokens.push_back(std::stoll(t));
    } else {
      std::fprintf(stderr, "unknown flag %s\n", flag.c_str());
      std::exit(2);
    }
  }
  return o;
}

__device__ uint32_t hash(uint64_t x) {
  x = (x ^ (x >> 33)) * 0xff51afd7ed558ccdu;
  x = (x ^ (x >> 33)) * 0xc4ceb9fe1a85ec53u;
  return static_cast<uint32_t>(x >> 32);
}

/// About normal values of size `size`, as bf16 or e4m3-like codes; never zeros, which run faster.
__global__ void fill_bf16(__nv_bfloat16* out, int64_t count, float size, uint64_t seed) {
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    float sum = 0.0f;
    for (int j = 0; j < 4; ++j) sum += static_cast<float>(hash(seed + i * 4 + j) >> 8) * 0x1p-24f;
    out[i] = __float2bfloat16_rn((sum - 2.0f) * 1.73f * size);
  }
}
__global__ void fill_e4m3(uint8_t* out, int64_t count, uint64_t seed) {
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    // Exponents around 2^6 with falling odds to either side, random sign and mantissa.
    const uint32_t h = hash(seed + i);
    const int exponent = 12 - min(__clz(h | 1), 9);
    out[i] = static_cast<uint8_t>((h & 0x87) | exponent << 3);
  }
}
__global__ void fill_f32(float* out, int64_t count, float low, float high, uint64_t seed) {
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    out[i] = low + (high - low) * static_cast<float>(hash(seed + i) >> 8) * 0x1p-24f;
  }
}

/// Panels: random codes, and scale bytes of [low, low + 8).
__global__ void fill_panels(uint8_t* out, int64_t count, kernels::PanelFormat panel, uint8_t low,
                            uint64_t seed) {
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    const uint32_t h = hash(seed + i);
    const bool code = i % panel.block_bytes() < panel.code_bytes();
    out[i] = static_cast<uint8_t>(code ? h : low + h % 8);
  }
}

int64_t blocks(int64_t n) { return (n + 127) / 128; }

Format format_of(const std::string& name) {
  if (name == "bf16") return Format::bf16;
  if (name == "fp8") return Format::fp8_block;
  if (name == "mxfp4") return Format::mxfp4;
  if (name == "nvfp4") return Format::nvfp4;
  if (name == "mxfp8") return Format::mxfp8;
  std::fprintf(stderr, "unknown format %s\n", name.c_str());
  std::exit(2);
}
const char* name_of(Format format) {
  switch (format) {
    case Format::bf16: return "bf16";
    case Format::fp8_block: return "fp8_block";
    case Format::mxfp4: return "mxfp4";
    case Format::nvfp4: return "nvfp4";
    case Format::mxfp8: return "mxfp8";
  }
  return "";
}

/// Bytes of an expert's weights as stored, with scales.
double expert_bytes(const Model& m, Format format) {
  if (kernels::in_panels(format)) {
    return 2.0 * static_cast<double>(kernels::panel_matrix_bytes(format, m.inter, m.hidden)) +
           static_cast<double>(kernels::panel_matrix_bytes(format, m.hidden, m.inter));
  }
  return 3.0 * m.hidden * m.inter * (format == Format::fp8_block ? 1.0 + 4.0 / 16384 : 2.0);
}

/// One copy of a layer's weights.
struct Weights {
  DeviceBuffer gate_up, down, gate_up_scales, down_scales;
  SplitLayerWeights views;

  Weights(const Model& m, Format format, uint64_t seed) {
    if (kernels::in_panels(format)) {
      make_panels(m, format, seed);
    } else {
      make_rows(m, format == Format::fp8_block, seed);
    }
  }

 private:
  void make_panels(const Model& m, Format format, uint64_t seed) {
    const auto panel = kernels::PanelFormat::of(format);
    auto fill = [&](DeviceBuffer& matrices, DeviceBuffer& multipliers, int64_t count, int32_t rows,
                    int32_t depth, uint64_t with, kernels::WeightView& view) {
      const int64_t bytes = kernels::panel_matrix_bytes(format, rows, depth);
      matrices = DeviceBuffer(count * m.experts * bytes);
      multipliers = DeviceBuffer(m.experts * 4);
      // Values of random codes are 2.9 (e2m1) and 150 (e4m3) in the root mean square, those of the
      // scales 1.5 (nvfp4: 1 to 2) and 0.026 (2^-11 to 2^-4). Multipliers make 1 / sqrt(depth) of
      // it.
      const bool nvfp4 = format == Format::nvfp4, mxfp8 = format == Format::mxfp8;
      const uint8_t low = nvfp4 ? 80 : mxfp8 ? 236 : 242;
      fill_panels<<<4096, 256>>>(matrices.as<uint8_t>(), count * m.experts * bytes, panel, low,
                                 with);
      const float values = nvfp4 ? 2.9f * 1.5f : mxfp8 ? 150.0f * 0.026f : 2.9f * 0.026f;
      const float size = 1.0f / (values * std::sqrt(static_cast<float>(depth)));
      const float unit = nvfp4 ? kernels::kNvfp4Multiplier : 1.0f;
      fill_f32<<<1, 256>>>(multipliers.as<float>(), m.experts, size * unit, 1.1f * size * unit,
                           with);
      view.base = matrices.data();
      view.expert_bytes = count * bytes;
      view.half_bytes = count > 1 ? bytes : 0;
      view.multipliers = view.up_multipliers = multipliers.as<float>();
    };
    fill(gate_up, gate_up_scales, 2, m.inter, m.hidden, seed, views.gate_up);
    fill(down, down_scales, 1, m.hidden, m.inter, seed + 1, views.down);
  }

  void make_rows(const Model& m, bool fp8, uint64_t seed) {
    const int64_t bytes = fp8 ? 1 : 2;
    const int64_t count = int64_t{m.experts} * m.inter * m.hidden;
    gate_up = DeviceBuffer(2 * count * bytes);
    down = DeviceBuffer(count * bytes);
    const int64_t scales = m.experts * blocks(m.inter) * blocks(m.hidden);
    if (fp8) {
      fill_e4m3<<<4096, 256>>>(gate_up.as<uint8_t>(), 2 * count, seed);
      fill_e4m3<<<4096, 256>>>(down.as<uint8_t>(), count, seed + 1);
      gate_up_scales = DeviceBuffer(scales * 2 * 4);
      down_scales = DeviceBuffer(scales * 4);
      fill_f32<<<64, 256>>>(gate_up_scales.as<float>(), 2 * scales, 1e-4f, 4e-4f, seed + 2);
      fill_f32<<<64, 256>>>(down_scales.as<float>(), scales, 1e-4f, 4e-4f, seed + 3);
    } else {
      fill_bf16<<<4096, 256>>>(gate_up.as<__nv_bfloat16>(), 2 * count, 1.0f / std::sqrt(m.hidden),
                               seed);
      fill_bf16<<<4096, 256>>>(down.as<__nv_bfloat16>(), count, 1.0f / std::sqrt(m.inter),
                               seed + 1);
    }
    auto& up = views.gate_up;
    up.base = gate_up.data();
    up.row_bytes = m.hidden * bytes;
    up.half_bytes = int64_t{m.inter} * m.hidden * bytes;
    up.expert_bytes = 2 * up.half_bytes;
    up.scales = gate_up_scales.as<float>();
    up.scale_row = blocks(m.hidden);
    up.scale_half = blocks(m.inter) * blocks(m.hidden);
    up.scale_expert = 2 * up.scale_half;
    auto& dn = views.down;
    dn.base = down.data();
    dn.row_bytes = m.inter * bytes;
    dn.expert_bytes = int64_t{m.inter} * m.hidden * bytes;
    dn.scales = down_scales.as<float>();
    dn.scale_row = blocks(m.inter);
    dn.scale_expert = blocks(m.hidden) * blocks(m.inter);
  }
};

/// k distinct experts a token: by the largest of normal scores (uniform), or of log-weights
/// 1/(rank+1) plus Gumbel noise (Zipf(1)).
std::vector<int32_t> route(const Model& m, int64_t tokens, bool zipf, uint64_t seed) {
  std::mt19937_64 engine(seed);
  std::normal_distribution<float> normal;
  std::uniform_real_distribution<float> uniform(1e-7f, 1.0f);
  std::vector<int32_t> ids(tokens * m.top_k), order(m.experts);
  std::vector<float> score(m.experts);
  for (int64_t t = 0; t < tokens; ++t) {
    for (int32_t e = 0; e < m.experts; ++e) {
      order[e] = e;
      score[e] = zipf ? -std::log(e + 1.0f) - std::log(-std::log(uniform(engine))) : normal(engine);
    }
    std::partial_sort(order.begin(), order.begin() + m.top_k, order.end(),
                      [&](int32_t a, int32_t b) { return score[a] > score[b]; });
    std::copy_n(order.begin(), m.top_k, ids.begin() + t * m.top_k);
  }
  return ids;
}

struct Call {
  DeviceBuffer hidden, ids, weights, out, workspace;
  std::unique_ptr<SplitLayer> layer;
  std::unique_ptr<DecodeLayer> decode;
  int64_t active = 0;
};

struct Times {
  double median, p5, p95, least;
};

/// µs a call: graph time over the number of calls.
Times time_graph(const std::function<void(cudaStream_t)>& enqueue, int calls, int replays) {
  moekit::device::Stream stream;
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  check_cuda(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeGlobal), "capture");
  enqueue(stream.get());
  check_cuda(cudaStreamEndCapture(stream.get(), &graph), "capture");
  check_cuda(cudaGraphInstantiate(&exec, graph, 0), "instantiate");
  cudaEvent_t start, stop;
  check_cuda(cudaEventCreate(&start), "event");
  check_cuda(cudaEventCreate(&stop), "event");
  std::vector<double> us;
  for (int i = 0; i < replays + 3; ++i) {
    check_cuda(cudaEventRecord(start, stream.get()), "event");
    check_cuda(cudaGraphLaunch(exec, stream.get()), "graph");
    check_cuda(cudaEventRecord(stop, stream.get()), "event");
    check_cuda(cudaEventSynchronize(stop), "graph");
    float ms = 0.0f;
    check_cuda(cudaEventElapsedTime(&ms, start, stop), "event");
    if (i >= 3) us.push_back(ms * 1e3 / calls);
  }
  cudaEventDestroy(start);
  cudaEventDestroy(stop);
  cudaGraphExecDestroy(exec);
  cudaGraphDestroy(graph);
  std::sort(us.begin(), us.end());
  auto at = [&](double q) { return us[static_cast<size_t>(q * (us.size() - 1) + 0.5)]; };
  return {at(0.5), at(0.05), at(0.95), us.front()};
}

/// By the kernels of the probe that `moekit bench` has, timed as all points are.
void print_read_roof(int replays) {
  constexpr int64_t kBytes = int64_t{8} << 30;
  const DeviceBuffer data(kBytes), out(4);
  check_cuda(moekit::device::fill_all(data.data(), kBytes, nullptr), "fill");
  const int blocks = moekit::device::properties(0).num_sms * 4;
  const Times t = time_graph(
      [&](cudaStream_t s) {
        check_cuda(moekit::device::read_all(data.data(), kBytes, blocks, out.as<uint32_t>(), s),
                   "read");
      },
      1, replays);
  std::printf("{\"roof\":\"hbm_read\",\"gbps\":%.0f,\"us\":%.1f,\"p5\":%.1f,\"p95\":%.1f}\n",
              static_cast<double>(kBytes) / t.median * 1e-3, t.median, t.p5, t.p95);
}

void bench_point(const Model& m, Format format, int64_t tokens, bool zipf, const Options& o,
                 const std::vector<std::unique_ptr<Weights>>& copies) {
  const bool fp8 = format == Format::fp8_block;
  const int calls = tokens == 1 ? 16 : tokens <= 8 ? 8 : tokens <= 512 ? 4 : 2;
  SplitLayerSpec spec;
  spec.format = format;
  spec.num_experts = m.experts;
  spec.top_k = m.top_k;
  spec.hidden = m.hidden;
  spec.inter = m.inter;
  spec.max_tokens = tokens;
  spec.num_sms = moekit::device::properties(0).num_sms;
  spec.form = o.form;
  spec.overlap = o.overlap;
  std::vector<Call> list(calls);
  double active = 0.0;
  // As the member does, unless --decode says which.
  const double read = kernels::expected_experts(m.experts, static_cast<double>(tokens * m.top_k)) *
                      expert_bytes(m, format);
  const bool decode = o.decode && DecodeLayer::refusal(spec) == nullptr &&
                      !(o.choose && fp8 && kernels::fp8_takes_split_chain(read, tokens));
  for (int i = 0; i < calls; ++i) {
    Call& c = list[i];
    const auto ids = route(m, tokens, zipf, 1000 + i);
    c.active = static_cast<int64_t>(std::set<int32_t>(ids.begin(), ids.end()).size());
    active += static_cast<double>(c.active) / calls;
    c.hidden = DeviceBuffer(tokens * m.hidden * 2);
    c.ids = DeviceBuffer(tokens * m.top_k * 4);
    c.weights = DeviceBuffer(tokens * m.top_k * 4);
    c.out = DeviceBuffer(tokens * m.hidden * 2);
    c.workspace = DeviceBuffer(
        std::max(SplitLayer::workspace_bytes(spec), DecodeLayer::workspace_bytes(spec)));
    fill_bf16<<<1024, 256>>>(c.hidden.as<__nv_bfloat16>(), tokens * m.hidden, 1.0f, 77 + i);
    fill_f32<<<64, 256>>>(c.weights.as<float>(), tokens * m.top_k, 0.05f, 0.2f, 99 + i);
    c.ids.upload(ids.data(), tokens * m.top_k * 4);
    const SplitLayerWeights& views = copies[i % copies.size()]->views;
    if (decode) {
      c.decode = std::make_unique<DecodeLayer>(spec, views, c.workspace.data());
    } else {
      c.layer = std::make_unique<SplitLayer>(spec, views, c.workspace.data());
    }
  }
  check_cuda(cudaDeviceSynchronize(), "setup");
  auto for_each_call = [&](const std::function<void(Call&, cudaStream_t)>& step) {
    return [&list, step](cudaStream_t s) {
      for (Call& c : list) step(c, s);
    };
  };
  const Times t =
      time_graph(for_each_call([&](Call& c, cudaStream_t s) {
                   if (decode) {
                     c.decode->run(c.hidden.data(), c.ids.as<int32_t>(), c.weights.as<float>(),
                                   tokens, nullptr, c.out.data(), s);
                   } else {
                     c.layer->run(c.hidden.data(), c.ids.as<int32_t>(), c.weights.as<float>(),
                                  tokens, nullptr, c.out.data(), s);
                   }
                 }),
                 calls, o.replays);
  const double pairs = static_cast<double>(tokens) * m.top_k;
  const double flops = 6.0 * pairs * m.hidden * m.inter;
  const double bytes =
      active * expert_bytes(m, format) + 4.0 * static_cast<double>(tokens) * m.hidden;
  const double roof = fp8 ? 1400e12 : 780e12;
  const double floor = std::max(3.0 + bytes / 4.5e6, flops / roof * 1e6);
  std::printf(
      "{\"model\":\"%s\",\"format\":\"%s\",\"tokens\":%lld,\"routing\":\"%s\",\"us\":%.2f,"
      "\"p5\":%.2f,\"p95\":%.2f,\"min\":%.2f,\"tflops\":%.1f,\"gbps\":%.0f,\"floor_us\":%.2f,"
      "\"of_floor\":%.3f,\"active_experts\":%.1f,\"calls\":%d,\"copies\":%zu,\"form\":%d,"
      "\"overlap\":%d,\"chain\":\"%s\"",
      m.name, name_of(format), static_cast<long long>(tokens), zipf ? "zipf1" : "uniform", t.median,
      t.p5, t.p95, t.least, flops / t.median * 1e-6, bytes / t.median * 1e-3, floor,
      floor / t.median, active, calls, copies.size(), static_cast<int>(o.form), o.overlap,
      decode ? "decode" : "split");
  if (o.steps && !decode) {
    const std::pair<const char*, std::function<void(Call&, cudaStream_t)>> steps[] = {
        {"index",
         [&](Call& c, cudaStream_t s) { c.layer->index(c.ids.as<int32_t>(), tokens, nullptr, s); }},
        {"quantize",
         [&](Call& c, cudaStream_t s) {
           if (fp8) c.layer->quantize(c.hidden.data(), tokens, nullptr, s);
         }},
        {"gate_up", [&](Call& c, cudaStream_t s) { c.layer->gate_up(c.hidden.data(), tokens, s); }},
        {"down", [&](Call& c, cudaStream_t s) { c.layer->down(tokens, s); }},
        {"combine",
         [&](Call& c, cudaStream_t s) {
           c.layer->combine(c.ids.as<int32_t>(), c.weights.as<float>(), tokens, nullptr,
                            c.out.data(), s);
         }},
    };
    for (const auto& [name, step] : steps) {
      if (!fp8 && std::strcmp(name, "quantize") == 0) continue;
      std::printf(",\"%s_us\":%.2f", name, time_graph(for_each_call(step), calls, 10).median);
    }
  }
  std::printf("}\n");
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  const Options o = parse(argc, argv);
  try {
    if (o.read_roof) {
      print_read_roof(o.replays);
      return 0;
    }
    for (const Model& m : kModels) {
      if (std::find(o.models.begin(), o.models.end(), m.name) == o.models.end()) continue;
      for (const std::string& name : o.formats) {
        const Format format = format_of(name);
        const double bytes = m.experts * expert_bytes(m, format);
        // At least 2 GB and two copies, so that no call finds its weights in L2.
        const int copies = std::max(2, static_cast<int>(std::ceil(2e9 / bytes)));
        std::vector<std::unique_ptr<Weights>> weights;
        for (int i = 0; i < copies; ++i)
          weights.push_back(std::make_unique<Weights>(m, format, 1234 + 17 * i));
        for (const std::string& routing : o.routing) {
          for (const int64_t tokens : o.tokens)
            bench_point(m, format, tokens, routing == "zipf", o, weights);
        }
      }
    }
  } catch (const std::exception& e) {
    std::fprintf(stderr, "bench_cuda: %s\n", e.what());
    return 1;
  }
  return 0;
}
