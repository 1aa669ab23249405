// Stages of a call, in the order in which it goes through them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace moekit::trace {

enum class Stage : uint8_t {
  input,
  route,
  latent_in,
  dispatch,
  receive,
  experts,
  upload,
  index,
  quantize,
  gemm1,
  gemm2,
  sum,
  download,
  reduce,
  combine_send,
  shared,
  shared_gemm1,
  shared_gemm2,
  shared_sum,
  combine,
  slices,
  latent_out,
  output,
  wait,
  copy,
  rows_in_flight,
  results_in_flight,
};
inline constexpr size_t kNumStages = static_cast<size_t>(Stage::results_in_flight) + 1;

/// How a stage shows.
enum class StageKind : uint8_t {
  step,    ///< steps of a rank's calling thread do not overlap
  nested,  ///< inside a step
  window,  ///< from a send to its receive: steps run meanwhile
};

struct StageInfo {
  const char* name;
  const char* category;
  StageKind kind;
};

inline constexpr std::array<StageInfo, kNumStages> kStages = {{
    {"load input", "compute", StageKind::step},
    {"route", "compute", StageKind::step},
    {"latent in", "compute", StageKind::step},
    {"dispatch send", "exchange", StageKind::step},
    {"dispatch receive", "exchange", StageKind::step},
    {"experts", "compute", StageKind::step},
    {"copy to device", "exchange", StageKind::nested},
    {"index", "compute", StageKind::nested},
    {"quantize", "compute", StageKind::nested},
    {"gemm1", "compute", StageKind::nested},
    {"gemm2", "compute", StageKind::nested},
    {"sum slots", "compute", StageKind::nested},
    {"copy from device", "exchange", StageKind::nested},
    {"reduce", "compute", StageKind::step},
    {"combine send", "exchange", StageKind::step},
    {"shared experts", "compute", StageKind::step},
    {"shared gemm1", "compute", StageKind::nested},
    {"shared gemm2", "compute", StageKind::nested},
    {"shared sum", "compute", StageKind::nested},
    {"combine receive", "exchange", StageKind::step},
    {"sum slices", "exchange", StageKind::step},
    {"latent out", "compute", StageKind::step},
    {"output", "compute", StageKind::step},
    {"wait", "wait", StageKind::nested},
    {"copy rows", "exchange", StageKind::nested},
    {"rows in flight", "in flight", StageKind::window},
    {"results in flight", "in flight", StageKind::window},
}};

constexpr const StageInfo& info_of(Stage stage) { return kStages[static_cast<size_t>(stage)]; }

}  // namespace moekit::trace
