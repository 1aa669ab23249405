// moekit bench: how fast a layer runs with cold weights, and how near to what the machine allows.
#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <memory>
#include <optional>
#include <sstream>

#include "bench_html.h"
#include "json_writers.h"
#include "layer_flags.h"
#include "moekit/bench.h"
#include "moekit/error.h"
#include "moekit/problems.h"
#include "moekit/tensor_file.h"
#include "peers/peer_report.h"
#include "plan_flags.h"
#include "rank_process.h"
#include "report.h"
#include "session.h"

namespace moekit::cli {
namespace {

struct BenchFlags {
  std::string model, problem, tokens_list, routing, include, html;
  int layer = -1;
  double min_time = 1.5;
  bool exchange_only = false;
  bool peers = false;
  std::string peer_dnnl, peer_python;
  PlanFlags plan;
};

/// Items between commas.
std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> items;
  std::istringstream in(text);
  for (std::string item; std::getline(in, item, ',');) items.push_back(item);
  return items;
}

std::vector<int64_t> parse_tokens(const std::string& text) {
  std::vector<int64_t> tokens;
  for (const std::string& item : split(text)) {
    int64_t value = 0;
    const char* end = item.data() + item.size();
    const auto [at, error] = std::from_chars(item.data(), end, value);
    if (error != std::errc() || at != end || value < 1) {
      throw Error(
          ErrorCode::invalid_argument,
          fmt::format("--tokens-list: expected counts of 1 or more such as 1,8,64, got \"{}\"",
                      text));
    }
    tokens.push_back(value);
  }
  if (tokens.empty()) {
    throw Error(ErrorCode::invalid_argument,
                "--tokens-list: expected counts such as 1,8,64, got none");
  }
  return tokens;
}

void set_included(const std::string& text, BenchRequest& request) {
  for (const std::string& item : split(text)) {
    if (item == "router") {
      request.include_router = true;
    } else if (item == "shared") {
      request.include_shared = true;
    } else {
      throw Error(
          ErrorCode::invalid_argument,
          fmt::format("--include: expected router, shared or both with a comma, got \"{}\"", text));
    }
  }
}

/// Of the flag, else the default; a SPEC may still replace that.
void set_tokens(const BenchFlags& flags, BenchRequest& request) {
  request.tokens = {1, 8, 64, 512, 4096};
  if (!flags.tokens_list.empty()) request.tokens = parse_tokens(flags.tokens_list);
}

/// A request, and the SPEC whose tokens= each point replaces.
struct Job {
  BenchRequest request;
  LayerProblem problem;
};

/// Weights of gigabytes are not made for a GPU that takes no such layer.
void require_gpu_plan(const Job& job) {
  const BenchRequest& request = job.request;
  PlanOptions options = request.options;
  options.hidden_dtype = DType::bf16;
  const int64_t tokens = *std::max_element(request.tokens.begin(), request.tokens.end());
  const Explanation explanation =
      explain_plan(hollow_source(job.problem), options, request.num_ranks, tokens);
  if (explanation.chosen) return;
  throw Error(ErrorCode::unsupported,
              fmt::format("no back-end takes this layer on the GPU: {}", refusal_of(explanation)));
}

Job job_of(const BenchFlags& flags) {
  if (flags.model.empty() == flags.problem.empty()) {
    throw Error(ErrorCode::invalid_argument,
                "bench: expected one of --model DIR and --problem SPEC");
  }
  Job job;
  BenchRequest& request = job.request;
  request.options = flags.plan.options();
  request.num_ranks = flags.plan.ranks;
  request.seed = flags.plan.seed;
  request.min_seconds = flags.min_time;
  request.exchange_only = flags.exchange_only;
  const bool on_gpu = request.options.device.type == DeviceType::cuda;
  if (flags.peers) request.peers = make_peers(flags.peer_dnnl, flags.peer_python, on_gpu);
  set_included(flags.include, request);
  set_tokens(flags, request);
  if (!flags.model.empty()) {
    request.source = open_source(flags.model, flags.layer);
    job.problem.config = request.source.config;
  } else {
    job.problem = parse_problem(flags.problem);
    flags.plan.apply_problem(job.problem, request.options);
    if (flags.tokens_list.empty() && flags.problem.find("tokens=") != std::string::npos) {
      request.tokens = {job.problem.tokens};
    }
    if (on_gpu) require_gpu_plan(job);
    // The exchange brings its own weights.
    request.source = flags.exchange_only
                         ? hollow_source(job.problem)
                         : synthetic_source(job.problem, flags.plan.seed, flags.plan.threads);
  }
  request.routing = flags.routing.empty() ? job.problem.routing : flags.routing;
  request.options.hidden_dtype = DType::bf16;
  return job;
}

OrderedJson to_json(const ExchangeWay& way, double memcpy_gbs) {
  const bool counted = way.bytes >= 0;
  const auto known = [&](double value) { return counted ? OrderedJson(value) : OrderedJson(); };
  return {{"bytes", known(way.bytes)},
          {"own_bytes", known(way.own_bytes)},
          {"time_us", way.us},
          {"delivered_gbs", known(way.delivered_gbs())},
          {"delivered_fraction", known(way.delivered_gbs() / memcpy_gbs)}};
}

OrderedJson to_json(const ExchangeTime& e) {
  const bool counted = e.bytes >= 0;
  const auto known = [&](double value) { return counted ? OrderedJson(value) : OrderedJson(); };
  return {{"bytes", known(e.bytes)},
          {"own_bytes", known(e.own_bytes)},
          {"plan_bytes", e.plan_bytes},
          {"time_us", e.median_us},
          {"p5_us", e.p5_us},
          {"p95_us", e.p95_us},
          {"repeat", e.repeat},
          {"dispatch_us", e.dispatch.us},
          {"combine_us", e.combine.us},
          {"dispatch", to_json(e.dispatch, e.memcpy_gbs)},
          {"combine", to_json(e.combine, e.memcpy_gbs)},
          {"floor_us", known(e.floor_us())},
          {"floor_fraction", known(e.floor_fraction())},
          {"memcpy_gbs", e.memcpy_gbs},
          {"delivered_gbs", known(e.delivered_gbs())},
          {"delivered_fraction", known(e.delivered_gbs() / e.memcpy_gbs)},
          {"local_us", e.local_us},
          {"overhead_us", e.overhead_us()}};
}

OrderedJson to_json(const PackingTime& packing) {
  return {{"bytes", packing.bytes},
          {"seconds", packing.seconds},
          {"gbs", packing.gbs()},
          {"memcpy_gbs", packing.memcpy_gbs},
          {"memcpy_fraction", packing.gbs() / packing.memcpy_gbs},
          {"fault_us_per_mib", packing.fault_us_per_mib}};
}

constexpr const char* kTimedOnGpu =
    "routed experts, from (hidden, ids, weights) to bf16 rows in device memory; router, shared "
    "experts and latent projections run on the CPU and are not timed";

constexpr const char* kReadProbe =
    "8 GiB, or half of the free memory, read by a kernel: the best of four grids and of the points "
    "so far";

OrderedJson to_json(const GpuTiming& gpu) {
  return {{"timed", kTimedOnGpu},
          {"read_probe", kReadProbe},
          {"knobs", gpu.knobs},
          {"graph_calls", gpu.calls},
          {"weight_copies", gpu.copies},
          {"launch_us", gpu.launch_us},
          {"l2_bytes", gpu.cache_bytes},
          {"rel_rms", gpu.rel_rms < 0 ? OrderedJson() : OrderedJson(gpu.rel_rms)}};
}

OrderedJson to_json(const BenchPoint& p, const Job& job, const std::string& device) {
  LayerProblem problem = job.problem;
  problem.tokens = p.tokens;
  problem.routing = job.request.routing;
  problem.placement = job.request.options.placement;
  OrderedJson json = {
      {"problem", spec_of(problem)},
      {"device", device},
      {"backend", p.plan.backend},
      {"prepare", p.plan.prepare},
      {"tokens", p.tokens},
      {"tokens_total", p.tokens_total},
      {"ranks", job.request.num_ranks},
      {"routing", p.routing},
      {"time_us",
       {{"median", p.median_us}, {"p5", p.p5_us}, {"p95", p.p95_us}, {"repeat", p.repeat}}},
      {"flops", p.flops},
      {"bytes",
       {{"weights", p.weights_bytes},
        {"activations", p.activations_bytes},
        {"wire", p.wire_bytes}}},
      {"tflops", p.tflops()},
      {"gbs", p.gbs()},
      {"floor_us", p.floor_us},
      {"floor_fraction", p.floor_fraction()},
      {"probe", cli::to_json(p.probe)},
      {"peers", OrderedJson::array()},
      {"active_experts", p.active_experts},
      {"working_set_bytes", p.working_set_bytes},
      {"cold", p.cold}};
  if (p.gpu) json["gpu"] = to_json(*p.gpu);
  if (p.exchange) json["exchange"] = to_json(*p.exchange);
  if (p.packing) json["packing"] = to_json(*p.packing);
  for (const PeerTime& peer : p.peers) json["peers"].push_back(cli::to_json(peer, p.median_us));
  return json;
}

std::vector<std::string> exchange_row(const BenchPoint& p) {
  const ExchangeTime& e = *p.exchange;
  const bool counted = e.bytes >= 0;
  const auto known = [&](std::string text) { return counted ? text : std::string("-"); };
  return {std::to_string(p.tokens),
          p.plan.prepare,
          time_text(e.median_us),
          time_text(e.dispatch.us),
          time_text(e.combine.us),
          known(bytes_text(static_cast<int64_t>(e.bytes))),
          bytes_text(static_cast<int64_t>(e.plan_bytes)),
          known(time_text(e.floor_us())),
          known(fmt::format("{:.2f}", e.floor_fraction())),
          known(fmt::format("{:.2f}", e.delivered_gbs())),
          fmt::format("{:.2f}", e.memcpy_gbs),
          known(fmt::format("{:.2f} + {:.2f}", e.dispatch.delivered_gbs() / e.memcpy_gbs,
                            e.combine.delivered_gbs() / e.memcpy_gbs)),
          time_text(e.overhead_us())};
}

void print_packing(const PackingTime& packing) {
  fmt::print(
      "packing  {} at {:.2f} GB/s into touched memory ({:.2f} of memcpy's {:.2f} GB/s), page "
      "faults {:.1f} us/MiB\n",
      bytes_text(packing.bytes), packing.gbs(), packing.gbs() / packing.memcpy_gbs,
      packing.memcpy_gbs, packing.fault_us_per_mib);
}

void print_gpu(const BenchPoint& last) {
  fmt::print("timed    {}\n", kTimedOnGpu);
  fmt::print(
      "how      one graph of independent calls, over {} copies of the weights; floor: {:.0f} us "
      "+ bytes at the probe's speed, or the products at {}\n",
      last.gpu->copies, last.gpu->launch_us,
      last.probe.matrix_tflops > 0
          ? fmt::format("{:.0f} TFLOP/s ({})", last.probe.matrix_tflops, last.probe.matrix_source)
          : last.probe.matrix_source);
}

void run(Session& session, const BenchFlags& flags) {
  session.configure_log();
  // A bench takes minutes: a place that can't be written is better known before.
  if (!flags.html.empty()) check_writable_path("--html", flags.html);
  Progress progress(session);
  if (flags.model.empty()) progress.step("making random weights");
  Job job = job_of(flags);
  job.request.options.packing_progress = progress.of_packing();
  progress.step("probing the machine");
  const MachineReport machine = examine_machine(flags.plan.threads, own_rank() == 0);
  progress.clear();
  Table table({"tokens", "back-end", "median", "p5", "p95", "calls", "TFLOP/s", "GB/s", "floor",
               "of floor", "probe GB/s", "probe TFLOP/s", "weights"});
  Table exchanges({"tokens", "prepare", "exchange", "dispatch", "combine", "sent", "of the plan",
                   "floor", "of floor", "GB/s", "memcpy GB/s", "out + back of memcpy",
                   "over local"});
  Table peers(peer_header());
  std::optional<PackingTime> packing;
  std::optional<BenchPoint> last_on_gpu;
  const OrderedJson machine_json = cli::to_json(machine);
  if (session.json) session.print_json(machine_json);
  std::vector<OrderedJson> points;
  std::string device = machine.cpu.model;
  run_bench(
      job.request,
      [&](const BenchPoint& p) {
        progress.clear();
        if (p.gpu) {
          device = p.gpu->device;
          last_on_gpu = p;
        }
        points.push_back(to_json(p, job, device));
        if (session.json) return session.print_json(points.back());
        if (p.exchange) exchanges.add(exchange_row(p));
        packing = p.packing;
        if (job.request.exchange_only) return;
        table.add({std::to_string(p.tokens), p.plan.backend, time_text(p.median_us),
                   time_text(p.p5_us), time_text(p.p95_us), std::to_string(p.repeat),
                   fmt::format("{:.4f}", p.tflops()), fmt::format("{:.1f}", p.gbs()),
                   time_text(p.floor_us), fmt::format("{:.2f}", p.floor_fraction()),
                   fmt::format("{:.1f}", p.probe.bandwidth_gbs),
                   fmt::format("{:.3f}", p.probe.matrix_tflops), p.cold ? "cold" : "cached"});
        for (const PeerTime& peer : p.peers) peers.add(peer_row(p, peer));
        if (!p.cold) {
          session.warn(fmt::format(
              "the weights of {} tokens fit into the cache: times are not those of a model",
              p.tokens));
        }
      },
      [&](const std::string& what) { progress.step(what); });
  progress.clear();
  if (!flags.html.empty()) write_text(flags.html, bench_html(machine_json, points));
  if (session.json) return;
  job.problem.tokens = job.request.tokens.front();
  fmt::print("problem  {}\n", spec_of(job.problem));
  fmt::print("device   {}\n", device);
  fmt::print("ranks    {}, routing {}\n", job.request.num_ranks, job.request.routing);
  if (packing && packing->bytes > 0) print_packing(*packing);
  if (last_on_gpu) print_gpu(*last_on_gpu);
  fmt::print("\n");
  if (!job.request.exchange_only) table.print();
  if (flags.peers) {
    fmt::print("\n");
    peers.print();
  }
  if (job.request.num_ranks == 1) return;
  if (!job.request.exchange_only) fmt::print("\n");
  exchanges.print();
}

}  // namespace

