# Everything a newcomer or a developer types. All that is needed beforehand: Python 3.11 or newer, and make.
#
#   PYTHON   the interpreter that .venv is made from          make env PYTHON=python3.12
#   LOCK     the list of pinned packages; chosen by itself    make test LOCK=requirements/cpu.txt
#   SEED     the seed of `make demo`
#   TORCH_INDEX  where the CPU build of torch is taken from, should pip's own index give one that does not load

PYTHON ?= python3
SEED ?= 1
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
PYTEST_ARGS ?=

NUM_GPUS := $(shell nvidia-smi -L 2>/dev/null | grep -c '^GPU ')
LOCK ?= requirements/$(if $(filter-out 0,$(NUM_GPUS)),gpu,cpu).txt

VENV := .venv
BIN := $(VENV)/bin
# One stamp per lock, so that another lock, or the same one changed, makes the environment anew.
PACKAGES := $(VENV)/.installed-$(basename $(notdir $(LOCK)))
PROJECT := $(VENV)/.installed-project

PIP_INSTALL := $(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check --no-deps

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help env demo test test-all lint format clean

help:
	@echo "make demo     train a tiny model with GRPO here (SEED=$(SEED)); no GPU needed"
	@echo "make test     lint, then the tests (without a GPU, without the slow runs: about 20 minutes on two cores)"
	@echo "make test-all the slow runs too"
	@echo "make lint     ruff, mypy and the import contracts"
	@echo "make format   let ruff rewrite what it can"
	@echo "make env      only the environment: .venv from $(LOCK)"
	@echo "make clean    remove .venv, caches and build outputs (runs/ stays)"

env: $(PROJECT)

$(PACKAGES): $(LOCK)
	@command -v "$(PYTHON)" >/dev/null 2>&1 || { \
	  echo "There is no '$(PYTHON)' here. Install Python 3.11 or newer, or name it: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "colocate_rl needs Python 3.11 or newer; '$(PYTHON)' is $$("$(PYTHON)" -V 2>&1). Name a newer one: make $(MAKECMDGOALS) PYTHON=python3.11" >&2; exit 1; }
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "'$(PYTHON)' cannot make virtual environments (no venv or ensurepip). On Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@test "$$(uname -sm)" = "Linux x86_64" || \
	  echo "Note: $(LOCK) was made for Linux x86_64; this is $$(uname -sm), where some pins may have no wheel." >&2
	@echo "Installing $$(grep -c '==' $(LOCK)) pinned packages from $(LOCK) into $(VENV): once, about two minutes ..."
	@"$(PYTHON)" -m venv --clear $(VENV)
	@$(PIP_INSTALL) -r $(LOCK) || { \
	  echo "pip could not install $(LOCK) (its own message is above). If a wheel was not found, try another Python:" >&2; \
	  echo "the lock is known to install with 3.11; this one is $$("$(PYTHON)" -V 2>&1)." >&2; exit 1; }
	@$(BIN)/python -c 'import torch' 2>/dev/null || test "$(notdir $(LOCK))" != cpu.txt || { \
	  echo "The torch that pip found does not load here; taking the CPU build from $(TORCH_INDEX) ..."; \
	  $(PIP_INSTALL) --force-reinstall --index-url $(TORCH_INDEX) $$(grep '^torch==' $(LOCK)) || true; }
	@$(BIN)/python -c 'import torch' || { \
	  echo "torch was installed but does not load. With requirements/cpu.txt pip must find the CPU build of torch" >&2; \
	  echo "(2.13.0+cpu): see the head of that file." >&2; exit 1; }
	@touch $@

$(PROJECT): $(PACKAGES) pyproject.toml
	@$(PIP_INSTALL) --no-build-isolation --editable .
	@touch $@

demo: env
	@$(BIN)/python -m examples.addition.demo --seed $(SEED)

lint: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

# Tests of one process run side by side, one on each core; those that start ranks and engines need the cores themselves.
# pytest comes last: its closing line is the last line of the output.
test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/unit --numprocesses logical --quiet $(PYTEST_ARGS)
	$(BIN)/python -m pytest --ignore tests/unit -m "not gpu and not slow" $(PYTEST_ARGS)

# Also the long runs with engines (marker `slow`), which repeat with more settings what the shorter ones show.
test-all: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/unit --numprocesses logical --quiet $(PYTEST_ARGS)
	$(BIN)/python -m pytest --ignore tests/unit $(PYTEST_ARGS)

format: env
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
