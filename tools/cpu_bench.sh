#!/usr/bin/env bash
# Times the layer on this machine's CPU in every weight format, cold, probes in the same run:
#   tools/cpu_bench.sh [SHAPE...]     (default: qwen3-30b-a3b mixtral-8x7b deepseek-v3:E=32 gpt-oss-120b)
# Writes OUT/cpu-SHAPE.json (default bench/results): what doctor says, and a point for each format and row count.
# Environment: MOEKIT (the program, default build/moekit), OUT, FORMATS, TOKENS (1,16,512), BENCH_ARGS (more options).
# Run it on an idle machine; a shape needs about twice its bf16 weights of memory.
set -euo pipefail
cd "$(dirname "$(readlink -f "$0")")/.."
moekit=${MOEKIT:-build/moekit}
out=${OUT:-bench/results}
formats=${FORMATS:-bf16 f16 f32 fp8_tensor fp8_channel fp8_block mxfp8 mxfp4 nvfp4 int4_g32 int4_g128 int8_g128}
tokens=${TOKENS:-1,16,512}
[ $# -gt 0 ] || set -- qwen3-30b-a3b mixtral-8x7b deepseek-v3:E=32 gpt-oss-120b
mkdir -p "$out"

for shape in "$@"; do
  lines=$(mktemp)
  for format in $formats; do
    separator=:
    case $shape in *:*) separator=, ;; esac
    "$moekit" bench --problem "$shape${separator}weights=$format" --tokens-list "$tokens" --json --quiet \
      ${BENCH_ARGS:-} >>"$lines"
  done
  python3 - "$lines" "$out/cpu-${shape%%:*}.json" "tools/cpu_bench.sh $shape (TOKENS=$tokens ${BENCH_ARGS:-})" <<'PYTHON'
import json
import sys

lines, path, command = sys.argv[1:]
rows = [json.loads(line) for line in open(lines)]
doctor = next(row for row in rows if "cpu" in row)
points = [row for row in rows if "time_us" in row]
with open(path, "w") as file:
    file.write('{"command": %s,\n "doctor": %s,\n "points": [\n' % (json.dumps(command), json.dumps(doctor)))
    file.write(",\n".join("  " + json.dumps(point) for point in points))
    file.write("\n ]}\n")
for p in points:
    weights = p["problem"].split("weights=")[1].split(",")[0]
    print("%-12s T=%-4d %10.0f us  of floor %.2f" % (weights, p["tokens"], p["time_us"]["median"], p["floor_fraction"]))
PYTHON
  rm -f "$lines"
done
