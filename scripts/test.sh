#!/usr/bin/env bash
# test.sh [WORD...]: everything that must hold, section by section, or only the sections whose title contains one of the
# words. Goes on after a failure; the last line counts all tests.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

jobs=${JOBS:-$(nproc)}
reports=build/test-reports
counts=$reports/counts
kSkipped=77  # exit status of a section that cannot run here
passed=0 failed=0 skipped=0
summary=()
words=("$@")
rm -rf "$reports"
mkdir -p "$reports"

# count FILE: adds the tests of a JUnit report to the section's counts.
count() {
  .venv/bin/python scripts/count_tests.py "$1" >>"$counts"
}

wanted() {
  ((${#words[@]} > 0)) || return 0
  local word
  for word in "${words[@]}"; do [[ $1 != *"$word"* ]] || return 0; done
  return 1
}

# section TITLE FUNCTION: runs it, prints its duration and adds its counts; one that counts nothing is one test.
section() {
  local title=$1 begin=$SECONDS status ok=0 bad=0 skip=0 p f s verdict
  wanted "$title" || return 0
  printf '\n==== %s\n' "$title"
  : >"$counts"
  (set -e; "$2")
  status=$?
  while read -r p f s; do
    ok=$((ok + p)) bad=$((bad + f)) skip=$((skip + s))
  done <"$counts"
  if ((status == kSkipped)); then
    skip=$((skip + 1))
  elif ((status != 0 && bad == 0)); then
    bad=1
  elif ((status == 0 && ok + bad + skip == 0)); then
    ok=1
  fi
  passed=$((passed + ok)) failed=$((failed + bad)) skipped=$((skipped + skip))
  verdict=ok
  ((bad == 0)) || verdict=FAILED
  ((status != kSkipped)) || verdict=skipped
  summary+=("$(printf '%-28s %-8s %4d s  %5d passed %3d failed %3d skipped' \
    "$title" "$verdict" $((SECONDS - begin)) $ok $bad $skip)")
  printf -- '---- %s: %s, %d s\n' "$title" "$verdict" $((SECONDS - begin))
}

existing() { local path; for path in "$@"; do [[ ! -e $path ]] || printf '%s\n' "$path"; done; }
cpp_files() { find $(existing include src bindings tests tools bench examples) -name '*.h' -o -name '*.cc'; }

setup() { scripts/setup.sh; }

format_cpp() { cpp_files | xargs clang-format --dry-run -Werror; }

format_python() {
  local folders
  folders=$(existing bindings examples tests scripts bench)
  .venv/bin/python -m ruff check $folders
  .venv/bin/python -m ruff format --check $folders
}

lint() {
  cmake --preset ci >/dev/null
  find src -name '*.cc' -print0 | xargs -0 -P "$jobs" -n 1 scripts/lint.sh build/ci
}

# run_ctest PRESET REPORT [ARGUMENTS]: shows failures and the totals, not every test that passed.
run_ctest() {
  local status=0 report="$PWD/$reports/$2.xml"
  ctest --preset "$1" -j "$jobs" --output-junit "$report" "${@:3}" >"$reports/$2.log" 2>&1 || status=$?
  grep -v -E '^ *Start +[0-9]+:|^ *[0-9]+/[0-9]+ Test +#.*(Passed|\(Skipped\))' "$reports/$2.log" || true
  count "$report"
  return $status
}

# preset NAME [CTEST ARGUMENTS]: configures, builds what can be built, runs it.
preset() {
  local built=0 status=0
  cmake --preset "$1" >/dev/null
  cmake --build --preset "$1" -j "$jobs" -- -k 0 || built=$?
  run_ctest "$1" "ctest-$1" "${@:2}" || status=$?
  return $((built + status))
}
release() { preset ci -LE install; }
install_test() { run_ctest ci ctest-install -L install; }
asan() { preset asan; }

# ThreadSanitizer does not start where addresses are randomised more widely than it knows; setarch turns that off.
tsan() {
  local probe=$reports/tsan_probe
  c++ -fsanitize=thread -x c++ -o "$probe" - <<<'int main() {}'
  if ! { "$probe" && "$probe" && "$probe"; } 2>/dev/null && setarch -R "$probe"; then
    cmake() { setarch -R cmake "$@"; }
    ctest() { setarch -R ctest "$@"; }
  fi
  preset tsan
}

fuzz() { scripts/fuzz.sh 10; }

python_tests() {
  make --no-print-directory python
  [[ -d tests/python ]] || return $kSkipped
  local status=0
  .venv/bin/python -m pytest -q tests/python --junitxml "$reports/pytest.xml" || status=$?
  count "$reports/pytest.xml"
  return $status
}

# The binding with sanitizers. Python has none: their runtime is loaded before it, and libstdc++, whose exceptions it sees.
python_asan() {
  local status=0
  cmake --preset asan -DTHINWIRE_PYTHON=ON -DPython_EXECUTABLE="$PWD/.venv/bin/python" >/dev/null
  cmake --build --preset asan -j "$jobs" --target _thinwire thinwire_python_sources
  LD_PRELOAD="$(c++ -print-file-name=libasan.so) $(c++ -print-file-name=libstdc++.so)" \
    ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 PYTHONPATH=build/asan/bindings/python \
    .venv/bin/python -m pytest -q --junitxml "$reports/pytest-asan.xml" -k "not types_are_installed" \
    tests/python/test_{package,plan,c10d,bad_input,state,inspect}.py || status=$?
  count "$reports/pytest-asan.xml"
  return $status
}

docs() { make --no-print-directory docs; }

demo() {
  [[ -e examples/demo.py ]] || return $kSkipped
  make --no-print-directory python
  .venv/bin/python examples/demo.py --smoke
}

section "setup" setup
section "format, C++" format_cpp
section "format, Python" format_python
section "lint" lint
section "C++ tests, optimised" release
section "install test" install_test
section "C++ tests, ASan and UBSan" asan
section "C++ tests, TSan" tsan
section "fuzz, short" fuzz
section "Python tests" python_tests
section "Python tests, ASan" python_asan
section "docs" docs
section "demo, short" demo

printf '\n'
printf '%s\n' "${summary[@]}"
printf '\n%d passed, %d failed, %d skipped\n' $passed $failed $skipped
((failed == 0))
