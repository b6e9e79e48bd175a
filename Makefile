# Each target does all of its set-up: a virtual environment in .venv, with pinned versions.
#   make test PYTHON=python3.12    with another Python (3.11.5 or later)
#   make test TORCH=2.7.1          with another PyTorch than the pinned one
# Both choose what a new .venv is made of: run `make clean` before you change them.
PYTHON ?= python3
BIN := .venv/bin
CONSTRAINTS := constraints.txt
ifdef TORCH
CONSTRAINTS := .venv/constraints.txt
endif
PIP := $(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS)
PYTEST := $(BIN)/python -m pytest --numprocesses 2
export NO_MKDOCS_2_WARNING := 1

.PHONY: demo test unit lint docs coverage hooks clean

demo: .venv/.installed-demo
	$(BIN)/python -m whence.demo

# What a change must pass.
test: lint unit
	$(BIN)/mkdocs build --strict

unit: .venv/.installed-test
	$(PYTEST)

lint: .venv/.installed-test
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy --strict

docs: .venv/.installed-docs
	$(BIN)/mkdocs build --strict

# The tests again, slower, with a table of the lines that they did not run.
coverage: .venv/.installed-test
	$(PYTEST) --cov --cov-report=term-missing:skip-covered

# Checks before each commit: .pre-commit-config.yaml.
hooks: .venv/.installed-test
	$(PIP) pre-commit pre-commit-hooks
	$(BIN)/pre-commit install

clean:
	rm -rf .venv site dist .coverage* .mypy_cache .pytest_cache .ruff_cache .hypothesis

# One stamp per set of extras, so that a second call installs nothing.
.venv/.installed-%: pyproject.toml constraints.txt peers.txt | $(BIN)/python
	$(if $(TORCH),sed 's/^torch==.*/torch==$(TORCH)/' constraints.txt > $(CONSTRAINTS))
	$(PIP) --editable '.[$*]'
	$(if $(filter test,$*),$(PIP) --no-deps --requirement peers.txt)
	touch $@

$(BIN)/python:
	$(PYTHON) -m venv .venv
