PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export OMP_NUM_THREADS := 1
QUICK := $(addprefix tests/,config core data losses methods models) $(wildcard tests/test_[adp]*.py)

.PHONY: demo test quick lint layers types unit slow slow-tests long-fuzz gpu clean

demo: $(VENV)/.user
	$(BIN)/fedloom compare demo
	@echo "look at it: source $(BIN)/activate, then: fedloom report RUN_FOLDER"

# About 4 minutes on 2 idle cores. Types are checked beside the tests: mypy uses one core.
test: lint
	$(MAKE) --no-print-directory --jobs 2 unit layers types

# The tests without whole experiments, for while you edit: under a minute.
quick: lint
	$(BIN)/pytest -n 2 --dist loadgroup -m "not slow and not full" $(QUICK)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

layers: $(VENV)/.dev
	$(BIN)/lint-imports

types: $(VENV)/.dev
	$(BIN)/mypy

unit: $(VENV)/.dev
	$(BIN)/pytest -n 2 --dist loadgroup

# What takes minutes: cases marked `slow` (soaks, Flower, Ray, all combinations) and long fuzzing.
# Notebooks and the build of the docs belong here too, as further prerequisites.
slow: slow-tests long-fuzz

slow-tests: $(VENV)/.dev
	$(BIN)/pytest -n 2 --dist loadgroup -m slow

long-fuzz: $(VENV)/.dev
	$(BIN)/python -m benchmarks.fuzz --inputs 50000

# Tests and benchmarks that need a GPU; results in benchmarks/results. Continues where it stopped: make gpu GPU="--time 560"
gpu: $(VENV)/.dev
	$(BIN)/python -m benchmarks.gpu_suite $(GPU)

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.user: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .
	touch $@

$(VENV)/.dev: $(VENV)/.user
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache
