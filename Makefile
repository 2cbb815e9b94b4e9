# Everything runs inside .venv, which the first target that needs it sets up.
# Needs python3 >= 3.11 (or PYTHON=...), pip, make, and an index to install from.

PYTHON ?= python3
# TORCH=2.15.0 and PYTHON=python3.12 work with those, in environments of their own.
TORCH ?=
OTHER_PYTHON := $(if $(filter file,$(origin PYTHON)),,$(shell \
	$(PYTHON) -c 'import sys; print("python-%d.%d" % sys.version_info[:2])'))
VENV := .venv$(OTHER_PYTHON:%=-%)$(TORCH:%=-torch-%)
BIN := $(VENV)/bin
STAMPS := $(VENV)/stamps
CONSTRAINTS := $(or $(TORCH:%=$(STAMPS)/constraints.txt),constraints.txt)
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check \
	--constraint $(CONSTRAINTS)
# Workers share the cores: each computes in one thread. Tests start many processes, which
# need not compile the sources each.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_WAIT_POLICY=PASSIVE OMP_NUM_THREADS=1 $(BIN)/python -m pytest
# One worker more than cores: some wait for processes that they started.
WORKERS := $(shell cores=$$(getconf _NPROCESSORS_ONLN); echo $$((cores < 4 ? cores + 1 : 4)))
PARALLEL := --numprocesses $(WORKERS) --dist worksteal
SOURCES := $(wildcard src tests studies examples)

.DEFAULT_GOAL := help
.PHONY: help demo test check gpu sanitize build-sanitized wheel lint format docs clean
.PHONY: lint-format lint-style lint-types lint-layers lint-spelling
# A recipe that fails leaves no stamp behind.
.DELETE_ON_ERROR:

help: ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-8s %s\n", $$1, $$2}' Makefile

demo: $(STAMPS)/demo ## train two real models plainly and within a budget
	$(BIN)/python -m examples.demo $(DEMO_ARGS)

test: $(STAMPS)/dev ## run the tests; PYTEST_ARGS="-k name" is passed on, TORCH=2.15.0 is installed, THOROUGH=1 runs more cases
	$(PYTEST) $(PARALLEL) $(if $(THOROUGH),--thorough) $(PYTEST_ARGS)

# AREA names a folder or the beginning of files: solvers, test_units, cli/test_dev.
check: $(STAMPS)/dev ## run the tests that are not in tests/slow.txt; AREA=solvers for tests/solvers*
	$(PYTEST) $(PARALLEL) -m "not slow" \
		$(if $(AREA),$(or $(wildcard tests/$(AREA)*),$(error no tests/$(AREA)*))) \
		$(PYTEST_ARGS)

# With what is installed, and no network: no environment is set up for it. The build is
# part of the eight minutes.
gpu: ## try every claim on a GPU, in eight minutes, with the torch that is installed; GPU_ARGS="--device sim" elsewhere
	start=$$(date +%s); \
	export PATH="$$($(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("scripts"))'):$$PATH"; \
	cmake -S . -B build/gpu -G Ninja --log-level=WARNING \
		-D Python_EXECUTABLE="$$($(PYTHON) -c 'import sys; print(sys.executable)')" \
		-D nanobind_DIR="$$($(PYTHON) -m nanobind --cmake_dir)" && \
	cmake --build build/gpu && \
	REMAT_NATIVE="$$(ls $(CURDIR)/build/gpu/_core.*)" PYTHONPATH="src$${PYTHONPATH:+:$$PYTHONPATH}" \
		$(PYTHON) -m studies.gpu --limit $$((480 - $$(date +%s) + start)) $(GPU_ARGS)

sanitize: $(STAMPS)/dev build-sanitized ## run the native core's tests under the sanitizers
	@# Leaks are not looked for: the interpreter itself leaves some behind.
	REMAT_NATIVE="$$(ls $(CURDIR)/build/sanitize/_core.*)" ASAN_OPTIONS=detect_leaks=0 \
		LD_PRELOAD="$$($${CXX:-c++} -print-file-name=libasan.so) $$($${CXX:-c++} -print-file-name=libubsan.so)" \
		$(BIN)/python -m pytest tests/native $(PYTEST_ARGS)

build-sanitized: $(STAMPS)/native
	PATH="$(CURDIR)/$(BIN):$$PATH" cmake -S . -B build/sanitize -G Ninja --log-level=WARNING \
		-D REMAT_SANITIZE=ON -D Python_EXECUTABLE="$(CURDIR)/$(BIN)/python" \
		-D nanobind_DIR="$$($(BIN)/python -m nanobind --cmake_dir)"
	PATH="$(CURDIR)/$(BIN):$$PATH" cmake --build build/sanitize

# The wheel is built from the source distribution, which thereby proves complete, and by a
# compiler or not at all; then it is installed and tried where there is none.
wheel: $(STAMPS)/wheel ## build a wheel into dist, and try it in an empty environment without a compiler
	rm -rf dist
	REMAT_REQUIRE_NATIVE=1 PIP_CONSTRAINT="$(CURDIR)/constraints.txt" \
		$(BIN)/python -m build --outdir dist
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m studies.wheel dist

lint: lint-format lint-style lint-types lint-layers lint-spelling ## check format, style, types, layers, spelling

lint-format: $(STAMPS)/dev
	$(BIN)/ruff format --check $(SOURCES)

lint-style: $(STAMPS)/dev
	$(BIN)/ruff check $(SOURCES)

lint-types: $(STAMPS)/dev
	$(BIN)/pyright

lint-layers: $(STAMPS)/dev
	$(BIN)/lint-imports --no-logo

lint-spelling: $(STAMPS)/dev
	$(BIN)/codespell

format: $(STAMPS)/dev ## apply the formatter and the linter's safe fixes
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/ruff check --fix $(SOURCES)

docs: $(STAMPS)/docs ## build the documentation into build/site
	$(BIN)/mkdocs build --strict

clean: ## remove the environment, caches and everything built
	rm -rf .venv .venv-* build dist demo-output .pytest_cache .ruff_cache .hypothesis \
		.import_linter_cache
	find src tests studies examples -name __pycache__ -prune -exec rm -rf {} + \
		2>/dev/null || true

# One stamp per set of extras, remade when what they install may have changed. The
# version is tested first: pip's own message for an old python names no remedy.
$(STAMPS)/venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		$(PYTHON) --version; \
		echo "remat needs Python 3.11 or newer; try: make PYTHON=python3.12" >&2; \
		exit 1; }
	$(PYTHON) -m venv $(VENV)
	@mkdir -p $(STAMPS)
	@touch $@

$(STAMPS)/constraints.txt: constraints.txt | $(STAMPS)/venv
	sed 's/^torch==.*/torch==$(TORCH)/' $< > $@

# What the native core is built with, before there is anything else.
$(STAMPS)/native: $(CONSTRAINTS) | $(STAMPS)/venv
	$(PIP_INSTALL) cmake ninja nanobind
	@touch $@

# Of remat and its libraries, building a wheel needs none here.
$(STAMPS)/wheel: $(CONSTRAINTS) | $(STAMPS)/venv
	$(PIP_INSTALL) build
	@touch $@

$(STAMPS)/demo: EXTRAS := studies
$(STAMPS)/dev: EXTRAS := dev,studies
$(STAMPS)/docs: EXTRAS := docs
NATIVE := CMakeLists.txt $(wildcard src/remat/native/*.?pp)
$(STAMPS)/demo $(STAMPS)/dev $(STAMPS)/docs: pyproject.toml $(CONSTRAINTS) $(NATIVE) | $(STAMPS)/venv
	$(PIP_INSTALL) --editable ".[$(EXTRAS)]"
	@touch $@
