# One target per task; CI runs the same targets.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# One BLAS/OpenMP thread: two spinning pools on two loaded cores are an order of magnitude slower.
export OMP_NUM_THREADS ?= 1
export PYTHONHASHSEED  ?= 0
QT_LIBRARIES := libegl1 libgl1 libx11-6 libxkbcommon0 libfontconfig1 libfreetype6 libglib2.0-0 libdbus-1-3 fonts-dejavu-core

.DEFAULT_GOAL := help
.PHONY: help setup browser desktop sshd demo demo-cartpole test test-wheel test-slow test-kubernetes test-vllm check fmt bench bench-cores bench-async bench-ui bench-runs bench-studio bench-offline soak load screenshots docs site clean

help:           ## list the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(VENV)/.ready   ## create the virtual environment with pinned dependencies

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	@echo "Installing torch into $(VENV) (1 to 5 minutes) …"
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt torch==2.13.0
	@echo "Installing Palaestra and its other dependencies into $(VENV) (1 to 3 minutes) …"
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

browser: setup  ## find Chromium for UI sessions, or install it (as root on Debian)
	@$(BIN)/python -c 'from palaestra.sessions.browser.chromium import find_chromium as f; print(f().path)' 2>/dev/null \
	  || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null \
	       && apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium-headless-shell >/dev/null \
	       && command -v chromium-headless-shell; } \
	  || echo "No Chromium here: tests of UI sessions are skipped. See docs/sessions.md."

desktop: setup  ## check that Qt can be loaded, or install its libraries (as root on Debian)
	@$(BIN)/python -c 'import PySide6.QtSvg, PySide6.QtWidgets' 2>/dev/null \
	  || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null \
	       && apt-get update -qq && apt-get install -y -qq --no-install-recommends $(QT_LIBRARIES) >/dev/null; } \
	  || echo "Qt cannot be loaded here: tests of the studio fail. See docs/studio.md."

sshd:           ## find OpenSSH's server for tests of runs on other machines, or install it (as root on Debian)
	@command -v sshd >/dev/null || [ -x /usr/sbin/sshd ] \
	  || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null \
	       && apt-get update -qq && apt-get install -y -qq --no-install-recommends openssh-server openssh-client >/dev/null; } \
	  || echo "No sshd here: tests of runs over SSH are skipped. See docs/remote-runs.md."

demo: setup browser ## train a tiny vision-language model to fill in forms in real browsers, and evaluate it
	$(BIN)/python -m palaestra demo

demo-cartpole: setup    ## train CartPole in seconds, and evaluate it
	$(BIN)/python -m palaestra demo cartpole

test: setup check browser desktop sshd   ## run all checks and fast tests
	$(BIN)/python tests/run_suite.py

test-wheel: setup browser  ## install the wheel outside the checkout, without and with extras, and run every command (minutes)
	$(BIN)/python -m tests.smoke.installed_wheel

test-slow: setup    ## run learning curves and other tests that take minutes
	$(BIN)/pytest -m slow --hypothesis-profile default -q

test-kubernetes: setup  ## test pods on the cluster of $KUBECONFIG, or on a local API server
	$(BIN)/pytest -m kubernetes -q tests/kubernetes

test-vllm: setup  ## test sampling with the vLLM of $PALAESTRA_VLLM_PYTHON, or of $PALAESTRA_VLLM_URL
	$(BIN)/pytest -m vllm -q tests/vllm

check: setup    ## check format, lint, types and import direction
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

fmt: setup      ## format the code and fix lint findings
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: setup    ## compare the training speed with other libraries
	$(BIN)/python -m benchmarks.speed

bench-cores: setup  ## benchmark training on two cores beside one and beside the environment alone (12 minutes)
	$(BIN)/python -m benchmarks.two_cores

bench-async: setup  ## benchmark asynchronous collection: speed, learning quality and robustness (hours)
	$(BIN)/python -m benchmarks.overlap
	$(BIN)/python -m benchmarks.staleness
	$(BIN)/python -m benchmarks.staleness --slow
	$(BIN)/python -m benchmarks.soak

