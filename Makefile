# One target per task; CI runs the same targets.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# One BLAS/OpenMP thread: two spinning pools on two loaded cores are an order of magnitude slower.
export OMP_NUM_THREADS ?= 1
export PYTHONHASHSEED  ?= 0

.DEFAULT_GOAL := help
.PHONY: help setup browser demo demo-cartpole test test-slow test-kubernetes check fmt bench bench-async bench-ui bench-runs soak screenshots docs clean

help:           ## this list
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(VENV)/.ready   ## virtual environment with pinned dependencies

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt torch==2.13.0
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

browser: setup  ## a Chromium for UI sessions, if this machine has none (installs one only as root on Debian)
	@$(BIN)/python -c 'from palaestra.sessions.chromium import find_chromium as f; f()' 2>/dev/null \
	  || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null \
	       && apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium-headless-shell >/dev/null; } \
	  || echo "No Chromium here: tests of UI sessions are skipped. See docs/sessions.md."

demo: setup browser ## a tiny vision-language model learns to click in real browsers; before and after, on held-out seeds
	$(BIN)/python -m palaestra demo

demo-cartpole: setup    ## train CartPole to solved in seconds and compare before with after
	$(BIN)/python -m palaestra demo cartpole

test: setup check browser   ## every fast check and test
	$(BIN)/python tests/run_suite.py

test-slow: setup    ## learning curves and other minutes-long tests
	$(BIN)/pytest -m slow --hypothesis-profile default -q

test-kubernetes: setup  ## pods on the cluster of $KUBECONFIG, else on an API server built from Debian's sources
	$(BIN)/pytest -m kubernetes -q tests/kubernetes

check: setup    ## format, lint, types, import direction
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

fmt: setup      ## format the code and fix lint findings
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: setup    ## training speed compared with other libraries, as ratios
	$(BIN)/python -m benchmarks.speed

bench-async: setup  ## asynchronous collection: speed, learning quality and robustness (hours)
	$(BIN)/python -m benchmarks.overlap
	$(BIN)/python -m benchmarks.staleness
	$(BIN)/python -m benchmarks.staleness --slow
	$(BIN)/python -m benchmarks.soak

bench-ui: setup browser  ## learning on screens: three algorithms, asynchronous training, batched inference (an hour)
	$(BIN)/python -m benchmarks.ui_inference
	$(BIN)/python -m benchmarks.ui_learning
	$(BIN)/python -m benchmarks.ui_async

bench-runs: setup   ## the run service under load: latency, ten million points, ten thousand runs
	$(BIN)/python -m benchmarks.run_service

soak: setup browser ## 5,000 episodes of UI sessions while browsers and servers are killed (half an hour)
	$(BIN)/python -m benchmarks.session_soak

screenshots: setup  ## images of the terminal output for docs/
	$(BIN)/python -m benchmarks.screenshots

docs: setup     ## regenerate the pages of docs/ that come from code
	$(BIN)/python -m benchmarks.reference
	$(BIN)/python -m benchmarks.api_reference

clean:          ## remove the virtual environment and caches
	rm -rf $(VENV) .venv-* .mypy_cache .ruff_cache .pytest_cache .cache build dist
