# What is done often, by name. `make` alone lists the targets.
#
# PY=/some/python uses that interpreter as it is, without making .venv: for a machine that has its own torch,
# for example  make test-device PY=python3

# The tested torch (`make lock` takes it from here). It is installed first and by itself, so that the other packages
# settle around it. From PyPI a Linux machine gets the CUDA build, of several GB; for the CPU build:
#   make setup PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu TORCH=torch==2.13.0+cpu
TORCH   := torch==2.13.0
VENV    := .venv
PY      ?= $(VENV)/bin/python
WORKERS ?= 2

STAMP := $(VENV)/.installed
READY := $(if $(filter $(VENV)/bin/python,$(PY)),$(STAMP))

# Each test worker gets one thread: two workers that each start a thread per core only wait for one another.
TEST_ENV := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup browser demo test test-slow test-device lint format bench faults lock clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' Makefile

setup: $(READY) ## make .venv with everything that working on attent needs

# The first python3 that is new enough. venv is harmless on a .venv that exists already.
$(STAMP): pyproject.toml constraints.txt Makefile
	@for python in python3 python3.11 python3.12 python3.13 python3.14; do \
	  if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	    echo "setup: $$($$python --version) in $(VENV)"; exec $$python -m venv $(VENV); \
	  fi; \
	done; \
	echo "setup: attent needs Python 3.11 or newer, and none was found: install one, then run make again" >&2; \
	exit 1
	@echo "setup: installing $(TORCH) and the packages of constraints.txt; the first time this takes minutes"
	$(VENV)/bin/python -m pip install --quiet '$(TORCH)'
	$(VENV)/bin/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@

# The tests of the page need it, and are skipped without. A system's own is taken where there is one.
browser: $(READY) ## a Chromium for the tests of the page: Debian's, or Playwright's own
	@for name in chromium chromium-browser google-chrome; do command -v $$name >/dev/null && exit 0; done; \
	{ [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
	  timeout 300 sh -c 'apt-get -qq update && apt-get -qq install -y --no-install-recommends chromium' >/dev/null; } || \
	timeout 300 $(PY) -m playwright install chromium-headless-shell

demo: $(READY) ## set up, then teach a small model a task and show what it looks at
	$(PY) -m attent demo

test: $(READY) ## ruff, mypy and the quick tests: what must pass before a change is handed in
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(TEST_ENV) $(PY) -m pytest -q -n $(WORKERS) -m 'not slow'
	@if $(PY) -c 'import triton' 2>/dev/null; then \
	  $(TEST_ENV) TRITON_INTERPRET=1 $(PY) -m pytest -q -n $(WORKERS) tests/nn/kernels; fi

test-slow: $(READY) ## the tests that train and measure
	$(TEST_ENV) $(PY) -m pytest -q -n $(WORKERS) -m slow

test-device: $(READY) ## the laws and the kernels on a GPU, in float32 and bfloat16
	$(PY) -m pytest -q tests/nn/kernels tests/training/test_recorded.py tests/laws --device cuda

lint: $(READY) ## ruff check, ruff format --check, mypy
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: $(READY) ## let ruff put imports and lines in order
	$(PY) -m ruff check --fix --select I .
	$(PY) -m ruff format .

bench: $(READY) ## run every script of benchmarks/
	@set -e; for script in $$(find benchmarks -maxdepth 1 -name '[a-z]*.py' 2>/dev/null | sort); do \
	  name=$${script%.py}; echo "== $$name" >&2; $(PY) -m "$$(echo $$name | tr / .)"; \
	done

faults: $(READY) ## plant faults in a copy of the code and show that the tests notice (ONLY=part of a name)
	$(PY) tests/faults.py $(ONLY)

# uv resolves for every platform and Python version at once, which pip cannot.
lock: $(READY) ## renew constraints.txt from pyproject.toml
	$(PY) -m pip install --quiet uv
	{ echo '# Every package that attent, its extras and its tests can bring in, pinned, for Python 3.11 and later on any'; \
	  echo '# system. A constraint installs nothing by itself: pip install -c constraints.txt attent'; \
	  echo '# Renew with: make lock   (the torch version stands in the Makefile)'; \
	  echo '$(TORCH)' | $(PY) -m uv pip compile pyproject.toml --universal --python-version 3.11 --all-extras \
	    --upgrade --constraints - --no-header --no-annotate --quiet; } > constraints.tmp
	mv constraints.tmp constraints.txt

clean: ## remove what was built or cached (.venv and runs stay)
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +
