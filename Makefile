# make demo     install, serve the demo pack, ask it a question, keep serving    (PORT=8000)
# make test     install with test extras, then lint, types, import rules, all CPU tests    (WORKERS=2)
# make soak     many clients at once, for four minutes; prints its figures
# make test-clients   real clients (SDKs, agents, lm-eval), each in an environment of its own; the
#                first time takes minutes and 3 GB under build/    (CLIENTS="litellm opencode")
# make lint format clean
#
# TORCH=cuda takes the CUDA build of torch that pip finds; the default pins the CPU build.

PYTHON ?= python3
PORT ?= 8000
TORCH ?= cpu
WORKERS ?= 2
PYTEST_ARGS ?=

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c

VENV := .venv
BIN := $(VENV)/bin
CONSTRAINTS := $(if $(filter cuda,$(TORCH)),,-c constraints-cpu.txt)
PIP := $(BIN)/python -m pip --disable-pip-version-check install --progress-bar off
# One line a package instead of a screen; pip's errors and warnings pass.
CONDENSE := awk '/^(Collecting|Downloading|Building|Preparing|Installing collected|Successfully)/ \
	{ sub(/ \(from .*/, ""); print "  " substr($$0, 1, 100); fflush(); next } \
	/^Processing/ { n = split($$2, part, "/"); print "  Taking " part[n]; fflush(); next } \
	/^(Requirement|Looking|Using|  |Obtaining|Created|Stored|Attempting|Found)/ { next } \
	{ print; fflush() }'

.PHONY: demo test soak test-clients lint format clean

demo: $(VENV)/.demo-$(TORCH)
	@$(BIN)/twinspark demo --port $(PORT)

# Files run in the order of their names, so unit tests come last, a second a file. By default those
# with the fewest tests come last, and these are the longest: one worker would idle for minutes.
test: $(VENV)/.dev-$(TORCH)
	@echo "== ruff" && $(BIN)/ruff check . && $(BIN)/ruff format --check .
	@echo "== mypy" && $(BIN)/mypy
	@echo "== import rules" && $(BIN)/lint-imports
	@echo "== sizes" && $(BIN)/python tools/size.py
	@echo "== pytest" && OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest -q \
		-n $(WORKERS) --dist loadfile --no-loadscope-reorder \
		-m "not gpu and not multigpu and not slow" $(PYTEST_ARGS)

soak: $(VENV)/.dev-$(TORCH)
	@$(BIN)/python -m pytest -q -s tests/soak $(PYTEST_ARGS)

test-clients: $(VENV)/.dev-$(TORCH)
	@$(BIN)/python -m tests.clients.run $(CLIENTS)

lint: $(VENV)/.dev-$(TORCH)
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy && $(BIN)/lint-imports
	@$(BIN)/python tools/size.py

format: $(VENV)/.dev-$(TORCH)
	@$(BIN)/ruff check --fix . && $(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.pip:
	@echo "== making $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)
	@echo "== a pip that knows dependency groups" && $(PIP) --upgrade "pip>=25.1" | $(CONDENSE)
	@touch $@

$(VENV)/.demo-$(TORCH): $(VENV)/.pip pyproject.toml constraints-cpu.txt
	@echo "== installing twinspark with torch for $(TORCH); the first time takes a few minutes"
	@$(PIP) $(CONSTRAINTS) -e ".[demo]" | $(CONDENSE)
	@touch $@

$(VENV)/.dev-$(TORCH): $(VENV)/.pip pyproject.toml constraints-cpu.txt
	@echo "== installing twinspark with torch for $(TORCH) and the test tools"
	@$(PIP) $(CONSTRAINTS) -e ".[demo]" --group dev | $(CONDENSE)
	@touch $@ $(VENV)/.demo-$(TORCH)
