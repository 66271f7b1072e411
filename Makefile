# make demo: see it work.  make test: prove it works.  make lint: style, types, structure.
# make test-lowest: prove it on the oldest packages that pyproject.toml allows;
# make test-lowest-run: the same for what a run needs, without torch, in minutes.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-lowest test-lowest-run lint bench clean

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

.venv-lowest/.test: pyproject.toml tests/lowest.py
	$(PYTHON) -m venv .venv-lowest
	.venv-lowest/bin/python -m pip install --quiet --upgrade "pip>=25.1"
	.venv-lowest/bin/python tests/lowest.py > .venv-lowest/lowest.txt
	.venv-lowest/bin/python -m pip install --quiet -e ".[export,report]" --group test \
		-c .venv-lowest/lowest.txt
	touch $@

# A model that was exported runs without torch, so the exports come from the newest packages.
.venv-lowest-run/.test: pyproject.toml tests/lowest.py
	$(PYTHON) -m venv .venv-lowest-run
	.venv-lowest-run/bin/python tests/lowest.py --for-runs > .venv-lowest-run/lowest.txt
	.venv-lowest-run/bin/python -m pip install --quiet --no-compile \
		-e . -r .venv-lowest-run/lowest.txt
	touch $@

demo: .venv/.demo
	$(BIN)/edge-eval demo

test: .venv/.test
	$(BIN)/python -m pytest

# Our own parts, then every installed peer, on the demo's model; more rows: DATA=FILE.csv LIMIT=200.
DATA ?= sample
LIMIT ?= 100
edge-eval-demo/gemma-3-270m: | .venv/.demo
	$(BIN)/edge-eval demo

bench: .venv/.demo edge-eval-demo/gemma-3-270m
	$(BIN)/python benchmarks/parts.py --model edge-eval-demo/gemma-3-270m --data $(DATA) --limit $(LIMIT)
	$(BIN)/python benchmarks/peers.py --data $(DATA) --limit $(LIMIT)

# Without the tests of the page in a browser, and of speed.
test-lowest: .venv-lowest/.test
	.venv-lowest/bin/python -m pytest --ignore tests/test_bench.py -k "not open_page"

# The road from a row to a number; what needs torch is skipped.
RUN := questions prompts tokenization tokenizer_file model_dir model onnx_file onnx_folder scoring \
	generated prefixes streams evaluate run_record metrics compare rescore summary environment
test-lowest-run: .venv/.test .venv-lowest-run/.test
	rm -rf .venv-lowest-run/models
	EDGE_EVAL_TEST_MODELS=.venv-lowest-run/models $(BIN)/python -m pytest -q tests/test_tiny_models.py
	EDGE_EVAL_TEST_MODELS=.venv-lowest-run/models .venv-lowest-run/bin/python -m pytest -q -rfE \
		$(RUN:%=tests/test_%.py)

lint: .venv/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:
	rm -rf .venv .venv-lowest .venv-lowest-run edge-eval-demo runs
