# `make run`: from nothing to a verdict. `make test`: from nothing to passing tests. Both create .venv on the way.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The operators' tests run on PyTorch and Triton (of torch 2.13; its CPU build comes without); `make test TORCH=` leaves
# them out, and they skip.
TORCH ?= torch==2.13.0 triton==3.7.1
BASE ?= cuda==12.9
CANDIDATE ?= cuda==13.2
export UV_PROJECT_ENVIRONMENT := $(VENV)

run: $(BIN)/.installed
	$(BIN)/brakecheck compare $(BASE) $(CANDIDATE) --report brakecheck-report.html || [ $$? -le 3 ]

test: $(BIN)/.tested
	$(BIN)/ruff check brakecheck tests benchmarks
	$(BIN)/mypy
	$(BIN)/pytest -n auto

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "brakecheck needs Python 3.10 or newer; set PYTHON=python3.x")'
	$(PYTHON) -m venv $(VENV)

$(BIN)/.installed: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	touch $@

$(BIN)/.tested: pyproject.toml Makefile | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]' $(TORCH)
	touch $@ $(BIN)/.installed

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache

.PHONY: run test clean
