# make quickstart   see it work
# make test         what CI runs (make test-full: and the longest tests)
# Needs Python 3.11 or later (another one: make test PYTHON=python3.12) and nothing else.

PYTHON ?= python3
WORKERS ?= 2
GPU_WORKERS ?= 8
VENV := .venv
BIN := $(VENV)/bin
# The version is in the last.
INPUTS := pyproject.toml constraints.txt softfree/__init__.py

.DEFAULT_GOAL := help
.PHONY: help quickstart test test-full test-gpu lint texts browser clean

help:  ## this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1|\2/' | column -t -s '|' 2>/dev/null \
	  || grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST)

quickstart: $(VENV)/installed  ## install, then train on handwritten digits, score and draw the result
	$(BIN)/softfree quickstart

# One thread per worker: threads of several workers on the same cores wait for each other.
test: lint  ## format, lint, types and tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not full" -n $(WORKERS) --dist worksteal

test-full: lint  ## the same with the longest tests, for which half an hour goes by on two cores
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

# Most of the time goes into compiling kernels, each on one core: several workers share the GPU.
test-gpu: $(VENV)/installed-dev  ## on a GPU: every kernel, dtype and gradient, in a few minutes
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "gpu and not long" -n $(GPU_WORKERS)

lint: $(VENV)/installed-dev  ## format, lint and types alone
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

texts: $(VENV)/installed  ## write the texts that commands print at once: their help, the list of models
	$(BIN)/python -m softfree.commands.texts

browser: $(VENV)/installed-dev  ## a browser for the tests of the explorer's page, which are skipped without
	$(BIN)/python .ci/browser

clean:  ## remove the environment, caches and build outputs
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "softfree needs Python 3.11 or later, but '$(PYTHON)' is" \
	    "$$($(PYTHON) --version 2>/dev/null || echo missing)." \
	    "Name another: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# Without bytecode of all that comes along, which would double the time: Python makes it of what is imported.
PIP_INSTALL := $(BIN)/python -m pip install --quiet --no-compile -c constraints.txt

$(VENV)/installed: $(INPUTS) | $(BIN)/python
	$(PIP_INSTALL) -e .
	@touch $@

$(VENV)/installed-dev: $(INPUTS) | $(BIN)/python
	$(PIP_INSTALL) -e '.[dev]'
	@touch $@ $(VENV)/installed
