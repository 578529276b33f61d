# Everything sets itself up: `make demo` and `make test` need only Python >= 3.10, git and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# The two ends of the range of transformers in pyproject.toml, each in an environment of its own.
OLDEST := $(VENV)-oldest/.installed
NEWEST := $(VENV)-newest/.installed

.PHONY: demo test check package bench fuzz soak notebooks test-slow test-ray test-matrix test-oldest test-newest clean

# What an environment changes in constraints.txt, as a sed script; the newest is the newest of when it is set up.
$(OLDEST): CHANGE = s/^transformers==.*/transformers==$(shell sed -n 's/.*"transformers>=\([^,]*\),.*/\1/p' pyproject.toml)/
$(NEWEST): CHANGE = /^transformers==/d

$(STAMP) $(OLDEST) $(NEWEST): pyproject.toml constraints.txt
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	sed '$(CHANGE)' constraints.txt >$(@D)/constraints.txt
	$(@D)/bin/python -m pip install -q --upgrade pip setuptools
	$(@D)/bin/python -m pip install -q -c $(@D)/constraints.txt torch
	$(@D)/bin/python -m pip install -q -c $(@D)/constraints.txt --upgrade -e '.[dev,train,viz,examples]' transformers
	touch $@

demo: $(STAMP)
	$(BIN)/promoe demo

# One process per core; a file's tests share the models that they make.
PYTEST := -m pytest -n auto --dist loadfile

test: $(STAMP)
	$(BIN)/python $(PYTEST)

# The wheel and the source distribution: built, installed and used outside of the checkout.
package: $(STAMP)
	$(BIN)/python -m pytest -m slow tests/test_distribution.py

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m slow

# Several models on a local cluster of two nodes.
test-ray: $(STAMP)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[ray]'
	$(BIN)/python -m pytest -m ray

# More than 100,000 damaged and hostile inputs; says how many each target took.
fuzz: $(STAMP)
	OMP_NUM_THREADS=1 PROMOE_FUZZ_EXAMPLES=36 $(BIN)/python -m pytest tests/fuzz

# Half an hour of mixed requests with faults.
soak: $(STAMP)
	$(BIN)/python benchmarks/soak.py

# All of them, or some: make notebooks NUMBERS="01 03"
notebooks: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python examples/execute.py $(NUMBERS)

# The suite with both; `make -k test-matrix` also runs the second where the first fails.
test-matrix: test-oldest test-newest

test-oldest test-newest: test-%: $(VENV)-%/.installed
	$(VENV)-$*/bin/python -m pip freeze | grep -E '^(transformers|torch|huggingface_hub)=='
	$(VENV)-$*/bin/python $(PYTEST)

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The figures that people ask for first; docs/benchmarks.md has all, each with its command.
bench: $(STAMP)
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/memory.py --equal-cache 256MiB
	$(BIN)/python benchmarks/decode.py
	$(BIN)/promoe bench --pairs 3 --seconds-per-answer 8
	$(BIN)/python benchmarks/predict_latency.py

clean:
	rm -rf $(VENV) $(VENV)-oldest $(VENV)-newest build dist *.egg-info
