# Each target does all of its set-up: a virtual environment in .venv, with pinned versions.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --constraint constraints.txt
export NO_MKDOCS_2_WARNING := 1

.PHONY: demo test lint docs clean

demo: .venv/.installed-demo
	$(BIN)/python -m whence.demo

test: lint
	$(BIN)/python -m pytest --numprocesses 2
	$(BIN)/mkdocs build --strict

lint: .venv/.installed-test
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy --strict

docs: .venv/.installed-docs
	$(BIN)/mkdocs build --strict

clean:
	rm -rf .venv site dist .mypy_cache .pytest_cache .ruff_cache .hypothesis

# One stamp per set of extras, so that a second call installs nothing.
.venv/.installed-%: pyproject.toml constraints.txt peers.txt | $(BIN)/python
	$(PIP) --editable '.[$*]'
	$(if $(filter test,$*),$(PIP) --no-deps --requirement peers.txt)
	touch $@

$(BIN)/python:
	$(PYTHON) -m venv .venv
