#!/usr/bin/env bash
# Builds the CUDA side on a machine with a GPU, checks it, then times it. Stages run in the order given:
#   tools/gpu_run.sh [build] [test] [sanitize] [roof] [bench]     (default: all of them)
# Environment: CMAKE_ARGS, OUT (results, default build/gpu-results), BUILD (default build/cuda), GPU_TEST_FILTER (gtest
# filter), GPU_BENCH_ARGS (arguments of bench_cuda), CMAKE_PREFIX_PATH (where fmt, spdlog, nlohmann_json and
# GoogleTest are, if not in the system). Ends non-zero at the first failure. Clocks are left as they are.
set -euo pipefail
cd "$(dirname "$(readlink -f "$0")")/.."
OUT=${OUT:-build/gpu-results}
BUILD=${BUILD:-build/cuda}
mkdir -p "$OUT"
[ $# -gt 0 ] || set -- build test sanitize roof bench

stage_build() {
  cmake -S . -B "$BUILD" -G Ninja -DCMAKE_BUILD_TYPE=Release -DMOEKIT_CUDA=ON -DMOEKIT_CUDA_ARCHITECTURES=90a \
    -DMOEKIT_BUILD_CLI=OFF ${CMAKE_ARGS:-} >"$OUT/cmake.log" 2>&1 || { tail -30 "$OUT/cmake.log"; return 1; }
  cmake --build "$BUILD" --target test_cuda bench_cuda >"$OUT/build.log" 2>&1 ||
    { grep -E "error|FAILED" "$OUT/build.log" | head -30; return 1; }
  echo "built in $BUILD"
}

stage_test() {
  timeout 300 "$BUILD/tests/cuda/test_cuda" --gtest_brief=1 --gtest_filter="${GPU_TEST_FILTER:-*}" >"$OUT/test.log" 2>&1 ||
    { grep -v "^Note" "$OUT/test.log" | cut -c1-400 | head -80; return 1; }
  tail -3 "$OUT/test.log"
}

# Small cases only: the tools slow a kernel down a hundredfold.
stage_sanitize() {
  local small='IndexTest*few:IndexTest*hot:*Quantize*:Combine*:RouterTest*qwen3:*bf16_small:*fp8_small:*bf16_hot'
  local tool
  for tool in memcheck racecheck; do
    timeout 240 compute-sanitizer --tool $tool --error-exitcode 9 "$BUILD/tests/cuda/test_cuda" --gtest_brief=1 \
      --gtest_filter="${GPU_SANITIZE_FILTER:-$small}" >"$OUT/$tool.log" 2>&1 ||
      { grep -E "=====|FAILED" "$OUT/$tool.log" | head -40; return 1; }
    echo "$tool: $(tail -1 "$OUT/$tool.log")"
  done
}

# Dense rate of the machine, sustained: the measure of prefill. Needs torch; skipped without it.
stage_roof() {
  if ! python3 -c 'import torch' 2>/dev/null; then echo "roof: no torch here, skipped"; return 0; fi
  python3 tools/dense_roof.py | tee "$OUT/roof.json"
}

stage_bench() {
  nvidia-smi --query-gpu=name,driver_version,clocks.sm,clocks.mem,power.draw,temperature.gpu --format=csv,noheader \
    >"$OUT/gpu.txt" || true
  # shellcheck disable=SC2086
  "$BUILD/bench/cuda/bench_cuda" ${GPU_BENCH_ARGS:-} | tee "$OUT/bench.json"
}

for stage in "$@"; do
  echo "== $stage"
  "stage_$stage"
done
