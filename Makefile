# `make` lists the targets. All of them work in a virtual environment, which is created if it is
# missing; PYTHON sets which Python it uses, 3.10 to 3.13.
PYTHON ?= python3
VENV ?= .venv
ARGS ?=

BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --constraint constraints.txt
NEEDS := $(VENV)/.made pyproject.toml constraints.txt
# TensorFlow with CUDA is a package of its own, and large: only a host with a GPU gets it.
HAS_GPU := $(firstword $(wildcard /dev/nvidiactl /dev/kfd /dev/dxg))
GPU_VENV ?= $(if $(HAS_GPU),.venv-gpu,$(VENV))

# pip does not prompt, and installs into the virtual environment whatever the user's settings are.
export PIP_NO_INPUT := 1
export PIP_USER := 0
# Many processes import the same modules: each is compiled once, also where this is set.
unexport PYTHONDONTWRITEBYTECODE

.DELETE_ON_ERROR:
.PHONY: help quickstart test test-gpu test-versions cluster chaos endurance bench docs lint clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' Makefile

quickstart: $(VENV)/.run ## install, and train a small network on two ranks (needs no data)
	$(BIN)/tarantella -n 2 --no-gpu -- examples/quickstart.py

test: $(VENV)/.dev ## install, and run the tests (ARGS="-k name": only these)
	$(BIN)/python tests/run.py $(ARGS)

test-gpu: ## the tests on GPUs, if there are any (ARGS="--device cpu": try them without)
	@$(MAKE) --no-print-directory VENV=$(GPU_VENV) $(GPU_VENV)/$(if $(HAS_GPU),.gpu,.dev)
	$(GPU_VENV)/bin/python tests/gpu/run.py $(ARGS)

test-versions: $(VENV)/.made ## run LeNet-5 and tests with other versions of TensorFlow and Keras (ARGS=--help)
	$(BIN)/python tests/versions/run.py $(ARGS)

cluster: $(VENV)/.dev ## open a shell on a small simulated cluster on this machine (ARGS=3: three hosts)
	$(BIN)/python tests/cluster/testbed.py $(ARGS)

chaos: $(VENV)/.dev ## train on two hosts, with a fault at a random time in each run (ARGS="--runs 100")
	$(BIN)/python tests/cluster/chaos.py $(ARGS)

endurance: $(VENV)/.dev ## train 20,000 steps on three ranks, and check that nothing grows
	$(BIN)/tarantella -n 3 --no-gpu -- tests/ranks/endurance.py $(ARGS)

bench: $(VENV)/.bench ## install, and run the benchmarks, on an otherwise idle machine (ARGS=--help)
	$(BIN)/python benchmarks/bench.py $(ARGS)

docs: $(VENV)/.docs ## build the documentation, in docs/_build/html
	$(BIN)/sphinx-build --fail-on-warning --keep-going -b html docs docs/_build/html

lint: $(VENV)/.dev ## check style (ruff), types (mypy) and layers (import-linter)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache --no-logo

clean: ## remove the virtual environment and everything built
	rm -rf .venv .venv-gpu benchmarks/.venv build dist docs/_build src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/.run: $(NEEDS)
	$(PIP_INSTALL) --no-build-isolation --editable '.[cpu,examples]'
	@touch $@

$(VENV)/.dev: $(NEEDS)
	$(PIP_INSTALL) --no-build-isolation --editable '.[cpu,dev]'
	@touch $@ $(VENV)/.run

$(VENV)/.gpu: $(NEEDS)
	$(PIP_INSTALL) --no-build-isolation --editable '.[gpu,dev]'
	@touch $@

$(VENV)/.bench: $(NEEDS)
	$(PIP_INSTALL) --no-build-isolation --editable '.[cpu,bench,examples]'
	@touch $@ $(VENV)/.run

$(VENV)/.docs: $(NEEDS)
	$(PIP_INSTALL) --no-build-isolation --editable '.[cpu,docs]'
	@touch $@

# Some systems ship Python's venv without pip: then the pip of $(PYTHON) installs one.
$(VENV)/.made: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' || \
	  { echo "Tarantella needs Python 3.10 to 3.13, but $(PYTHON) is not one of these:" \
	    "choose one, as in  make PYTHON=python3.12 $(or $(MAKECMDGOALS),quickstart)"; exit 1; } >&2
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV) || \
	  { $(PYTHON) -m venv --clear --without-pip $(VENV) && PYTHONPATH="$$($(PYTHON) -c \
	    'import pathlib, pip; print(pathlib.Path(pip.__file__).parents[1])')" \
	    $(BIN)/python -m pip install --ignore-installed pip; }
	$(PIP_INSTALL) setuptools
	@touch $@
