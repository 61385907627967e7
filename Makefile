# Triptych from a clone: `make serve`, `make test`, `make check`. The first target that needs .venv/ makes it.
#
# Variables: PYTHON (3.11 or newer)  VENV  MODEL  PORT  ARGS (more flags for `triptych up`, or for pytest)
# pip's own variables apply: PIP_FIND_LINKS or PIP_EXTRA_INDEX_URL name a place that has torch's CPU build.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV   ?= .venv
MODEL  ?= smollm2
PORT   ?= 8000
ARGS   ?=
PYTHON ?= $(shell command -v python3.11 || command -v python3)

BIN      := $(VENV)/bin
STAMPS   := $(VENV)/.stamps
LOCKS    := deploy/locks
PIP      := $(BIN)/python -m pip --disable-pip-version-check --require-virtualenv
# ARGS may select tests of only one of the two runs below: pytest exits with 5 when it selects none.
NONE_CHOSEN := [ $$? -eq 5 ]

export PYTHONUNBUFFERED := 1
# Tests start many processes. Without kept bytecode each would compile all our modules again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help serve env test test-slow test-unit test-npu test-compose coverage check format protos docs lock models clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

serve: $(STAMPS)/serve ## Serve MODEL on PORT until Ctrl-C
	@exec $(BIN)/triptych up --model $(MODEL) --port $(PORT) $(ARGS)

# The first run has two processes with one thread each: otherwise torch would give all cores to both. Files keep their
# order, because those with the longest tests have few tests and would otherwise run last, on one core.
# A process that crashes ends the run: with a successor, which repeats the file, pytest-xdist may wait for ever.
# The second runs tests marked `stack` one by one, because their serving processes use all cores.
define run_tests
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --max-worker-restart 0 --dist loadfile --no-loadscope-reorder -m "not stack and not compose and $(1)" $(ARGS) || $(NONE_CHOSEN)
	@$(BIN)/python -m pytest -m "stack and $(1)" tests/e2e/stack $(ARGS) || $(NONE_CHOSEN)
endef

test: $(STAMPS)/dev $(STAMPS)/interpreter models ## Run the quick tests, which touch every capability
	$(call run_tests,not slow)

test-slow: $(STAMPS)/dev $(STAMPS)/interpreter models ## Run the slow tests, except those of the containers
	$(call run_tests,slow)
	@TRIPTYCH_PROPERTY_SCALE=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "property and not slow" tests/unit tests/property $(ARGS) || $(NONE_CHOSEN)

test-unit: $(STAMPS)/dev $(STAMPS)/interpreter ## Run only unit and property tests
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile tests/unit tests/property $(ARGS)

test-npu: $(STAMPS)/dev models ## Run the tests with the vendor's packages for NPUs, slow ones included
	@$(BIN)/python -m tests.support.rbln.vendor_packages
	@TRIPTYCH_PROPERTY_SCALE=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile -m npu $(ARGS)

test-compose: $(STAMPS)/dev ## Build the images, run the compose stack, kill a worker
	@$(BIN)/python -m pytest -m compose -s --timeout 3600 tests/compose $(ARGS)

coverage: $(STAMPS)/dev $(STAMPS)/interpreter models ## Run the quick tests that start no stack, and write htmlcov/
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile -m "not stack and not compose and not slow" \
	  --cov=deploy --cov=gateway --cov=protos --cov=scheduler_svc --cov=worker_svc --cov-report=html --cov-report=term:skip-covered $(ARGS)

check: $(STAMPS)/dev ## Linters, types, layer contracts, generated files, prose, locks
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-cache --no-logo
	@$(BIN)/python -m protos.generate --check
	@$(BIN)/python -m tests.support.docs --check
	@$(BIN)/python -m tests.support.prose >/dev/null
	@$(BIN)/python -m tests.support.lockfile

format: $(STAMPS)/dev ## Format the code and apply the linters' fixes
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

protos: $(STAMPS)/dev ## Generate the stubs of protos/triptych
	@$(BIN)/python -m protos.generate

docs: $(STAMPS)/dev ## Write the generated pages in docs/
	@$(BIN)/python -m tests.support.docs

lock: $(STAMPS)/dev ## Write the locks from what is installed
	@$(BIN)/python -m tests.support.lockfile --write

