#include "plan_flags.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <limits>
#include <map>

#include "moekit/error.h"
#include "moekit/tools.h"
#include "rank_process.h"

namespace moekit::cli {
namespace {

constexpr int kMostRanks = 1024;

[[noreturn]] void refuse(ErrorCode code, const std::string& message) { throw Error(code, message); }

/// The value of `key`, or invalid_argument listing what there is.
template <typename Value>
Value choose(const std::string& flag, const std::string& key,
             const std::map<std::string, Value>& table) {
  const auto found = table.find(key);
  if (found != table.end()) return found->second;
  std::string names;
  for (const auto& [name, value] : table) names += (names.empty() ? "" : ", ") + name;
  refuse(ErrorCode::invalid_argument,
         fmt::format("{}: expected one of {}, got \"{}\"", flag, names, key));
}

void set_capacity(const std::string& text, PlanOptions& options) {
  if (text == "exact") return;
  const size_t colon = text.find(':');
  const std::string mode = text.substr(0, colon);
  int64_t rows = 0;
  bool good = colon != std::string::npos && (mode == "refuse" || mode == "drop");
  if (good) {
    const char* end = text.data() + text.size();
    const auto [at, error] = std::from_chars(text.data() + colon + 1, end, rows);
    good = error == std::errc() && at == end && rows >= 1;
  }
  if (!good) {
    refuse(ErrorCode::invalid_argument,
           fmt::format(
               "--capacity: expected exact, refuse:N or drop:N with N >= 1 rows a rank, got \"{}\"",
               text));
  }
  options.capacity = mode == "refuse" ? CapacityMode::refuse : CapacityMode::drop;
  options.capacity_rows = rows;
}

void set_device(const std::string& text, Device& device) {
  choose<int>("--device", text, {{"auto", 0}, {"cpu", 0}, {"cuda", 1}});
  if (text == "cuda") device.type = DeviceType::cuda;
}

const std::map<std::string, std::optional<ActivationFormat>>& activation_names() {
  static const std::map<std::string, std::optional<ActivationFormat>> names = {
      {"checkpoint", std::nullopt},
      {"f32", ActivationFormat::f32},
      {"bf16", ActivationFormat::bf16},
      {"fp8_tensor", ActivationFormat::fp8_tensor},
      {"fp8_token", ActivationFormat::fp8_token},
      {"fp8_block", ActivationFormat::fp8_block},
      {"mxfp8", ActivationFormat::mxfp8},
      {"mxfp4", ActivationFormat::mxfp4},
      {"nvfp4", ActivationFormat::nvfp4}};
  return names;
}

const std::map<std::string, Wire>& wire_names() {
  static const std::map<std::string, Wire> names = {
      {"auto", Wire::automatic},      {"f32", Wire::f32},
      {"bf16", Wire::bf16},           {"fp8_token", Wire::fp8_token},
      {"fp8_block", Wire::fp8_block}, {"mxfp8", Wire::mxfp8},
      {"nvfp4", Wire::nvfp4}};
  return names;
}

}  // namespace

std::chrono::nanoseconds parse_duration(const std::string& text) {
  static const std::map<std::string, double> units = {
      {"", 1.0}, {"s", 1.0}, {"ms", 1e-3}, {"us", 1e-6}, {"m", 60.0}, {"min", 60.0}, {"h", 3600.0}};
  double number = 0;
  const char* end = text.data() + text.size();
  const auto [at, error] = std::from_chars(text.data(), end, number);
  const auto unit = units.find(std::string(at, end));
  // 1e9 s is 30 years and still fits into 64 bits of nanoseconds.
  if (error != std::errc() || unit == units.end() || !(number > 0) || number * unit->second > 1e9) {
    refuse(ErrorCode::invalid_argument,
           fmt::format("--deadline: expected a positive time such as 30s, 500ms or 2m, got \"{}\"",
                       text));
  }
  return std::chrono::nanoseconds(static_cast<int64_t>(number * unit->second * 1e9));
}

/// How many ranks there are, how they meet, and what each holds.
void PlanFlags::add_rank_flags(CLI::App& verb, const std::string& group) {
  verb.add_option("--ranks", ranks, "Expert-parallel ranks, 1 to 1024; may exceed the experts")
      ->capture_default_str()
      ->type_name("R")
      ->group(group);
  verb.add_option(
          "--transport", transport,
          "How ranks meet: threads (of this process) or mpi (processes that mpirun started)")
      ->capture_default_str()
      ->type_name("NAME")
      ->group(group);
  verb.add_option(
          "--nodes", nodes,
          "Act as if the ranks were spread over N hosts, 1 to R (default: 1, over MPI their "
          "hosts)")
      ->check(CLI::Range(1, kMostRanks).description(""))
      ->type_name("N")
      ->group(group);
  verb.add_option("--tp", tp,
                  "Tensor-parallel size: N neighbouring ranks hold slices of the same experts; "
                  "--ranks / N ranks share the experts out")
      ->capture_default_str()
      ->type_name("N")
      ->group(group);
  verb.add_option(
          "--placement", placement,
          "linear (the default), round_robin, replicas (each rank also holds an expert of the "
          "next) or a file")
      ->type_name("P")
      ->group(group);
  verb.add_option("--slots-per-rank", slots_per_rank,
                  "Room for so many experts and replicas on each rank, so that the placement can "
                  "change (default: it is fixed)")
      ->type_name("N")
      ->group(group);
}

void PlanFlags::add_to(CLI::App& verb) {
  const std::string group = "Plan";
  verb.add_option("--backend", backend, "Experts member by name (default: the first that fits)")
      ->type_name("NAME")
      ->group(group);
  verb.add_option("--prepare", prepare, "Prepare/finalize member by name")
      ->type_name("NAME")
      ->group(group);
  verb.add_option("--device", device, "auto, cpu or cuda")
      ->capture_default_str()
      ->type_name("NAME")
      ->group(group);
  verb.add_option("--pack-cache", pack_cache,
                  "Directory of packed weights: read where they are there, else written")
      ->type_name("DIR")
      ->group(group);
  verb.add_option("--arch", arch,
                  "With --device cuda: plan for a GPU that need not be here (80, 90a, 100a, 120a); "
                  "explain only")
      ->type_name("ARCH")
      ->group(group);
  verb.add_option(
          "--activations", activations,
          "What every expert GEMM reads: checkpoint, f32, bf16, fp8_tensor, fp8_token, fp8_block, "
          "mxfp8, mxfp4 or nvfp4")
      ->capture_default_str()
      ->type_name("A")
      ->group(group);
  add_rank_flags(verb, group);
  verb.add_option("--combine", combine, "slots (bits do not depend on ranks) or rank_sums")
      ->capture_default_str()
      ->type_name("C")
      ->group(group);
  verb.add_option("--combine-dtype", combine_dtype,
                  "Rows on their way back: f32 or bf16 (default: f32, on a GPU bf16)")
      ->type_name("D")
      ->group(group);
  verb.add_option("--wire", wire,
                  "Rows between ranks: auto, f32, bf16, fp8_token, fp8_block, mxfp8 or nvfp4")
      ->capture_default_str()
      ->type_name("W")
      ->group(group);
  verb.add_flag("--batch-invariant", batch_invariant,
                "A row alone has the bits of the row in any batch (always so on a CPU)")
      ->group(group);
  verb.add_option("--capacity", capacity, "exact, refuse:N or drop:N rows a rank")
      ->capture_default_str()
      ->type_name("C")
      ->group(group);
  verb.add_option("--deadline", deadline, "Longest wait for another rank")
      ->capture_default_str()
      ->type_name("TIME")
      ->group(group);
  verb.add_option("--threads", threads, "Threads of a rank (default: usable CPUs / ranks)")
      ->type_name("N")
      ->group(group);
  verb.add_option("--seed", seed, "Of random inputs")
      ->capture_default_str()
      ->type_name("S")
      ->group(group);
}

PlanOptions PlanFlags::options() const {
  PlanOptions o;
  o.backend = backend;
  o.prepare = prepare;
  set_device(device, o.device);
  const bool on_gpu = o.device.type == DeviceType::cuda;
  if (!arch.empty() && !on_gpu) {
    refuse(ErrorCode::invalid_argument,
           fmt::format("--arch {}: names a GPU to plan for; give --device cuda with it", arch));
  }
  o.arch = arch;
  o.activations =
      choose<std::optional<ActivationFormat>>("--activations", activations, activation_names());
  if (ranks < 1 || ranks > kMostRanks) {
    refuse(ErrorCode::invalid_argument,
           fmt::format("--ranks: expected 1 to {}, got {}", kMostRanks, ranks));
  }
  if (nodes > ranks) {
    refuse(ErrorCode::invalid_argument,
           fmt::format("--nodes: expected 1 to --ranks ({}), got {}", ranks, nodes));
  }
  o.deadline = parse_duration(deadline);
  choose<int>("--transport", transport, {{"threads", 0}, {"mpi", 0}, {"p2p", 0}, {"nccl", 0}});
  if (transport == "mpi") o.comm = join_ranks(ranks, nodes, o.deadline);
  if (threads < 0 || threads > 4096) {
    refuse(ErrorCode::invalid_argument,
           fmt::format("--threads: expected 1 to 4096, or 0 for the default, got {}", threads));
  }
  if (transport == "p2p" || transport == "nccl") {
    refuse(ErrorCode::unsupported, fmt::format("--transport {}: not in this build, whose ranks are "
                                               "threads of one process or processes under MPI; use "
                                               "--transport threads or mpi",
                                               transport));
  }
  if (tp < 1 || ranks % tp != 0) {
    refuse(ErrorCode::invalid_argument,
           fmt::format("--tp: expected 1 or more, a divisor of --ranks ({}), got {}", ranks, tp));
  }
  o.tp = tp;
  if (slots_per_rank < 0) {
    refuse(ErrorCode::invalid_argument,
           fmt::format("--slots-per-rank: expected 1 or more, or 0 for a fixed placement, got {}",
                       slots_per_rank));
  }
  o.slots_per_rank = slots_per_rank;
  o.num_nodes = std::max(1, nodes);
  o.placement = placement.empty() ? "linear" : placement;
  o.combine = choose<Combine>("--combine", combine,
                              {{"slots", Combine::slots}, {"rank_sums", Combine::rank_sums}});
  o.combine_dtype =
      combine_dtype.empty() && on_gpu
          ? DType::bf16
          : choose<DType>("--combine-dtype", combine_dtype.empty() ? "f32" : combine_dtype,
                          {{"f32", DType::f32}, {"bf16", DType::bf16}});
  o.wire = choose<Wire>("--wire", wire, wire_names());
  o.batch_invariant = batch_invariant || !on_gpu;
  set_capacity(capacity, o);
  o.num_threads = threads;
  o.pack_cache = pack_cache;
  return o;
}

void PlanFlags::apply_problem(const LayerProblem& problem, PlanOptions& options) const {
  if (placement.empty()) options.placement = problem.placement;
}

}  // namespace moekit::cli
