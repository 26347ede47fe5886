# Development tasks; `make` lists the targets.
#
# PY=/some/python uses that interpreter instead of .venv, for a machine with its own torch:
#   make test-device PY=python3

# The tested torch (`make lock` reads it here), installed before the other packages. On Linux, PyPI has the CUDA build
# of several GB; for the CPU build:
#   make setup PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu TORCH=torch==2.13.0+cpu
TORCH   := torch==2.13.0
VENV    := .venv
BIN     := $(VENV)/$(if $(filter Windows_NT,$(OS)),Scripts,bin)
PY      ?= $(BIN)/python
WORKERS ?= 2

INSTALLED := $(VENV)/.installed
INSTALLED_DEV := $(VENV)/.installed-dev
INSTALLED_DOCS := $(VENV)/.installed-docs
IS_VENV := $(filter $(BIN)/python,$(PY))
READY := $(if $(IS_VENV),$(INSTALLED))
READY_DEV := $(if $(IS_VENV),$(INSTALLED_DEV))
READY_DOCS := $(if $(IS_VENV),$(INSTALLED_DOCS))

# One thread per test worker, so that workers do not compete for cores.
TEST_ENV := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 PYTHONDONTWRITEBYTECODE=

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup browser demo docs test test-slow test-device lint format bench why-attention notebooks faults mutants fuzz-server wheel-test lock sbom clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' Makefile

setup: $(READY_DEV) ## create .venv with the development tools

# Use the first python3 that is new enough.
$(INSTALLED): pyproject.toml constraints.txt Makefile
	@for python in python3 python3.11 python3.12 python3.13 python3.14; do \
	  if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	    echo "setup: $$($$python --version) in $(VENV)"; exec $$python -m venv $(VENV); \
	  fi; \
	done; \
	echo "setup: attent needs Python 3.11 or newer, but none was found; install it and run make again" >&2; \
	exit 1
	@echo "setup: installing $(TORCH) and the packages of constraints.txt; this takes a few minutes"
	$(BIN)/python -m pip install --quiet '$(TORCH)'
	$(BIN)/python -m pip install --quiet -c constraints.txt -e .
	@touch $@

$(INSTALLED_DEV): $(INSTALLED)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@

$(INSTALLED_DOCS): $(INSTALLED)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[docs]'
	@touch $@