models: $(STAMPS)/serve ## Fetch the demo models that tests use
	@$(BIN)/triptych models fetch smollm2
	@$(BIN)/triptych models fetch gemma3-270m
	@$(BIN)/triptych models fetch minilm

env: $(STAMPS)/dev $(STAMPS)/interpreter ## Make the environment for development

clean: ## Remove the environment and caches (not fetched models)
	rm -rf $(VENV) build dist run .mypy_cache .pytest_cache .ruff_cache .hypothesis *.egg-info

$(STAMPS)/venv:
	@version=$$("$(PYTHON)" -c 'import sys; print("%d.%d" % sys.version_info[:2], sys.version_info >= (3, 11))' || true); \
	  [[ $$version == *True ]] || { echo "make: Python 3.11 or newer is needed; set PYTHON to one (found: $(PYTHON) $${version% *})." >&2; exit 1; }; \
	  echo "== Environment in $(VENV)/ (Python $${version% *})"
	@"$(PYTHON)" -m venv "$(VENV)" || { echo "make: $(PYTHON) cannot make an environment (on Debian: apt install python3-venv)." >&2; exit 1; }
	@mkdir -p $(STAMPS) && touch $@

# Installs with pip. $(1) is the heading, $(2) are pip's arguments, $(3) is advice if it fails. Progress is a count of
# packages; pip's output goes to pip.log.
define install
	@echo "== $(1)"
	@set +e; $(PIP) install --no-deps --no-compile --progress-bar off $(2) 2>&1 | tee $(STAMPS)/pip.log \
	  | awk '/^(Collecting|Processing) /{n++; if (n % 25 == 0) print "   " n " packages ..."} /^Installing collected/{print "   unpacking ..."; fflush()}'; \
	  status=$${PIPESTATUS[0]}; \
	  if [[ $$status != 0 ]]; then grep '^ERROR' $(STAMPS)/pip.log | tail -n 1 >&2; echo "make: pip failed; its output is in $(STAMPS)/pip.log. $(3)" >&2; exit 1; fi
endef

# pip refuses a file whose SHA-256 is not in the lock.
HASHED := --require-hashes -r

# torch is installed first and alone, so that a missing CPU build is reported in one line.
TORCH := $(shell grep -o '^torch==[^ ]*' $(LOCKS)/worker-cpu.txt)

$(STAMPS)/torch: $(LOCKS)/worker-cpu.txt | $(STAMPS)/venv
	@grep '^torch==' $< > $(STAMPS)/torch.txt
	$(call install,$(TORCH) (200 MB),--only-binary :all: $(HASHED) $(STAMPS)/torch.txt,Set PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS to a place that has $(TORCH).)
	@touch $@

SERVE_LOCKS := $(LOCKS)/gateway.txt $(LOCKS)/scheduler.txt $(LOCKS)/worker-cpu.txt

$(STAMPS)/serve: $(SERVE_LOCKS) pyproject.toml $(STAMPS)/torch
	$(call install,Packages of the three services ($(shell cat $(SERVE_LOCKS) | grep -v '^#' | sort -u | wc -l) of them),$(SERVE_LOCKS:%=$(HASHED) %))
	$(call install,triptych itself,--no-build-isolation --editable .)
	@echo "== Bytecode of what a worker imports"
	@$(VENV)/bin/python -c 'import worker_svc.service; from worker_svc.vllm_adapter.startup import prepare; prepare("cpu")' 2>$(STAMPS)/bytecode.log \
	  || { tail -n 1 $(STAMPS)/bytecode.log >&2; exit 1; }
	@touch $@

$(STAMPS)/dev: $(LOCKS)/dev.txt $(STAMPS)/serve
	$(call install,Tools for tests and checks,$(HASHED) $(LOCKS)/dev.txt)
	@touch $@

# In a separate folder, which tests/conftest.py adds to the path: inside the environment vLLM would import it in every
# worker, for nothing.
$(STAMPS)/interpreter: $(LOCKS)/interpreter.txt $(STAMPS)/dev
	$(call install,Triton for its interpreter (200 MB),--upgrade --target $(VENV)/interpreter $(HASHED) $<)
	@touch $@
