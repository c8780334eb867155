# `make demo` and `make test` do all the set-up: they need Python 3.11 or newer, pip and make.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/installed

# hundreds of processes begin in the tests: each sooner if it finds what others compiled
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test lint clean

demo: $(INSTALLED)
	$(BIN)/fedgen train experiment=demo

test: $(INSTALLED) lint
	# three, on any number of cores: many tests wait for processes of their own
	$(BIN)/python -m pytest -n 3 --dist worksteal
	$(BIN)/python scripts/mutants.py --tests-passed

lint: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check --quiet
	$(BIN)/mypy
	$(BIN)/lint-imports

# --without-pip and --python: Debian keeps ensurepip in a package of its own
$(INSTALLED): pyproject.toml
	$(PYTHON) -m venv --without-pip .venv
	$(PYTHON) -m pip --python $(BIN)/python install --editable ".[dev]"
	touch $(INSTALLED)

clean:
	rm -rf .venv build dist *.egg-info runs