# The browser tests are skipped without a Chromium.
browser: $(READY_DEV) ## install a Chromium for the browser tests: the system's, or Playwright's
	@for name in chromium chromium-browser google-chrome; do command -v $$name >/dev/null && exit 0; done; \
	{ [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
	  timeout 300 sh -c 'apt-get -qq update && apt-get -qq install -y --no-install-recommends chromium' >/dev/null; } || \
	timeout 300 $(PY) -m playwright install chromium-headless-shell

demo: $(READY) ## install attent, train a small model and show its attention
	$(PY) -m attent demo

# conf.py writes the sources: the pages of docs/, the README, and a reference generated from the code.
docs: $(READY_DOCS) ## build the documentation site, build/docs/index.html
	@mkdir -p build/docs-source
	$(PY) -m sphinx -q -W --keep-going -c docs build/docs-source build/docs
	@echo "build/docs/index.html"

test: $(READY_DEV) ## ruff, mypy and the quick tests; required for every change
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(TEST_ENV) $(PY) -m pytest -q -n $(WORKERS) -m 'not slow'
	@if $(PY) -c 'import triton' 2>/dev/null; then \
	  $(TEST_ENV) TRITON_INTERPRET=1 $(PY) -m pytest -q -n $(WORKERS) tests/nn/kernels; fi

test-slow: $(READY_DEV) $(READY_DOCS) ## the slow tests
	$(TEST_ENV) $(PY) -m pytest -q -n $(WORKERS) -m slow

test-device: $(READY_DEV) ## the laws and the kernels on a GPU, in float32 and bfloat16
	$(PY) -m pytest -q tests/nn/kernels tests/decoding/engines/gpu tests/training/test_step_graphs.py tests/laws --device cuda

lint: $(READY_DEV) ## ruff check, ruff format --check, mypy
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: $(READY_DEV) ## sort imports and format with ruff
	$(PY) -m ruff check --fix --select I .
	$(PY) -m ruff format .

# Without those that train models for many minutes.
# These take a model or data: python -m benchmarks.students --help
NOT_ALONE := captions libretranslate long_range markup_placement phrases quality spoken_captions students why_attention
bench: $(READY_DEV) ## run all benchmarks that need no data
	@set -e; for script in $$(find benchmarks -maxdepth 1 -name '[a-z]*.py' \
	    $(NOT_ALONE:%=! -name %.py) 2>/dev/null | sort); do \
	  name=$${script%.py}; echo "== $$name" >&2; $(PY) -m "$$(echo $$name | tr / .)"; \
	done

why-attention: $(READY_DEV) ## the comparison of docs/why-attention.md, on a GPU (FLAGS="--jobs 6"); again: resume
	$(PY) -m benchmarks.why_attention $(FLAGS)

notebooks: $(READY_DEV) ## run the notebooks of docs/ in a new kernel and store their outputs
	$(PY) -m tests.notebooks

faults: $(READY_DEV) ## mutation tests: plant faults in a copy of the code (ONLY=part of a name)
	$(PY) tests/faults.py $(ONLY)

mutants: $(READY_DEV) ## random mutation tests (SEED=1 COUNT=40 PACKAGES="nn cli" TESTS="tests/nn tests/cli" MINUTES=60)
	$(PY) tests/mutation.py --seed $(or $(SEED),0) --count $(or $(COUNT),40) --workers $(WORKERS) \
	  --minutes $(or $(MINUTES),600) --packages $(PACKAGES) --tests $(or $(TESTS),tests)

# The wheel must work without the repository, so its venv and its working directory are elsewhere.
wheel-test: $(READY_DEV) ## build the wheel, install it in a fresh environment, train and translate with it
	rm -rf build/wheel
	$(PY) -m build --outdir build/wheel . >/dev/null
	@set -e; folder=$$(mktemp -d); trap 'rm -rf "$$folder"' EXIT; constraints=$$PWD/constraints.txt; \
	wheel=$$(ls $$PWD/build/wheel/*.whl); $(PY) -m venv $$folder/venv; cd $$folder; python=$$folder/venv/bin/python; \
	$$python -m pip install --quiet '$(TORCH)'; \
	$$python -m pip install --quiet -c $$constraints "$$wheel"; export $(TEST_ENV); \
	venv/bin/attent --version; venv/bin/attent doctor; \
	venv/bin/attent train --data phrases --src en --tgt de --out run --steps 5 --size tiny; \
	echo 'the small girl' | venv/bin/attent translate run; \
	echo "$$(basename $$wheel): installed and used outside of the repository"

TOOLS := build/tools
TOOLS_BIN := $(TOOLS)/$(notdir $(BIN))
$(TOOLS)/.installed:
	$(PY) -m venv $(TOOLS)
	$(TOOLS_BIN)/python -m pip install --quiet uv cyclonedx-bom
	@touch $@

$(TOOLS)/.installed-schemathesis: $(TOOLS)/.installed
	$(TOOLS_BIN)/python -m pip install --quiet 'schemathesis>=4.32,<5'
	@touch $@

fuzz-server: $(READY_DEV) $(TOOLS)/.installed-schemathesis ## requests to the server, generated from its OpenAPI document (CASES=10000)
	$(TEST_ENV) $(PY) -m tests.serving.fuzz $(TOOLS_BIN)/schemathesis $(or $(CASES),10000)

# uv resolves for all platforms and Python versions at once, which pip cannot. Its hashes leave out torch, which is
# installed first, as a CPU or a CUDA build, and the CUDA packages that belong to it.
COMPILE := $(TOOLS_BIN)/uv pip compile pyproject.toml --universal --python-version 3.11 --all-extras --no-header \
  --no-annotate --quiet
TORCH_PACKAGES := ^(torch|nvidia-[a-z0-9-]+|cuda-[a-z]+)==
lock: $(READY_DEV) $(TOOLS)/.installed ## update constraints.txt and requirements.lock from pyproject.toml
	{ echo '# Every package that attent, its extras and its tests can bring in, pinned, for Python 3.11 and later on any'; \
	  echo '# system. A constraint installs nothing by itself: pip install -c constraints.txt attent'; \
	  echo '# Update with: make lock   (the torch version is in the Makefile)'; \
	  echo '$(TORCH)' | $(COMPILE) --upgrade --constraints -; } > constraints.tmp
	{ echo '# The packages of constraints.txt with the SHA-256 of every file; torch is installed separately:'; \
	  echo '#   pip install $(TORCH) && pip install --require-hashes --no-deps -r requirements.lock'; \
	  echo '# Update with: make lock'; \
	  $(COMPILE) --generate-hashes --constraints constraints.tmp \
	    $$(sed -nE 's/$(TORCH_PACKAGES).*/--no-emit-package \1/p' constraints.tmp); } > requirements.tmp
	mv constraints.tmp constraints.txt
	mv requirements.tmp requirements.lock

sbom: $(READY_DEV) $(TOOLS)/.installed ## write build/attent.cdx.json, a CycloneDX bill of materials
	version=$$($(PY) -c 'import attent; print(attent.__version__)'); \
	sed "s/^dynamic = .*/version = \"$$version\"/" pyproject.toml > build/pyproject.toml
	{ cat requirements.lock; grep -E '$(TORCH_PACKAGES)' constraints.txt; } | $(TOOLS_BIN)/cyclonedx-py requirements \
	  --pyproject build/pyproject.toml --output-reproducible --validate --output-file build/attent.cdx.json -

clean: ## remove build outputs and caches, but not .venv and runs
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +
