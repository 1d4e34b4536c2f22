# Every target makes or refreshes the virtual environment by itself when that is needed.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
HERMES := .venv-hermes
HERMES_READY := $(HERMES)/.ready
ARGS   ?=

.DEFAULT_GOAL := help
.PHONY: help setup search test test-unit test-hermes lint format bench clean

help: ## Show this list
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(READY) ## Make the virtual environment and install hermes-rl into it

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("hermes-rl needs Python 3.11, 3.12 or 3.13; this is " + sys.version.split()[0] + ". Choose another with: make setup PYTHON=python3.12") if not (3, 11) <= sys.version_info[:2] <= (3, 13) else None'
	@echo "Setting up $(VENV) (a few minutes the first time) …"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $(READY)

search: $(READY) ## Search the article's grid on the embedded model and replicate the winner (six to twelve minutes on a laptop)
	@$(BIN)/python -m hermes_rl search start --preset article-grid $(ARGS)

# Hermes Agent has an environment of its own: it is pinned to other versions than constraints.txt, and its
# package `tools` would hide the repository's folder of that name from the tests of the quick start.
$(HERMES_READY): pyproject.toml tests/hermes-constraints.txt
	@echo "Setting up $(HERMES) for the tests with Hermes Agent (a few minutes the first time) …"
	@$(PYTHON) -m venv $(HERMES)
	@$(HERMES)/bin/python -m pip install --quiet --disable-pip-version-check --constraint tests/hermes-constraints.txt --editable . 'hermes-agent>=0.19,<0.20'
	@touch $(HERMES_READY)

test: $(READY) $(HERMES_READY) ## Run all tests, a file to a process
	@$(BIN)/python -m pytest --numprocesses logical --maxprocesses 4 --dist loadfile $(ARGS)

test-hermes: $(READY) $(HERMES_READY) ## Run the tests inside the real Hermes Agent
	@$(BIN)/python -m pytest tests/integration/test_agent_hermes.py $(ARGS)

test-unit: $(READY) ## Run the fast tests
	@$(BIN)/python -m pytest tests/unit $(ARGS)

lint: $(READY) ## Check style, format and types
	@$(BIN)/python -m ruff check .
	@$(BIN)/python -m ruff format --check .
	@$(BIN)/python -m pyright --pythonpath $(BIN)/python

format: $(READY) ## Apply the formatter
	@$(BIN)/python -m ruff check --fix .
	@$(BIN)/python -m ruff format .

bench: $(READY) ## Run the benchmarks; each prints its figures and fails when a goal is missed
	@$(BIN)/python -m benchmarks $(ARGS)

clean: ## Remove the virtual environment, caches and everything runs have written
	rm -rf $(VENV) $(HERMES) build dist .pytest_cache .ruff_cache .hypothesis
	find tinker-atropos -mindepth 1 -maxdepth 1 ! -name tinker_atropos -exec rm -rf {} +
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
