# `make demo` and `make test` need nothing but Python 3.11 to 3.13: the first of them makes .venv, once.
PYTHON  ?= python3
WORKERS ?= 3
VENV    := .venv
BIN     := $(VENV)/bin
READY   := $(VENV)/.installed
PIP     := $(BIN)/python -m pip --disable-pip-version-check

SHELL   := /bin/bash
# Hundreds of processes of the tests import the same modules: they are compiled once.
export PYTHONDONTWRITEBYTECODE :=
# What TensorFlow writes whenever it starts, whatever its log level is.
START_UP := ^(WARNING: All log messages before absl|[IWE]0000 .*(oneDNN|cuda drivers|cpu_feature_guard|cuInit)|To enable the following instructions)

.DEFAULT_GOAL := help
.PHONY: help install demo test lint types unit soak bench docs lock clean

help: ## list what can be made
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

install: $(READY) ## make .venv with everything the lock names (demo and test do it by themselves)

demo: $(READY) ## two language models in two clusters learn to translate together; four minutes on two idle cores
	@set -o pipefail; { TF_CPP_MIN_LOG_LEVEL=2 $(BIN)/python examples/translate.py 2>&1 1>&3 \
		| { grep --line-buffered -vE '$(START_UP)' >&2 || true; }; } 3>&1

test: lint types unit ## everything that has to pass: ruff, mypy, pytest

lint: $(READY) ## ruff, its formatter, and names of functions
	$(BIN)/ruff check
	$(BIN)/ruff format --check --quiet
	$(BIN)/python tools/names.py

types: $(READY) ## mypy, strict
	$(BIN)/mypy

unit: $(READY) ## pytest; ARGS="-k plan" picks, WORKERS=4 widens
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

soak: $(READY) ## the whole grids of which `make test` runs a sample: processes, loops, parity, faults; several hours
	$(BIN)/python -m pytest --grid tests/processes tests/traps tests/scripts
	$(BIN)/python -m pytest --grid -m grid --ignore=tests/processes --ignore=tests/traps --ignore=tests/scripts
	$(BIN)/python -m pytest --grid tests/unit/wire tests/unit/codec tests/unit/gateway tests/unit/transport tests/unit/config tests/unit/security tests/unit/schedule
	$(PIP) install --quiet kubernetes-validate==1.37.0 && $(BIN)/python -m pytest tests/unit/test_deploy.py
	$(BIN)/python benchmarks/parity/run.py
	$(BIN)/python -m tests.soak.simulated --cases 20000
	$(BIN)/python benchmarks/faults/run.py

bench: $(READY) ## run every benchmark and rewrite its result
	@set -e; for script in $(filter-out benchmarks/faults/% benchmarks/abnet/%,$(wildcard benchmarks/*/run.py)); do echo "== $$script"; $(BIN)/python $$script; done

docs: $(READY) ## build the documentation as a site, in build/site
	$(BIN)/mkdocs build --strict

lock: $(READY) ## pin all dependencies anew, with hashes
	$(PIP) install --quiet pip-tools
	CUSTOM_COMPILE_COMMAND="make lock" $(BIN)/pip-compile --quiet --upgrade --extra dev --output-file requirements-dev.lock \
		--generate-hashes --allow-unsafe --strip-extras \
		--no-emit-index-url --no-emit-find-links --no-emit-trusted-host --no-emit-options pyproject.toml

clean: ## remove .venv, caches and what was built
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): pyproject.toml setup.py requirements-dev.lock
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' \
		|| { echo "whale_nebula needs Python 3.11, 3.12 or 3.13: make PYTHON=python3.12 ..." >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --require-hashes -r requirements-dev.lock
	$(PIP) install --quiet --no-deps --no-build-isolation --editable .
	@touch $@
