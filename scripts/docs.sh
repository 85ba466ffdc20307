#!/usr/bin/env bash
# docs.sh: the API reference, build/docs/python from docstrings (pdoc) and build/docs/cpp from headers (doxygen). Needs the
# Python package installed. A warning of doxygen is a failure.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-.venv/bin/python}
modules=(thinwire thinwire.ddp thinwire.fsdp thinwire.lightning thinwire.c10d)
rm -rf build/docs
mkdir -p build/docs/package/thinwire

# pdoc reads signatures from Python only, so it gets the package with the extension's stub in place of the extension.
installed=$("$python" -c 'import pathlib, thinwire; print(pathlib.Path(thinwire.__file__).parent)')
cp -L "$installed"/*.py build/docs/package/thinwire/
{
  echo 'from __future__ import annotations'
  cat "$installed/_thinwire.pyi"
} >build/docs/package/thinwire/_thinwire.py
PYTHONPATH=build/docs/package "$python" -m pdoc --docformat google --output-directory build/docs/python "${modules[@]}"
rm -r build/docs/package
if ! grep -q 'Literal.*elements.*bytes' build/docs/python/thinwire.html; then
  echo 'docs: build/docs/python/thinwire.html lacks the signature of redsync()' >&2
  exit 1
fi

doxygen docs/Doxyfile
echo 'docs: build/docs/python/index.html and build/docs/cpp/index.html'
