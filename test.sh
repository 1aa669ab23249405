#!/usr/bin/env bash
# Builds moekit and tests it on the CPU.
#   ./test.sh         release build, ctest -L cpu, the Python tests, the Python package in an environment of its own,
#                     layers, headers, installed package and its consumers
#   ./test.sh --ci    the same with -Werror, and: formatting, repeated and shuffled runs of the concurrent tests, all tests
#                     built by clang with the address and undefined sanitizers, a minute of fuzzing, the thread sanitizer
#                     (with ranks that die, stall and lie), the CUDA code compiled where nvcc 13 is found
#   ./test.sh --cuda  also compiles the CUDA code (nvcc 13 or later), its tests and its bench
# Ends non-zero at the first failure. CMAKE_BUILD_PARALLEL_LEVEL sets the jobs (default: all CPUs);
# MOEKIT_FUZZ_SECONDS the time of fuzzing (default 60).
set -euo pipefail
cd "$(dirname "$(readlink -f "$0")")"
. tools/shell_common.sh

ci=false
cuda=false
while [ $# -gt 0 ]; do
  case $1 in
    --ci) ci=true ;;
    --cuda) cuda=true ;;
    -h | --help) sed -n '2,10s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) die "test.sh: unknown option $1 (--ci, --cuda, --help)" ;;
  esac
  shift
done

# The version whose output the tree is formatted with; another version is another opinion.
clang_format_major=14
# Test programs whose tests run threads against each other; --ci repeats them in random order.
concurrent_tests=(comm prepare engine api)
# What the thread sanitizer sees: the programs in which threads or ranks share anything.
tsan_tests=(alloc api comm cuda_plugin engine experts faults linear prepare quant tensor trace)
# Those that a sanitizer makes the slowest; the first one waits for deadlines most of the time.
slow_tests=(faults engine comm experts api)

test_packages() {
  build_packages
  tool_package python3
  tool_package pkg-config
  tool_package mpirun
  tool_package mpi.h
  library_package gtest/gtest.h libgtest-dev
  library_package gmock/gmock.h libgmock-dev
  if [ -d tests/python ] && [ ! -x .venv/bin/python ]; then tool_package python3-venv; fi
  if $ci; then
    tool_package clang
    tool_package clang-format
    tool_package ip
  fi
}

install_packages() {
  mapfile -t missing < <(test_packages)
  need_packages "${missing[@]}"
  $ci || return 0
  # The fuzzer's and sanitizers' run-time library is a package of its own, named after clang's version.
  local resources major
  resources=$(clang++ -print-resource-dir)
  major=$(basename "$resources" | cut -d. -f1)
  ls "$resources"/lib/linux/libclang_rt.fuzzer-*.a >/dev/null 2>&1 || need_packages "libclang-rt-$major-dev"
}

# build FOLDER PRESET [CMAKE OPTIONS...] -- TARGETS...
build() {
  local folder=$1 preset=$2 options=()
  shift 2
  while [ "$1" != -- ]; do options+=("$1"); shift; done
  shift
  forget_foreign_cache "$folder"
  run cmake --log-level=WARNING --preset "$preset" "${options[@]}"
  run cmake --build "$folder" --parallel "$(jobs)" --target "$@"
}

ctest_cpu() {
  run ctest --test-dir "$1" -L cpu --parallel "$(jobs)" --output-on-failure --no-tests=error
}

