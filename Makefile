# Two commands on a fresh machine with Python 3.11 or newer and make:
#
#     make demo    install into .venv, run the main job on the shipped demo pair, say where the results are
#                  (two to three minutes on two cores, and what the download takes)
#     make test    install the development tools too, run the tests
#
# And one that takes a while, about twenty minutes on two cores:
#
#     make reliability    kill, fail, power off, race, damage and fuzz the zoo, load and break the server; prints each
#                         figure, fails on any fault
#
# And for whoever changes the code:
#
#     make lint         ruff and the order of imports
#     make types        mypy
#     make mutants ROOM=numerics    plant faults in one room, count those that its tests catch, in seconds to hours
#                       (docs/testing.md)
#     make demo-pair    train the demo pair again, on text that it generates (a CPU will do, a GPU is quicker)
#     make clean        remove what these made: VENV, OUT, build/, dist/, caches
#
# Knobs, from the environment or the command line:
#     PYTHON       the Python that makes the virtual environment         (python3)
#     VENV         where it is made                                      (.venv)
#     OUT          where the demo writes                                 (demo-out)
#     ROOM, TESTS, SAMPLE   what to plant faults in, the tests to hold it against, how many      (all)
#     PYTEST_ARGS  more arguments for pytest; the tests run in as many processes as there are cores, at most 8
#     TORCH_SPEC, TORCH_INDEX   which torch to install, and one more index to look for it; see below

PYTHON ?= python3
VENV ?= .venv
OUT ?= demo-out
PYTEST_ARGS ?=

# PyPI's Linux wheels of torch bring several GB of CUDA libraries. A machine without an NVIDIA GPU has no use for them,
# so it also asks PyTorch's index of CPU builds: pip prefers the local version 2.13.0+cpu to the plain 2.13.0, wherever
# a configured index has one, and takes the plain one where that index cannot be reached. With a GPU: the newest torch.
ifeq ($(shell uname -s)/$(shell nvidia-smi -L 2>/dev/null | grep -c GPU),Linux/0)
TORCH_SPEC ?= torch==2.13.0
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
else
TORCH_SPEC ?= torch
TORCH_INDEX ?=
endif

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip

.PHONY: demo test reliability mutants lint types demo-pair clean help

help:
	@awk '!/^#/{exit} {sub(/^# ?/, ""); print}' Makefile

demo: $(VENV)/.installed
	$(BIN)/deltacompress demo --out $(OUT)
	@echo "results: $(abspath $(OUT))"

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest --numprocesses auto --maxprocesses 8 $(PYTEST_ARGS)

reliability: $(VENV)/.installed-dev
	$(BIN)/python -m tests.zoo.reliability
	$(BIN)/python -m tests.serving.reliability

mutants: $(VENV)/.installed-mutants
	$(BIN)/python tools/mutants.py $(ROOM) --tests "$(TESTS)" --sample $(or $(SAMPLE),0)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(VENV)/.installed-dev
	$(BIN)/mypy

demo-pair: $(VENV)/.installed
	PYTHONPATH=tools $(BIN)/python -m demo_pair.train --out registry/demo

clean:
	rm -rf $(VENV) $(OUT) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

# The stamps: written last, so that an interrupted install is done again, and a finished one is not.
# torch goes in alone (--no-deps), because only it may come from the extra index; the next step brings what it needs.
$(VENV)/.torch:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("deltacompress needs Python 3.11 or newer: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --no-deps $(if $(TORCH_INDEX),--retries 1 --timeout 30 --extra-index-url $(TORCH_INDEX)) '$(TORCH_SPEC)'
	@touch $@

$(VENV)/.installed: $(VENV)/.torch pyproject.toml
	$(PIP) install --editable .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.torch pyproject.toml
	$(PIP) install --editable '.[dev]'
	@touch $@ $(VENV)/.installed

$(VENV)/.installed-mutants: $(VENV)/.installed-dev
	$(PIP) install 'mutmut>=3.8,<4'
	@touch $@
