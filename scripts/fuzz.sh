#!/usr/bin/env bash
# fuzz.sh [SECONDS [TARGET...]]: builds the fuzz targets with Clang and runs each for SECONDS (15). New inputs are kept in
# build/fuzz/corpus, findings in build/fuzz/findings; a finding fails. The seeds are tests/fuzz/corpus.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

seconds=${1:-15}
if [[ ! $seconds =~ ^[1-9][0-9]*$ ]]; then
  printf 'fuzz: %s is not a number of seconds\n' "$seconds" >&2
  exit 2
fi
targets=("${@:2}")
if ((${#targets[@]} == 0)); then
  for source in tests/fuzz/*_fuzz.cc; do
    name=${source##*/}
    targets+=("${name%_fuzz.cc}")
  done
fi

cmake --preset fuzz >/dev/null || exit 1
cmake --build --preset fuzz -j "${JOBS:-$(nproc)}" -- --quiet || exit 1

export UBSAN_OPTIONS=print_stacktrace=1
failed=0
summary=()
for target in "${targets[@]}"; do
  corpus=build/fuzz/corpus/$target findings=build/fuzz/findings/$target log=build/fuzz/$target.log
  mkdir -p "$corpus" "$findings"
  printf 'fuzz: %s, %d s\n' "$target" "$seconds"
  build/fuzz/tests/fuzz/fuzz_"$target" -max_total_time="$seconds" -timeout=20 -rss_limit_mb=2048 -malloc_limit_mb=256 \
    -max_len=4096 -print_final_stats=1 -artifact_prefix="$findings/" "$corpus" "tests/fuzz/corpus/$target" \
    2>&1 | tee "$log" | grep -a --line-buffered -E '^#[0-9]+[[:space:]]+pulse'
  status=${PIPESTATUS[0]}
  executions=$(sed -n 's/^stat::number_of_executed_units: *//p' "$log")
  coverage=$(grep -a -o ' cov: [0-9]*' "$log" | sed -n '1p;$p' | tr -dc '0-9\n' | tr '\n' ' ')
  read -r first last _ <<<"$coverage 0 0"
  found="nothing found"
  if ((status != 0)); then
    failed=1
    found="FOUND: $(grep -a -m 1 -E '^(does not hold|SUMMARY|==[0-9]+== ?ERROR)' "$log" || echo "exit status $status"), see $log"
  fi
  summary+=("$(printf '%-12s %9s executions, coverage %s -> %s, %s' \
    "$target" "${executions:-0}" "$first" "$last" "$found")")
done
printf '%s\n' "${summary[@]}"
exit $failed
