PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export OMP_NUM_THREADS := 1
QUICK := $(addprefix tests/,config core data losses methods models) $(wildcard tests/test_[adp]*.py)

.PHONY: demo test quick lint layers types unit slow slow-tests long-fuzz gpu catalogue costs lock clean

demo: $(VENV)/.user
	$(BIN)/fedloom compare demo

# About 5 minutes on 2 idle cores. Types are checked beside the tests: mypy uses one core.
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

# What takes minutes: cases marked `slow` (soaks, Flower, Ray, notebooks, the docs site) and long fuzzing.
slow: slow-tests long-fuzz

slow-tests: $(VENV)/.dev
	$(BIN)/pytest -n 2 --dist loadgroup -m slow

long-fuzz: $(VENV)/.dev
	$(BIN)/python -m benchmarks.fuzz --inputs 50000

# Tests and benchmarks that need a GPU; results in benchmarks/results. Continues where it stopped: make gpu GPU="--time 560"
gpu: $(VENV)/.dev
	$(BIN)/python -m benchmarks.gpu_suite $(GPU)

# Names and summaries that the command line lists without importing torch: after a change of methods or datasets,
# or a new network, engine or partition
catalogue: $(VENV)/.user
	$(BIN)/python -m fedloom.cli.catalogue

costs: $(VENV)/.user
	$(BIN)/python -m fedloom.studies.workload

# Pins every package that `make` installs, with its dependencies, for Python 3.11 to 3.13
lock: $(VENV)/.user
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/uv pip compile pyproject.toml --universal --python-version 3.11 --all-extras --constraints constraints.in \
	  --no-annotate --quiet --custom-compile-command "make lock" --output-file constraints.txt

.PHONY: docs
# The documentation site in build/site. Warnings, such as broken links, are errors.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "read it: python3 -m http.server --directory build/site"

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.user: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .
	touch $@

$(VENV)/.dev: $(VENV)/.user
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

$(VENV)/.docs: $(VENV)/.user
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[docs]"
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache
