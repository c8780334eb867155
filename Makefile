# `make demo` and `make test` do all the set-up: they need Python 3.11 or newer, pip and make.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/installed

# hundreds of processes start in the tests: sooner with byte code that others wrote
unexport PYTHONDONTWRITEBYTECODE
# files of tests in memory if it has room: they are flushed and deleted thousands of times
SHM_KB := $(shell df --output=avail -k /dev/shm 2>/dev/null | tail -1)
ifeq ($(shell [ "0$(SHM_KB)" -gt 8000000 ] && echo yes),yes)
export PYTEST_DEBUG_TEMPROOT := /dev/shm
endif

.PHONY: demo check test mutants lint docs clean

demo: $(INSTALLED)
	$(BIN)/fedgen train experiment=demo

# in minutes: what can be seen without whole runs
check: lint
	$(BIN)/python -m pytest -n 2 -m "not slow" tests/privacy tests/models tests/losses tests/data

test: $(INSTALLED)
	$(MAKE) --no-print-directory --jobs 2 lint docs
	# four workers on any number of cores: many tests wait for child processes
	$(BIN)/python -m pytest -n 4 --dist worksteal
	$(BIN)/python scripts/mutants.py --tests-passed --share 4

mutants: $(INSTALLED)
	$(BIN)/python scripts/mutants.py

lint: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check --quiet
	$(BIN)/mypy
	$(BIN)/lint-imports

# strict: a link to nowhere is an error
docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --clean

# --without-pip and --python: Debian keeps ensurepip in a package of its own
# --no-compile: of 20,000 files few are ever used, and these are compiled then
$(INSTALLED): pyproject.toml
	$(PYTHON) -m venv --without-pip .venv
	$(PYTHON) -m pip --python $(BIN)/python install --no-compile --editable ".[dev]"
	touch $(INSTALLED)

clean:
	rm -rf .venv build dist site *.egg-info runs