# test_programs FOLDER FILTER [LAUNCHER...]: all tests of a program in one process, as a sanitizer's start takes longer
# than most tests.
test_programs() {
  local folder=$1 filter=$2 programs
  shift 2
  # First the slow ones, then all that have not been named.
  mapfile -t programs < <(for name in "${slow_tests[@]}" '*'; do
    find "$folder/tests" -maxdepth 1 -name "test_$name" -type f -executable | sort
  done | awk '!seen[$0]++')
  [ ${#programs[@]} -gt 0 ] || die "no test programs in $folder/tests"
  printf '$ %s --gtest_filter=%s\n' "${programs[*]}" "$filter"
  printf '%s\0' "${programs[@]}" |
    xargs -0 -P "$(jobs)" -I{} timeout 1200 "$@" {} --gtest_brief=1 --gtest_filter="$filter"
}

check_rules() {
  heading "Layers"
  run python3 tools/check_layers.py --self-test
  run python3 tools/check_layers.py
}

check_format() {
  heading "Formatting"
  local major folders=() folder files
  major=$(clang-format --version | sed -n 's/.*version \([0-9]*\).*/\1/p')
  for folder in include src cli tests bench examples kernels; do [ -d "$folder" ] && folders+=("$folder"); done
  mapfile -t files < <(find "${folders[@]}" \( -name '*.h' -o -name '*.cc' -o -name '*.c' \) -not -path '*/build/*' | sort)
  if [ "$major" = "$clang_format_major" ]; then
    clang-format --dry-run --Werror "${files[@]}"
    echo "${#files[@]} files are formatted"
  else
    echo "clang-format $major is here, the tree follows $clang_format_major: differences are warnings"
    clang-format --dry-run "${files[@]}" 2>&1 | grep -c 'clang-format-violations' || true
  fi
}

release_tests() {
  heading "Release build"
  # Ranks that go wrong: --ci runs those under MPI from here, the others under the thread sanitizer.
  build build release -DMOEKIT_BUILD_TESTS=ON -DMOEKIT_FAULTS="$($ci && echo ON || echo OFF)" \
    -DMOEKIT_WERROR="$($ci && echo ON || echo OFF)" -- all
  heading "Headers, each alone"
  run cmake --build build --parallel "$(jobs)" --target check_headers
  heading "CPU tests, installed package and its consumers"
  ctest_cpu build
}

python_tests() {
  if [ ! -d tests/python ]; then return; fi
  heading "Python tests"
  if [ ! -x .venv/bin/python ]; then run python3 -m venv .venv; fi
  local stamp=.venv/requirements.installed
  if ! cmp -s tests/python/requirements.txt "$stamp"; then
    if .venv/bin/python -m pip install -q -r tests/python/requirements.txt; then
      cp tests/python/requirements.txt "$stamp"
    elif .venv/bin/python -c 'import numpy, ml_dtypes, pytest, xdist' 2>/dev/null; then
      echo "pip could not reach its index; using the packages that .venv has"
    else
      echo "SKIPPED: the Python tests need tests/python/requirements.txt, and pip could not install it (no network?)"
      skipped+=("Python tests: pip could not install tests/python/requirements.txt")
      return
    fi
  fi
  local pytest=(.venv/bin/python -m pytest -q -rs) mpi
  mpi=(tests/python/test_mpi*.py)
  run "${pytest[@]}" -n "$(jobs)" --dist worksteal tests/python --ignore tests/python/pkg "${mpi[@]/#/--ignore=}"
  # Ranks wait for each other by polling, with deadlines: one group at a time.
  run "${pytest[@]}" "${mpi[@]}"
}

# The Python package as its user gets it: a wheel of what release_tests built, installed in a fresh environment,
# tested from there. torch is taken only where pip finds a build for the CPU (CUDA builds are gigabytes).
package_tests() {
  if [ ! -f pyproject.toml ]; then return; fi
  heading "Python package"
  local venv=build/package-venv
  rm -rf "$venv"
  run python3 -m venv "$venv"
  local pip=("$PWD/$venv/bin/python" -m pip --disable-pip-version-check)
  if ! "${pip[@]}" install -q -r tests/python/requirements.txt scikit-build-core mypy; then
    echo "SKIPPED: the package's tests need tests/python/requirements.txt, scikit-build-core and mypy, and pip could not install them"
    skipped+=("Python package: pip could not install its build requirements")
    return
  fi
  # The build folder's cmake and ninja do; isolation would fetch others.
  run "${pip[@]}" install -q --no-build-isolation --no-deps -C cmake.define.MOEKIT_PREBUILT="$PWD/build" .
  # Small, and looked for by their tests, which say so where they are missing.
  "${pip[@]}" install -q apache-tvm-ffi mpi4py 2>"$venv/more.log" || skipped+=("Python package with apache-tvm-ffi and mpi4py: pip could not install them ($venv/more.log)")
  if timeout 240 "${pip[@]}" install -q "torch==2.13.0+cpu" "transformers>=5.17" compressed-tensors 2>"$venv/torch.log"; then
    "${pip[@]}" list 2>/dev/null | grep -E '^(torch|transformers|compressed-tensors) '
  else
    skipped+=("Python package with torch and transformers: pip found no CPU build of torch in 240 s ($venv/torch.log)")
  fi
  run "$venv/bin/python" -m mypy --strict -p moekit
  MOEKIT_TEST_INSTALLED=1 run "$venv/bin/python" -m pytest -q -rs -p no:cacheprovider tests/python/pkg
}

# Runs a program of one line under a sanitizer, bare and without address randomization, and sets `launcher`
# to what works. Kernels with many random bits of mmap break the thread sanitizer of older compilers.
sanitizer_launcher() {
  local compiler=$1 flag=$2 folder
  folder=$(mktemp -d)
  echo 'int main() { return 0; }' >"$folder/probe.cc"
  "$compiler" "-fsanitize=$flag" "$folder/probe.cc" -o "$folder/probe"
  launcher=()
  if ! "$folder/probe" >/dev/null 2>&1; then
    launcher=(setarch "$(uname -m)" -R)
    "${launcher[@]}" "$folder/probe" >/dev/null 2>&1 ||
      die "-fsanitize=$flag programs do not start on this kernel; lower vm.mmap_rnd_bits to 28 and try again"
  fi
  rm -rf "$folder"
}

# LeakSanitizer traces its own process, which some containers forbid; everything else of ASan works there.
leak_option() {
  local folder
  folder=$(mktemp -d)
  echo 'int main() { return 0; }' >"$folder/probe.cc"
  clang++ -fsanitize=address "$folder/probe.cc" -o "$folder/probe"
  if ASAN_OPTIONS=detect_leaks=1 "$folder/probe" >/dev/null 2>&1; then echo 1; else echo 0; fi
  rm -rf "$folder"
}

# sanitizer_tests PRESET FLAGS FILTER TARGETS...
sanitizer_tests() {
  local name=$1 flags=$2 filter=$3 launcher
  shift 3
  heading "Sanitizer build: $flags"
  local compiler=g++ leaks=0
  if [ "$name" = asan ]; then
    compiler=clang++
    leaks=$(leak_option)
    [ "$leaks" = 1 ] || skipped+=("leak detection: this container forbids a process to trace itself")
  fi
  sanitizer_launcher "$compiler" "${flags%%,*}"
  export ASAN_OPTIONS=detect_leaks=$leaks:strict_string_checks=1:detect_stack_use_after_return=1
  export UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1
  export TSAN_OPTIONS=halt_on_error=1:second_deadlock_stack=1
  build "build/$name" "$name" -DMOEKIT_WERROR=ON -- "$@"
  test_programs "build/$name" "$filter" "${launcher[@]}"
}

# Threads meet in another order each time: repeat, shuffle, and give them fewer CPUs than they want.
stress() {
  local folder=$1 repeat=$2 name
  shift 2
  for name in "${concurrent_tests[@]}"; do
    [ -x "$folder/tests/test_$name" ] || continue
    run "$@" "$folder/tests/test_$name" --gtest_repeat="$repeat" --gtest_shuffle --gtest_brief=1 --gtest_break_on_failure
    run "$@" taskset -c "$(first_cpu)" "$folder/tests/test_$name" --gtest_shuffle --gtest_brief=1
  done
}

# Cheap calls on ranks that dawdle at random: 30000 of each member that moves rows, 120000 in all.
stress_rounds() {
  local folder=$1
  shift
  run "$@" env MOEKIT_STRESS_ROUNDS=30000 "$folder/tests/test_prepare" --gtest_brief=1 \
    --gtest_filter='*ManyCallsWithDelays*'
}

first_cpu() { taskset -cp $$ | sed 's/.*: *\([0-9]*\).*/\1/'; }

fuzz() {
  local seconds=${MOEKIT_FUZZ_SECONDS:-60} scratch fuzzer
  heading "$seconds s of fuzzing"
  scratch=$(mktemp -d)
  for fuzzer in build/asan/tests/fuzz/*_fuzz; do
    [ -x "$fuzzer" ] || die "no fuzz target was built: expected build/asan/tests/fuzz/*_fuzz"
    # The kept corpus is read, new finds go to the scratch folder.
    run "$fuzzer" -max_total_time="$seconds" -rss_limit_mb=2048 -timeout=20 -print_final_stats=1 \
      -artifact_prefix="$scratch/" "$scratch" tests/fuzz/corpus
  done
  rm -rf "$scratch"
}

# Every kernel for every target, the plug-in, and the programs that test and time them; nothing runs, as there is no
# GPU here. Three minutes on two cores, beside the core in a folder of its own.
cuda_compile() {
  local release
  release=$(nvcc --version 2>/dev/null | sed -n 's/.*release \([0-9]*\).*/\1/p' || true)
  if [ "${release:-0}" -lt 13 ]; then
    skipped+=("CUDA compile: nvcc 13 or later is not here")
    return
  fi
  heading "CUDA compile"
  # The host code it needs is compiled again (a minute): precompiled headers are a folder's own, also to ccache.
  local tests=OFF targets=(moekit_cuda_plugin)
  if $cuda; then tests=ON targets+=(test_cuda bench_cuda); fi
  build build/cuda cuda -DMOEKIT_BUILD_TESTS="$tests" -DMOEKIT_BUILD_CLI=OFF \
    -DMOEKIT_WERROR="$($ci && echo ON || echo OFF)" -- "${targets[@]}"
}

skipped=()
install_packages
check_rules
$ci && check_format
release_tests
python_tests
package_tests
if $ci; then
  heading "Stress"
  stress build 2
  stress_rounds build
  # The model checker's minutes tell a sanitizer nothing; nor do, to that of threads, those of arithmetic on one.
  # clang builds the whole product here, each file without precompiled headers: it has to include what it uses.
  sanitizer_tests asan address,undefined '-PushModel*' moekit_tests moekit_shared moekit_cli moekit_fuzzers
  fuzz
  sanitizer_tests tsan thread '-*EveryFormatPairOnEveryIsa*:*EveryFormatOnEveryIsa*' "${tsan_tests[@]/#/test_}"
  heading "Stress under the thread sanitizer"
  sanitizer_launcher g++ thread
  stress_rounds build/tsan "${launcher[@]}"
fi
if $ci || $cuda; then cuda_compile; fi

heading "All passed"
for message in "${skipped[@]}"; do echo "not run: $message"; done
