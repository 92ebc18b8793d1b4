# tm_slurm. `make` lists what there is.
.DEFAULT_GOAL := help
SHELL := /bin/bash

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
SUDO   := $(if $(filter 0,$(shell id -u)),,sudo)
APT    := munge slurm-wlm libslurm-dev iproute2 procps gcc g++ make libssl-dev python3-dev python3-venv
TORCH  := torch==2.13.0

CONTRACT := tests/slurm/test_slurm_answers_of_real_daemons.py

NATIVE := setup.py $(wildcard tm_slurm/comm/src/*)

.PHONY: help setup apt frameworks demo test test-unit test-layouts chaos record pictures bench bench-baselines tables sanitize fuzz spank install uninstall lint cluster-next test-next apt-next apt-pictures cluster-up cluster-down clean

help: ## This list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1|\2/' | column -t -s'|'

setup: apt $(VENV)/.ready ## Everything that is needed: system packages, .venv, the native part (again: nothing to do)

define INSTALL
	@missing=$$(for p in $(1); do dpkg-query -W -f='$${Status}' $$p 2>/dev/null | grep -q 'ok installed' || echo $$p; done); \
	if [ -n "$$missing" ]; then \
	  $(SUDO) apt-get update -qq && $(SUDO) env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$missing; \
	fi
endef

apt:
	$(call INSTALL,$(APT))

apt-pictures:
	$(call INSTALL,mscgen)

apt-next:
	$(call INSTALL,debootstrap)

$(VENV)/bin/python: | apt
	$(PYTHON) -m venv $(VENV)

$(VENV)/.packages: pyproject.toml | $(VENV)/bin/python
	$(BIN)/pip install -q --disable-pip-version-check "$(TORCH)" "setuptools>=77" wheel ninja
	@touch $@

$(VENV)/.ready: $(VENV)/.packages $(NATIVE)
	$(BIN)/pip install -q --disable-pip-version-check --no-build-isolation -e '.[dev]'
	@touch $@

$(VENV)/.frameworks: pyproject.toml tests/extras.py | $(VENV)/.ready
	$(BIN)/pip install -q --disable-pip-version-check $$($(BIN)/python tests/extras.py lightning transformers hydra)
	@touch $@

frameworks: setup $(VENV)/.frameworks ## Lightning, transformers and hydra, which only their own tests need

demo: setup ## The main job: a GPT trains on a local Slurm cluster, two nodes are drained under it, nothing is lost
	$(BIN)/python -m tm_slurm.demo --json build/demo.json

test: frameworks ## All tests, those against real Slurm daemons too; what Slurm is asked also with the next release
	$(MAKE) --no-print-directory test-next TESTS=$(CONTRACT)
	$(BIN)/python -m pytest

test-unit: frameworks ## The tests that need neither Slurm nor seconds
	$(BIN)/python -m pytest tests/unit

test-layouts: setup ## char_gpt in its larger layouts and compiled, ranks lost in any order: minutes
	$(BIN)/python -m pytest -m layouts tests/comm tests/slurm

cluster-next: setup apt-next ## Slurm 26.05 with pyslurm in build/next, made once: minutes
	tests/next/next-release build

test-next: cluster-next ## The tests against real Slurm daemons, those of 26.05 (TESTS=tests/slurm/test_….py)
	env -u MAKEFLAGS tests/next/next-release run $(BIN)/python -m pytest -p no:cacheprovider $(or $(TESTS),tests/slurm)

chaos: setup ## Random faults against a training run, seeds 1 to 20 (SEEDS=n), five faults each (FAULTS=n)
	$(BIN)/python tests/chaos/chaos.py --seeds $(or $(SEEDS),20) --faults $(or $(FAULTS),5)

record: setup ## Record a real job anew for the tests that read job directories (tests/unit/recorded_job)
	$(BIN)/python tests/slurm/record_a_job.py

pictures: setup apt-pictures ## The pictures of the README, from that job and from text
	$(BIN)/python tests/pictures.py

tables: setup ## The README's tables, from the newest runs in build/bench and those that are recorded
	$(BIN)/python tests/bench/readme_tables.py

$(VENV)/.bench: $(VENV)/.ready
	$(BIN)/pip install -q --disable-pip-version-check --no-build-isolation -e '.[dev,bench]'
	@touch $@

bench: setup $(VENV)/.bench ## All benchmarks; JSON in build/bench (one alone: make bench-comm)
	@for bench in tests/bench/bench_*.py; do $(BIN)/python $$bench || exit 1; done

bench-baselines: setup $(VENV)/.bench ## Beside what people would use instead (RIVALS="torchrun requeue" FAULTS=planned REPEAT=5)
	$(BIN)/python tests/bench/bench_baselines.py $(addprefix --only ,$(RIVALS)) $(addprefix --fault ,$(FAULTS)) \
	  --repeat $(or $(REPEAT),5)

bench-profile: $(VENV)/.bench

bench-%: setup
	$(BIN)/python tests/bench/bench_$*.py

sanitize: apt ## The transport, the plugin and tm-notify under Address-, UndefinedBehavior- and ThreadSanitizer
	$(MAKE) -C tests/comm/native sanitize SECONDS=$(or $(FOR),30)
	$(MAKE) -C spank sanitize

fuzz: apt ## Random input to the frame parser and the handshake, ten minutes each (FOR=seconds)
	$(MAKE) -C tests/comm/native fuzz SECONDS=$(or $(FOR),600)

spank: apt ## The SPANK plugin and tm-notify, against the installed Slurm headers (SLURM_INCLUDE=DIR: others)
	$(MAKE) -C spank all $(if $(SLURM_INCLUDE),SLURM_INCLUDE=$(abspath $(SLURM_INCLUDE)))

install: apt ## The administrators' part below PREFIX (/usr/local); `tm-slurm install --print` shows what refers to it
	$(MAKE) -C spank install

uninstall: ## Remove it again
	$(MAKE) -C spank uninstall

lint: setup ## ruff and mypy
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

cluster-up: setup ## A local Slurm cluster of 6 nodes
	$(BIN)/tm-slurm cluster up

cluster-down: ## End it; nothing is left
	$(BIN)/tm-slurm cluster down

clean: ## Remove what was built, .venv too
	rm -rf build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis $(VENV) tm_slurm/comm/*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
