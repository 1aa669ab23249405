#!/usr/bin/env bash
# From a fresh Debian 12/13 or Ubuntu 24.04 to a checked MoE layer: installs what is missing, builds, and runs
# the program on a small checkpoint of this repository. Run it again any time; only what changed is rebuilt.
#   ./quickstart.sh [--cuda] [MODEL_DIR]
#     --cuda      build the CUDA kernels too (default: when a GPU is visible)
#     MODEL_DIR   a checkpoint of your own instead of the fixture
set -euo pipefail
cd "$(dirname "$(readlink -f "$0")")"
. tools/shell_common.sh

fixture=tests/fixtures/gptoss-mxfp4
cuda=OFF
model=
gpu_visible && cuda=AUTO
while [ $# -gt 0 ]; do
  case $1 in
    --cuda) cuda=ON ;;
    -h | --help) sed -n '2,6s/^# \{0,1\}//p' "$0"; exit 0 ;;
    -*) die "quickstart.sh: unknown option $1 (--cuda, --help)" ;;
    *) model=$1 ;;
  esac
  shift
done

mapfile -t missing < <(build_packages)
need_packages "${missing[@]}"

heading "Building into build/"
forget_foreign_cache build
configure=(cmake --log-level=WARNING --preset release -DMOEKIT_CUDA="$cuda")
# The tests need more packages than this script installs; a folder that already builds them keeps them.
[ -f build/CMakeCache.txt ] || configure+=(-DMOEKIT_BUILD_TESTS=OFF)
run "${configure[@]}"
run cmake --build build --target moekit_cli --parallel "$(jobs)"

if [ -n "$model" ]; then
  golden=()
  tokens=(--random 16)
else
  model=$fixture
  # The goldens were computed without quantizing activations.
  golden=(--activations f32 --golden "$fixture/golden.safetensors:layer0.output")
  tokens=(--tokens "$fixture/golden.safetensors:layer0.input")
fi

heading "What the checkpoint holds"
run build/moekit inspect "$model"
heading "Run its first MoE layer"
run build/moekit run --model "$model" "${tokens[@]}"
heading "Check it: every back-end against the reference${golden:+ and against the outputs that transformers computed}"
run build/moekit check --model "$model" "${tokens[@]}" "${golden[@]}"
heading "Why this back-end"
run build/moekit explain --model "$model"

heading "Done"
cat <<TEXT
The program is build/moekit. On a checkpoint of your own (config.json + safetensors):
  build/moekit inspect DIR
  build/moekit check --model DIR
  build/moekit run --model DIR --layer N --tokens hidden.npy --output out.npy
Every verb: build/moekit --help. Tests: ./test.sh
TEXT
