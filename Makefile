# Every entry point; `make help` lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SMOLLM2 := models/smollm2-135m-instruct
# The server and its worker of `make serve`; `make deploy` talks to the same one.
PORT ?= 4200
export PREFECT_SERVER_ANALYTICS_ENABLED ?= false
export DO_NOT_TRACK ?= 1

.DEFAULT_GOAL := help
.PHONY: help setup demo test long check fix bench bench-cost bench-adapt serve deploy smollm2 slow sweep chaos coordination showcase

help:  ## list the entry points
	@grep -hE '^[a-z0-9-]+:.*  ## ' $(MAKEFILE_LIST) | awk -F ':.*  ## ' '{printf "make %-12s %s\n", $$1, $$2}'

setup: $(VENV)/.stamp  ## make the environment in .venv

$(VENV)/.stamp: requirements.lock pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Nereus needs Python 3.11 or newer; set PYTHON=...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

demo: setup  ## run a small PPO job that loses a device and gets it back, and plot it
	$(BIN)/nereus run adapt-cpu

test: setup  ## run the tests (about 10 minutes on 2 cores)
	$(BIN)/python -m pytest

long: setup  ## whole jobs that are killed, moved and resumed: the other half of the tests (11 minutes; CI runs them too)
	$(BIN)/python -m pytest -m "long and not slow"

check: setup  ## ruff, format, types and the fast tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q

fix: setup  ## mend what ruff can mend
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup smollm2  ## measure side by side; prints tables, writes build/bench (15 minutes, idle machine)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation -c requirements.lock -e ".[bench]"
	$(BIN)/python -m tests.benchmarks

bench-cost: setup smollm2  ## plans predicted and executed: latency, memory, the choice (20 minutes, idle machine)
	$(BIN)/python -m tests.benchmarks.cost_model

bench-adapt: setup  ## whole runs under each policy while responses grow and devices go (20 minutes, idle machine)
	$(BIN)/python -m tests.benchmarks.adapt

slow: setup  ## the tests that take minutes: learning, more of the long ones, SmolLM2 where `make smollm2` has fetched it
	$(BIN)/python -m pytest -m slow

sweep: setup  ## layout invariance over 200 mixed plans (long)
	NEREUS_SWEEP=200 $(BIN)/python -m pytest -m "long or not long" tests/parity/test_layouts.py

chaos: setup  ## runs and changes of the plan that are killed at 60 moments each, against undisturbed ones (an hour)
	NEREUS_CHAOS=60 $(BIN)/python -m pytest -m long -rs tests/chaos

coordination: setup  ## 300 transitions of each kind on nearly full devices, with real workers (10 minutes)
	NEREUS_TRIALS=300 $(BIN)/python -m pytest -m long -rP tests/runtime/test_coordination.py

showcase: setup  ## every shipped scenario under every policy; renews the tables of nereus/simulator/README.md (8 minutes)
	$(BIN)/python -m nereus.simulator.showcase

smollm2: setup  ## fetch SmolLM2-135M-Instruct and convert it to safetensors
	test -e $(SMOLLM2)/model.safetensors || $(BIN)/python -m nereus.smollm2 $(SMOLLM2)

serve: setup  ## a Prefect server with its UI and a worker for pool `nereus`, until Ctrl-C
	$(BIN)/python -m flows.serve --port $(PORT)

deploy: export PREFECT_API_URL ?= http://127.0.0.1:$(PORT)/api
deploy: setup  ## create the pool and the deployments on the server of `make serve` (or PREFECT_API_URL)
	$(BIN)/prefect work-pool create nereus --type process >/dev/null 2>&1 || $(BIN)/prefect work-pool inspect nereus >/dev/null
	$(BIN)/prefect --no-prompt deploy --all </dev/null
