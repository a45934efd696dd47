# Everything a reader types. Each target makes and fills the virtual environment that it needs.

PYTHON ?= python3
AGAINST ?= HEAD~1
VENV   := .venv
BIN    := $(VENV)/bin
DEV    := $(VENV)/.dev
BENCH  := $(VENV)/.bench
CLIENTS := .venv-clients

# The tests start hundreds of processes, and each would compile every module anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help run test lint bench cost clients soak format clean

help:  ## Show this list
	@awk -F':.*## ' '/^[a-z]+:.*## /{printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Covenant needs Python 3.11 or newer: make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(DEV): $(VENV)/.made pyproject.toml constraints.txt
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

$(BENCH): $(DEV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,bench]'
	@touch $@

$(CLIENTS)/.made: constraints-clients.txt
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/pip install --quiet --disable-pip-version-check -c constraints-clients.txt 'google-adk[a2a]' 'ag2[a2a]'
	@touch $@

run: $(DEV)  ## Set up, then run the daemon, with a first task going round
	$(BIN)/python examples/serve.py

test: lint  ## Set up, then lint, check types and run the tests
	$(BIN)/python -m pytest -n 2

lint: $(DEV)  ## Ruff and mypy --strict
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(DEV)  ## Let ruff put the code in order
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(BENCH)  ## Measure against the floor and the peers; writes bench/results/
	$(BIN)/python -m bench

cost: $(BENCH)  ## CPU of a cycle beside another commit: make cost AGAINST=HEAD~1
	$(BIN)/python -m bench.cost --against $(AGAINST)

clients: $(DEV) $(CLIENTS)/.made  ## Play google-adk and ag2, each unmodified, against a daemon
	$(BIN)/python -m tests.clients $(CLIENTS)/bin/python

soak: $(DEV)  ## The long versions of the crash and model tests
	$(BIN)/python -m pytest -n 2 -m soak

clean:  ## Remove the virtual environment and what tests and examples leave
	rm -rf $(VENV) $(CLIENTS) .pytest_cache .mypy_cache .ruff_cache .hypothesis data .covenant
	find src tests bench examples -name __pycache__ -prune -exec rm -rf {} +
