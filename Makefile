# Each target sets up what it needs: `make demo` or `make test` alone is enough on a fresh machine.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
TEST_FLAGS ?= -n 2 -q

.PHONY: help demo test test-slow test-gpu lint types format clean

help:
	@echo "make demo       fit certified heads on digits, print a leaderboard, write figures to demo_output/"
	@echo "make test       lint, types, import order and the test suite (what CI runs)"
	@echo "make test-slow  the slow tests as well"
	@echo "make test-gpu   the tests that need a CUDA device, in the current Python, nothing installed"
	@echo "make format     let ruff rewrite the code"

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.core: $(BIN)/python pyproject.toml constraints.txt
	$(PIP) install --quiet -c constraints.txt -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.core
	$(PIP) install --quiet -c constraints.txt -e ".[dev]"
	@touch $@

demo: $(VENV)/.core
	$(BIN)/convexformer demo --output demo_output

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(VENV)/.dev
	$(BIN)/mypy

test: lint types
	$(BIN)/python -m pytest $(TEST_FLAGS)

test-slow: $(VENV)/.dev
	$(BIN)/python -m pytest $(TEST_FLAGS) -m "not gpu"

test-gpu:
	PYTHONPATH=src $(PYTHON) -m pytest -q -m gpu

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache demo_output
