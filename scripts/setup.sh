#!/usr/bin/env bash
# Installs what building, testing and the demo need: system packages (Debian and Ubuntu, as root) and a private .venv.
# Does nothing, quickly, when everything is there already.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { printf 'setup: %s\n' "$*"; }
die() { printf 'setup: %s\n' "$*" >&2; exit 1; }

packages=(g++ cmake ninja-build ccache clang libclang-rt-dev clang-format clang-tidy libhwy-dev libgtest-dev libbenchmark-dev libcli11-dev
  nlohmann-json3-dev python3-dev python3-venv dataset-fashion-mnist bible-kjv bible-kjv-text iproute2 doxygen)

if command -v dpkg-query >/dev/null; then
  missing=()
  for package in "${packages[@]}"; do
    state=$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null || true)
    [[ $state == installed ]] || missing+=("$package")
  done
  if ((${#missing[@]})); then
    if [[ $(id -u) != 0 ]]; then
      die "missing ${missing[*]}; run: sudo apt-get install -y --no-install-recommends ${missing[*]}"
    fi
    say "installing system packages: ${missing[*]}"
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq </dev/null || say "apt-get update failed, trying with the package lists at hand"
    apt-get install -y -qq --no-install-recommends "${missing[@]}" </dev/null >/dev/null \
      || die "apt-get could not install ${missing[*]}"
  fi
else
  missing=()
  for tool in c++ cmake ninja clang-format clang-tidy doxygen; do
    command -v "$tool" >/dev/null || missing+=("$tool")
  done
  ((${#missing[@]} == 0)) || die "missing ${missing[*]}; install them, Highway, GoogleTest, Google Benchmark, CLI11 and nlohmann-json by hand"
fi

# The first Python that can make a virtual environment and compile an extension; the system's own before any other.
find_python() {
  local candidate
  for candidate in /usr/bin/python3 python3 python3.13 python3.12 python3.11 python3.10; do
    if "$candidate" - >/dev/null 2>&1 <<'PY'; then
import ensurepip, os, sys, sysconfig, venv
ok = sys.version_info >= (3, 10) and os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h"))
sys.exit(0 if ok else 1)
PY
      printf '%s' "$candidate"
      return
    fi
  done
  return 1
}

stamp=.venv/.thinwire-setup
wanted=$(cat requirements/*.txt | sha256sum | cut -d ' ' -f 1)
if [[ $(cat "$stamp" 2>/dev/null || true) != "$wanted" ]] || ! .venv/bin/python -c '' 2>/dev/null; then
  python=$(find_python) || die "no Python >= 3.10 with venv and headers; on Debian install python3-dev and python3-venv"
  say "making .venv with $("$python" --version), then installing requirements/test.txt (PyTorch is large: some minutes)"
  "$python" -m venv --clear .venv
  .venv/bin/python -m pip install --disable-pip-version-check --progress-bar off -r requirements/test.txt </dev/null \
    | sed -u -n -E 's/^ *(Downloading [^ ]+|Installing collected packages).*/setup: \1/p' \
    || die "pip could not install requirements/test.txt"
  printf '%s\n' "$wanted" >"$stamp"
fi
say "ready"
