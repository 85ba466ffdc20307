#!/usr/bin/env bash
# lint.sh BUILD_FOLDER FILE: clang-tidy on one file. Prints findings only, not how many were suppressed.
set -uo pipefail
output=$(clang-tidy -p "$1" --quiet --warnings-as-errors='*' --extra-arg=-Wno-unknown-warning-option "$2" 2>&1)
status=$?
if ((status != 0)); then
  grep -v -E '^[0-9]+ (warnings?|errors?) |^Error while processing|^Suppressed ' <<<"$output"
fi
exit $status