bench-ui: setup browser  ## benchmark UI agents: algorithms, forms, asynchronous training, batched inference, SMOLLM2=directory (hours)
	$(BIN)/python -m benchmarks.ui_inference
	$(BIN)/python -m benchmarks.ui_learning
	$(BIN)/python -m benchmarks.ui_acting
	$(BIN)/python -m benchmarks.ui_forms --config configs/ui/multi_step.yaml --demonstrations 0 --warm-start 0 --updates 12 \
	  --episodes 40 --held-out 500000 --algorithms grpo,rejection_sampling,ppo --seeds 1..3 --sampled
	$(BIN)/palaestra tiny-vlm make --model tiny-reader --tower tiny-reader --steps 500 --output var/short-reader
	$(BIN)/python -m benchmarks.ui_forms --config configs/ui/data_entry.yaml --model var/short-reader --demonstrations 16 \
	  --warm-start 6 --updates 80 --algorithms rejection_sampling --episodes 60 --held-out 3000000 --sampled
	$(BIN)/python -m benchmarks.ui_forms --demonstrations 60 --warm-start 100 --warm-start-rate 3e-4 --updates 48 \
	  --algorithms rejection_sampling --episodes 60 --held-out 2000000 --sampled
	$(BIN)/python -m benchmarks.ui_forms --config configs/ui/miniwob.yaml --demonstrations 0 --warm-start 0 --updates 48 \
	  --episodes 60 --held-out 400000 --algorithms grpo,rejection_sampling --sampled
	$(BIN)/python -m benchmarks.ui_async
	[ -z "$(SMOLLM2)" ] || $(BIN)/python -m benchmarks.ui_smollm2 --model $(SMOLLM2)

bench-runs: setup   ## benchmark the run service under load
	$(BIN)/python -m benchmarks.run_service

bench-studio: setup desktop  ## benchmark the desktop studio: frames, reaction, start, memory (half an hour)
	$(BIN)/python -m benchmarks.studio

bench-offline: SEEDS = 11 12 13 14 15 16 17 18 19 20
bench-offline: setup  ## compare learning from data and plans with CORL (checkout in PALAESTRA_CORL) and SB3 (hours)
	$(BIN)/python -m benchmarks.medium_datasets
	$(BIN)/python -m benchmarks.offline --checkout $(PALAESTRA_CORL) --updates 3000 --episodes 10 \
	  --datasets pendulum/medium-v0 lander/medium-v0 halfcheetah/medium-v0
	$(BIN)/python -m benchmarks.off_policy --workloads cartpole --seeds $(SEEDS)
	$(BIN)/python -m benchmarks.off_policy --workloads pendulum --steps 5000 --seeds $(SEEDS)
	$(BIN)/python -m benchmarks.off_policy --workloads lunarlander --steps 50000 --seeds $(SEEDS)
	$(BIN)/python -m benchmarks.off_policy --workloads halfcheetah --steps 15000 --seeds $(SEEDS)
	$(BIN)/python -m benchmarks.bdi

soak: setup browser ## play 5,000 UI episodes while killing browsers and servers (half an hour)
	$(BIN)/python -m benchmarks.session_soak

load: setup browser  ## 256 sessions, 32 actors and a learner for 15 minutes, restarts, and the throughput of 1 to 128 actors
	$(BIN)/python -m benchmarks.load_scaling
	$(BIN)/python -m benchmarks.load
	$(BIN)/python -m benchmarks.load --minutes 3 --runtime servers --restart-gateway-every 30
	$(BIN)/python -m benchmarks.load --minutes 3 --runtime local --restart-gateway-every 30
	$(BIN)/python -m benchmarks.load --minutes 3 --runtime servers --gateways 2

screenshots: setup browser desktop  ## draw the terminal output and every state of the studio for docs/
	$(BIN)/python -m benchmarks.screenshots
	$(BIN)/python -m benchmarks.studio_pictures
	$(BIN)/python -m benchmarks.demo_pictures

docs: setup     ## regenerate the pages of docs/ that come from code
	$(BIN)/python -m benchmarks.reference
	$(BIN)/python -m benchmarks.api_reference
	$(BIN)/python -m benchmarks.python_reference

site: setup     ## build the pages as a site with search, into build/site
	@echo "Installing the tools of the site into $(VENV) …"
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo "Built $(CURDIR)/build/site/index.html"

clean:          ## remove the virtual environment and caches
	rm -rf $(VENV) .venv-* .mypy_cache .ruff_cache .pytest_cache .cache build dist
