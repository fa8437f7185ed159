# Every target sets up .venv by itself; stamp files in it make the second run quick.
#
#   make test PYTHON=python3.12 PYTEST_ARGS="-n 0 -k crash"
#
# On Linux, PyPI's torch brings gigabytes of CUDA libraries along. The CPU build will do:
#
#   PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make test

PYTHON ?= python3
WORKERS ?= 2
PYTEST_ARGS ?=
DEMO_ARGS ?=
BENCH_ARGS ?=
TORTURE_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

.DEFAULT_GOAL := help
.NOTPARALLEL: # all installs go into one environment
.PHONY: help demo test lint bench clean
.PHONY: bench-full torture docs
.PHONY: frameworks test-adapters

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.core ## train, kill, resume, damage and repair on a temporary folder (DEMO_ARGS="--url URL")
	$(BIN)/ckptstore demo $(DEMO_ARGS)

test: $(VENV)/.test ## run all tests, against servers that they start themselves (PYTEST_ARGS=...)
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(PYTEST_ARGS)

frameworks: $(VENV)/.adapters ## install the frameworks that the adapters are for: from then on `make test` tests them too

test-adapters: $(VENV)/.test $(VENV)/.adapters ## run what is about trainers and many ranks, and the docs, with the frameworks (PYTEST_ARGS=...)
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(PYTEST_ARGS) tests/adapters tests/ranks tests/torch tests/test_docs.py tests/test_site.py

lint: $(VENV)/.test ## check style, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict

bench: $(VENV)/.bench ## judge all goals on states of 0.25 GiB, side by side with rivals, in minutes (BENCH_ARGS=...)
	$(BIN)/python -m benchmarks quick $(BENCH_ARGS)

bench-full: $(VENV)/.bench ## the same with all states, sizes and rivals: some two hours, 24 GiB of memory, 40 GiB of disk
	$(BIN)/python -m benchmarks full $(BENCH_ARGS)

torture: $(VENV)/.test ## kill, race, damage and starve it for half an hour: "lost: 0" (TORTURE_ARGS="--profile ci")
	$(BIN)/python -m tests.torture $(TORTURE_ARGS)

docs: $(VENV)/.docs ## build the site: open site/index.html
	$(BIN)/zensical build --strict

clean: ## remove the environment and all caches
	rm -rf $(VENV) site build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis benchmarks/.cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "ckptstore needs Python 3.10 or newer: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.core: pyproject.toml | $(BIN)/python
	$(PIP) install --quiet --editable .
	@touch $@

$(VENV)/.test $(VENV)/.bench $(VENV)/.adapters $(VENV)/.docs: $(VENV)/.%: pyproject.toml | $(BIN)/python
	$(PIP) install --quiet --editable '.[$*]'
	@touch $@
