#!/usr/bin/env bash
# Builds the CUDA side on a machine with a GPU, checks it, then times it. Stages run in the order given:
#   tools/gpu_run.sh [build] [test] [check] [sanitize] [roof] [bench] [profile]     (default: all of them)
# Environment: CMAKE_ARGS, OUT (results, default build/gpu-results), BUILD (default build/cuda), GPU_TEST_FILTER (gtest
# filter), GPU_BENCH_ARGS (arguments of bench_cuda), CMAKE_PREFIX_PATH (where fmt, spdlog, nlohmann_json and
# GoogleTest are, if not in the system), CLI=ON (builds the program, with CLI11, and check runs). Ends non-zero at the first failure. Clocks are left as they are.
set -euo pipefail
cd "$(dirname "$(readlink -f "$0")")/.."
OUT=${OUT:-build/gpu-results}
BUILD=${BUILD:-build/cuda}
mkdir -p "$OUT"
[ $# -gt 0 ] || set -- build test check sanitize roof bench profile

stage_build() {
  cmake -S . -B "$BUILD" -G Ninja -DCMAKE_BUILD_TYPE=Release -DMOEKIT_CUDA=ON -DMOEKIT_CUDA_ARCHITECTURES=90a \
    -DMOEKIT_BUILD_CLI="${CLI:-OFF}" ${CMAKE_ARGS:-} >"$OUT/cmake.log" 2>&1 || { tail -30 "$OUT/cmake.log"; return 1; }
  local targets=(test_cuda bench_cuda moekit_cuda_plugin)
  [ "${CLI:-OFF}" = ON ] && targets+=(moekit_cli)
  cmake --build "$BUILD" --target "${targets[@]}" >"$OUT/build.log" 2>&1 ||
    { grep -E "error|FAILED" "$OUT/build.log" | head -30; return 1; }
  echo "built in $BUILD"
}

stage_test() {
  timeout 300 "$BUILD/tests/cuda/test_cuda" --gtest_brief=1 --gtest_filter="${GPU_TEST_FILTER:-*}" >"$OUT/test.log" 2>&1 ||
    { grep -v "^Note" "$OUT/test.log" | cut -c1-400 | head -80; return 1; }
  tail -3 "$OUT/test.log"
}

# Every fixture as its checkpoint says and with bf16 activations; 3 is "no member takes it".
stage_check() {
  if [ ! -x "$BUILD/moekit" ]; then echo "check: the program was not built (CLI=ON), skipped"; return 0; fi
  local config activations status failed=0
  : >"$OUT/check.txt"
  for config in tests/fixtures/*/config.json; do
    for activations in checkpoint bf16; do
      status=0
      MOEKIT_CUDA_PLUGIN="$PWD/$BUILD/lib/libmoekit_cuda.so" timeout 60 "$BUILD/moekit" check --device cuda \
        --model "$(dirname "$config")" --activations "$activations" >"$OUT/check.log" 2>&1 || status=$?
      echo "$status $(basename "$(dirname "$config")") $activations" >>"$OUT/check.txt"
      case $status in 0 | 3) ;; *) failed=1; cat "$OUT/check.log" ;; esac
    done
  done
  echo "check: $(grep -c '^0 ' "$OUT/check.txt") passed, $(grep -c '^3 ' "$OUT/check.txt") refused"
  return $failed
}

# Small cases only: the tools slow a kernel down a hundredfold.
stage_sanitize() {
  local small='IndexTest*few:IndexTest*hot:*Quantize*:Combine*:RouterTest*qwen3:*bf16_small:*fp8_small:*bf16_hot:*4_odd_widths*:*mxfp8_one_token*'
  local tool
  for tool in memcheck racecheck; do
    timeout 240 compute-sanitizer --tool $tool --error-exitcode 9 "$BUILD/tests/cuda/test_cuda" --gtest_brief=1 \
      --gtest_filter="${GPU_SANITIZE_FILTER:-$small}" >"$OUT/$tool.log" 2>&1 ||
      { grep -E "=====|FAILED" "$OUT/$tool.log" | head -40; return 1; }
    echo "$tool: $(tail -1 "$OUT/$tool.log")"
  done
}

# What the machine can do: bytes read, the measure of few tokens; dense products, sustained, the measure of prefill.
# The latter needs torch; skipped without it.
stage_roof() {
  "$BUILD/bench/cuda/bench_cuda" --read-roof | tee "$OUT/read_roof.json"
  if ! python3 -c 'import torch' 2>/dev/null; then echo "roof: no torch here, skipped"; return 0; fi
  python3 tools/dense_roof.py | tee "$OUT/roof.json"
}

stage_bench() {
  nvidia-smi --query-gpu=name,driver_version,clocks.sm,clocks.mem,power.draw,temperature.gpu --format=csv,noheader \
    >"$OUT/gpu.txt" || true
  # shellcheck disable=SC2086
  "$BUILD/bench/cuda/bench_cuda" ${GPU_BENCH_ARGS:-} | tee "$OUT/bench.json"
}

# What limits the matrix kernels, as ncu sees it, at a few points.
stage_profile() {
  if ! command -v ncu >/dev/null; then echo "profile: no ncu here, skipped"; return 0; fi
  local point
  for point in "bf16 4096" "fp8 4096" "mxfp4 64" "mxfp4 8"; do
    # shellcheck disable=SC2086
    set -- $point
    ncu --clock-control none -k 'regex:gemm|panel|down_kernel' --launch-skip 6 -c 2 --section SpeedOfLight \
      --section WarpStateStats --section SchedulerStats "$BUILD/bench/cuda/bench_cuda" --models qwen3-235b-a22b \
      --formats "$1" --tokens "$2" --replays 1 >"$OUT/ncu-$1-$2.txt" 2>&1 || { tail -5 "$OUT/ncu-$1-$2.txt"; return 1; }
  done
  grep -hE "\(KernelArgs\)|\(Args\)|DRAM Throughput|Issued Warp|Warp Cycles Per Issued" "$OUT"/ncu-*.txt | cut -c1-110
}

for stage in "$@"; do
  echo "== $stage"
  "stage_$stage"
done
