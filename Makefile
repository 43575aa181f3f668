# Each target makes .venv first if it is missing or older than its pins; a second call starts at once.
PYTHON ?= $(firstword $(shell command -v python3.11) python3)
BIN := .venv/bin
WORKERS ?= auto

.PHONY: demo test lint types wheel clean

demo: .venv/installed
	$(BIN)/looplab audit text-2x4-fixed --out demo-out

test: .venv/installed
	$(BIN)/python -m pytest -n $(WORKERS)

lint: .venv/installed
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: .venv/installed
	$(BIN)/mypy

wheel: .venv/installed
	$(BIN)/python -m build --wheel --no-isolation

clean:
	rm -rf .venv build dist demo-out .pytest_cache .ruff_cache .mypy_cache .hypothesis

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	touch $@
