# Each target makes .venv first if it is missing or older than its pins; a second call starts at once.
PYTHON ?= $(firstword $(shell command -v python3.11) python3)
BIN := .venv/bin
WORKERS ?= auto
# Enough documents for intervals without a warning; an audit with the defaults takes a few minutes.
DEMO := --documents 100 --calibration-documents 50 --affine-tokens 3000

.PHONY: demo test lint types wheel clean

demo: .venv/installed
	$(BIN)/looplab audit text-2x4-sampled $(DEMO) --control none --controls none --grid 1,2,4,8 --quiet --out demo-out/sampled
	$(BIN)/looplab audit par-indexed --task state_tracking --difficulty 8 $(DEMO) --controls none --grid 1,2,4,8 --brief --out demo-out/par
	$(BIN)/looplab audit text-2x4-fixed $(DEMO) --controls suffix --beside demo-out/sampled --out demo-out/fixed

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
