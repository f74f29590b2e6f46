# Each target sets up what it needs: `make demo` or `make test` alone is enough on a fresh machine.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
PEERS := .venv-peers
WHEEL := .venv-wheel
QUICK_TESTS := tests/test_quick.py
TEST_FLAGS ?= -n 2 -q
# a test process a core: threads of BLAS would get in each other's way
PYTEST := OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest

.PHONY: help demo docs notebooks test test-slow test-gpu wheel wheel-test python-versions bench bench-quick bench-real lint types format clean

help:
	@echo "make demo       fit certified heads on digits, print a leaderboard, write figures to demo_output/"
	@echo "make test       lint, types, import order, the documentation and the test suite (what CI runs)"
	@echo "make docs       build the documentation, strictly, into site/"
	@echo "make notebooks  run the notebooks of the gallery and draw the heads, for the documentation"
	@echo "make test-slow  the slow tests as well"
	@echo "make test-gpu   the tests that need a CUDA device, in the current Python, nothing installed"
	@echo "make wheel-test build sdist and wheel, install the wheel afresh, run the quick tests of the sdist on it"
	@echo "make python-versions  the same wheel and tests on every Python from 3.10 to 3.13 there is (downloads torch for each)"
	@echo "make bench      token-sparse attention against adelie, celer, skglm, copt, CVXPY and Adam (about 20 minutes)"
	@echo "make bench-quick  the same on small sizes (about two minutes); tables and figures go to runs/bench*/"
	@echo "make bench-real DATA='a.npz b.npz'  every head and solver on real tokens, digits and made-up shapes (about half an"
	@echo "                hour; SUITE=quick: three minutes); table, figure and numbers go to runs/bench-real/"
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

docs: $(VENV)/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

notebooks: $(VENV)/.dev
	$(BIN)/python docs/run_notebooks.py
	$(BIN)/python docs/make_head_pictures.py

test: lint types docs
	$(PYTEST) $(TEST_FLAGS)

test-slow: $(VENV)/.dev
	$(PYTEST) $(TEST_FLAGS) -m "not gpu"

test-gpu:
	PYTHONPATH=src $(PYTHON) -m pytest -q -m gpu $$(grep -l "mark.gpu" tests/*.py)

wheel: $(VENV)/.dev
	rm -rf dist && $(BIN)/python -m build --outdir dist . > /dev/null

# a fresh environment with the wheel alone; what it depends on is read from $(VENV), so that torch is not installed twice
wheel-test: wheel
	rm -rf $(WHEEL) && $(PYTHON) -m venv $(WHEEL)
	$(WHEEL)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps dist/*.whl
	$(BIN)/python -c "import site; print(site.getsitepackages()[0])" \
		> $$($(WHEEL)/bin/python -c "import site; print(site.getsitepackages()[0])")/dependencies.pth
	mkdir $(WHEEL)/sdist && tar -xzf dist/*.tar.gz --strip-components 1 -C $(WHEEL)/sdist
	cd $(WHEEL)/sdist && rm -rf src && CONVEXFORMER_INSTALLED=1 ../bin/python -m pytest -q -p no:cacheprovider $(QUICK_TESTS)

python-versions: wheel
	for version in 3.10 3.11 3.12 3.13; do \
		found=$$(command -v python$$version) || { echo "python$$version is not there"; continue; }; \
		rm -rf $(WHEEL)-$$version && $$found -m venv $(WHEEL)-$$version && \
		$(WHEEL)-$$version/bin/python -m pip --disable-pip-version-check install --quiet -c constraints.txt dist/*.whl pytest && \
		mkdir $(WHEEL)-$$version/sdist && tar -xzf dist/*.tar.gz --strip-components 1 -C $(WHEEL)-$$version/sdist && \
		(cd $(WHEEL)-$$version/sdist && rm -rf src && \
		CONVEXFORMER_INSTALLED=1 ../bin/python -m pytest -q -p no:cacheprovider tests/test_quick.py) || exit 1; \
	done

# the peers need an old numpy, so they get an environment of their own; one that cannot be installed is reported in the
# table and does not stop the others
$(PEERS)/.done: benchmarks/tokens/peers.txt
	$(PYTHON) -m venv $(PEERS)
	for peer in adelie celer skglm copt; do \
		$(PEERS)/bin/python -m pip --disable-pip-version-check install --quiet -c benchmarks/tokens/peers.txt $$peer \
		|| echo "$$peer could not be installed"; \
	done
	@touch $@

bench: $(VENV)/.dev $(PEERS)/.done
	$(BIN)/python benchmarks/tokens/run.py --peers $(PEERS)/bin/python --output runs/bench

bench-quick: $(VENV)/.dev $(PEERS)/.done
	$(BIN)/python benchmarks/tokens/run.py --suite quick --peers $(PEERS)/bin/python --output runs/bench-quick

# token files: npz with X, y and perhaps mask (N, s, d), (N,), (N, s)
DATA ?=
SUITE ?= default
bench-real: $(VENV)/.dev
	$(BIN)/python benchmarks/real/run.py $(DATA) --suite $(SUITE) --output runs/bench-real

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(PEERS) $(WHEEL)* dist .pytest_cache .mypy_cache .ruff_cache demo_output site
