#!/usr/bin/env bash
# Builds the wheel, puts Highway into it, and tries it in an empty environment: build/wheel/thinwire-*.whl.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

out=build/wheel
rm -rf "$out"
mkdir -p "$out/plain"
.venv/bin/python -m pip wheel --disable-pip-version-check --quiet --no-build-isolation --no-deps -w "$out/plain" .
PATH="$PWD/.venv/bin:$PATH" .venv/bin/python -m auditwheel repair -w "$out" "$out"/plain/*.whl >"$out/repair.log" 2>&1 \
  || { cat "$out/repair.log" >&2; exit 1; }
wheel=$(echo "$out"/thinwire-*.whl)

.venv/bin/python -m venv "$out/empty"
"$out/empty/bin/python" -m pip install --disable-pip-version-check --quiet --no-index "$wheel"
cd "$out"  # away from the sources
folder=$(empty/bin/python -c 'import pathlib, thinwire; print(pathlib.Path(thinwire.__file__).parent)')
libraries=$(ldd "$folder"/_thinwire*.so)
if ! grep -q 'libhwy.* => .*thinwire\.libs/' <<<"$libraries"; then
  printf 'wheel: its module does not use the Highway that the wheel carries:\n%s\n' "$libraries" >&2
  exit 1
fi
empty/bin/python - <<'PY'
import array
import importlib.util

import thinwire

assert importlib.util.find_spec("torch") is None
(alone,) = thinwire.make_thread_communicators(1)
reducer = thinwire.Reducer(thinwire.redsync(), [("weight", 1000)], alone)
gradient = array.array("f", range(1000))
reducer.begin_step()
reducer.reduce([("weight", 1000, True)], gradient).wait()
assert gradient[999] == 999
PY
# With the other environment's PyTorch behind it, it trains.
../../.venv/bin/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])' \
  >"$(empty/bin/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/torch.pth"
empty/bin/python -m torch.distributed.run --nproc-per-node 2 ../../examples/fashion_mnist.py --smoke
printf 'wheel: %s\n' "$PWD/$(basename "$wheel")"