void add_bench(CLI::App& app, Session& session) {
  CLI::App* verb = app.add_subcommand("bench", "Time a layer against the roofs of the machine");
  auto flags = std::make_shared<BenchFlags>();
  auto* model = verb->add_option("--model", flags->model, "Checkpoint directory")->type_name("DIR");
  verb->add_option("--problem", flags->problem,
                   "A problem by name or by its values, with random weights")
      ->type_name("SPEC")
      ->excludes(model);
  add_layer_flag(*verb, flags->layer);
  verb->add_option("--tokens-list", flags->tokens_list,
                   "Tokens of one rank, a point each (default: of the SPEC, else 1,8,64,512,4096)")
      ->type_name("T,T,...");
  verb->add_option("--routing", flags->routing,
                   "uniform, zipf:S, hot, one_rank, or a file of expert ids [T, k] (default: of "
                   "the SPEC, else uniform)")
      ->type_name("NAME");
  verb->add_option("--include", flags->include, "Time these too: router, shared")
      ->type_name("router,shared");
  auto* html =
      verb->add_option("--html", flags->html, "Write a report with plots")->type_name("FILE");
  auto* peers =
      verb->add_flag("--peers", flags->peers,
                     "Time oneDNN and torch in turns with the layer, where they are here; on a GPU "
                     "torch alone");
  verb->add_option("--peer-dnnl", flags->peer_dnnl,
                   "libdnnl of --peers (default: where the loader finds it)")
      ->envname("MOEKIT_DNNL")
      ->type_name("FILE");
  verb->add_option("--peer-python", flags->peer_python,
                   "Python with torch of --peers (default: python3, then .venv/bin/python)")
      ->envname("MOEKIT_PYTHON")
      ->type_name("FILE");
  verb->add_flag("--exchange-only", flags->exchange_only,
                 "Time dispatch and combine alone, without experts; needs two --ranks or more")
      ->excludes(html)
      ->excludes(peers);
  verb->add_option("--min-time", flags->min_time,
                   "Seconds of timed calls a point; a GPU takes 25 launches of a graph")
      ->capture_default_str()
      ->check(CLI::Range(0.0, 3600.0).description(""))
      ->type_name("S");
  flags->plan.add_to(*verb);
  session.add_flags(*verb);
  verb->footer(
      "Example:\n  moekit bench --problem qwen3-30b-a3b:weights=fp8_block --tokens-list 1,64 "
      "--json");
  verb->callback([&session, flags] { run(session, *flags); });
}

}  // namespace moekit::cli
