# make demo: see it work.  make test: prove it works.  make lint: style, types, structure.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test lint bench clean

.venv/bin/python:
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"

# One stamp per set of packages, so that a second call installs nothing.
.venv/.demo: .venv/bin/python pyproject.toml
	$(BIN)/python -m pip install --quiet -e ".[demo]"
	touch $@

.venv/.test: .venv/bin/python pyproject.toml
	$(BIN)/python -m pip install --quiet -e ".[demo]" --group test
	touch $@ .venv/.demo

.venv/.lint: .venv/bin/python pyproject.toml
	$(BIN)/python -m pip install --quiet -e . --group lint --group test
	touch $@

demo: .venv/.demo
	$(BIN)/edge-eval demo

test: .venv/.test
	$(BIN)/python -m pytest

# Our own parts, then every installed peer, on the demo's model; more rows: DATA=FILE.csv LIMIT=200.
DATA ?= sample
LIMIT ?= 100
bench: .venv/.demo
	$(BIN)/python benchmarks/parts.py --model edge-eval-demo/gemma-3-270m --data $(DATA) --limit $(LIMIT)
	$(BIN)/python benchmarks/peers.py --data $(DATA) --limit $(LIMIT)

lint: .venv/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:
	rm -rf .venv edge-eval-demo runs
