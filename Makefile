# Everything sets itself up: `make demo` and `make test` need only Python >= 3.10, git and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test check bench test-slow clean

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip setuptools
	$(BIN)/python -m pip install -q -c constraints.txt torch
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev,train,viz,examples]'
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/promoe demo

test: $(STAMP)
	$(BIN)/python -m pytest

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m slow

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(STAMP)
	$(BIN)/python benchmarks/scheduler.py
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/memory.py --equal-cache 256MiB
	$(BIN)/python benchmarks/decode.py
	$(BIN)/python benchmarks/predict_latency.py

clean:
	rm -rf $(VENV) build dist *.egg-info
