# Targets with a "##" comment are listed by `make help`.

.DEFAULT_GOAL := help
.PHONY: help setup python demo test bench fuzz wheel docs format clean

SECONDS_EACH ?= 600
JOBS ?= $(shell nproc 2>/dev/null || echo 2)
PYTHON := .venv/bin/python
CPP_FILES = $(shell find include src bindings tests tools bench examples -name '*.h' -o -name '*.cc' 2>/dev/null)
PYTHON_DIRS = $(wildcard bindings examples tests scripts bench)

help:  ## what you are reading
	@sed -n -E 's/^([a-z]+):.*## (.*)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

demo: python  ## train on Fashion-MNIST over 4 processes: dense, RedSync, DRAGONN; writes build/demo/report.html
	$(PYTHON) examples/demo.py

test:  ## format, lint, C++ and Python tests, sanitizers, install test, API reference, short demo; about 40 minutes on two cores the first time
	@scripts/test.sh $(ONLY)

bench: setup  ## time each stage on this machine, next to a read pass over the same memory (thinwire bench)
	cmake --preset release
	cmake --build --preset release -j $(JOBS) --target thinwire_cli stages_bench
	build/release/tools/thinwire bench

fuzz: setup  ## search for inputs that break something, each target for SECONDS_EACH (600)
	@scripts/fuzz.sh $(SECONDS_EACH)

wheel: setup  ## a wheel that carries Highway with it, tried in an empty environment: build/wheel
	@scripts/wheel.sh

docs: python  ## API reference: build/docs/python from docstrings, build/docs/cpp from headers
	@scripts/docs.sh

format: setup  ## rewrite C++ and Python sources in the project's format
	clang-format -i $(CPP_FILES)
	$(PYTHON) -m ruff check --fix-only --quiet $(PYTHON_DIRS)
	$(PYTHON) -m ruff format --quiet $(PYTHON_DIRS)

setup:  ## install system packages (as root) and .venv, if anything is missing
	@scripts/setup.sh

python: setup  ## build the Python package and install it into .venv, if a source has changed
	@$(MAKE) --no-print-directory .venv/.thinwire-package

.venv/.thinwire-package: CMakeLists.txt pyproject.toml $(shell find cmake include src bindings -type f -not -name '*.pyc' 2>/dev/null)
	$(PYTHON) -m pip install --disable-pip-version-check --quiet --no-build-isolation --no-deps --force-reinstall .
	@touch $@

clean:  ## remove build/ (the .venv stays)
	rm -rf build
