# Every target does its own set-up. `make help` prints this list.
.DEFAULT_GOAL := help
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
UV_VERSION := 0.13.9
STAMP := $(VENV)/.installed

.PHONY: help
help: ## print this list
	@awk 'BEGIN {FS = ":.*## "} /^[a-z][a-z-]*:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(STAMP): requirements.lock pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip --version > /dev/null 2>&1 || $(BIN)/python -m ensurepip
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "uv==$(UV_VERSION)"
	VIRTUAL_ENV=$(CURDIR)/$(VENV) $(BIN)/uv pip install --quiet --require-hashes -r requirements.lock
	VIRTUAL_ENV=$(CURDIR)/$(VENV) $(BIN)/uv pip install --quiet --no-deps --no-build-isolation -e .
	touch $(STAMP)

.PHONY: setup
setup: $(STAMP) ## virtual environment with the locked packages

.PHONY: broker
broker: $(STAMP) ## fetch Apache Kafka for the tests (once; needs Java and Maven, else the embedded broker is used)
	@cd tests && ../$(BIN)/python -m broker fetch || echo "no real broker here: tests use the embedded one and say what they did not prove"

.PHONY: check
check: $(STAMP) ## style, types, import rules, schema drift
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/batchferry schemas --check schemas

COMPUTING := tests/unit tests/property tests/contract tests/sim
WAITING := tests/acceptance tests/integration tests/chaos

.PHONY: test
test: $(STAMP) broker ## every test but the long ones (real broker where one can be had)
	@# What waits for brokers and processes runs in two shares beside two of what computes, which give way to them; the
	@# output of all but one comes at the end.
	@run="$(BIN)/pytest -p no:cacheprovider"; \
	nice -n 10 $$run $(COMPUTING) --share 1/2 > .pytest-computing-1.log 2>&1 & one=$$!; \
	nice -n 10 $$run $(COMPUTING) --share 2/2 > .pytest-computing-2.log 2>&1 & two=$$!; \
	$$run $(WAITING) --share 2/2 > .pytest-waiting.log 2>&1 & waiting=$$!; \
	code=0; $(BIN)/pytest $(WAITING) --share 1/2 || code=1; \
	for share in $$waiting $$one $$two; do wait $$share || code=1; done; \
	cat .pytest-waiting.log .pytest-computing-1.log .pytest-computing-2.log; exit $$code

.PHONY: test-long
test-long: $(STAMP) broker ## the tests that take long: rolling restarts, a provider away for two days, bounds met by real input
	$(BIN)/pytest -m long

.PHONY: demo
demo: $(STAMP) ## the main job on real input, with embedded broker and simulated provider (PROVIDER=anthropic ...)
	$(BIN)/batchferry demo $(if $(PROVIDER),--provider $(PROVIDER))

RUNS ?= 1000

.PHONY: sim
sim: $(STAMP) ## the whole service in virtual time: RUNS lives from SEED on, each with its own misfortunes; PROVIDER=any
	cd tests && ../$(BIN)/python -m sim --seed $(or $(SEED),1) --runs $(RUNS) $(if $(PROVIDER),--provider $(PROVIDER))

.PHONY: sim-mutants
sim-mutants: $(STAMP) ## plant faults in the service one after the other, and see the simulation catch each
	cd tests && ../$(BIN)/python -m sim --mutants --runs 200

.PHONY: bench
bench: $(STAMP) broker ## ratios against raw client loops, and peak memory
	cd tests && ../$(BIN)/python -m bench

.PHONY: bench-big
bench-big: $(STAMP) broker ## a 50,000-row, 150 MB batch through produce, run and results, with the service's peak memory
	cd tests && ../$(BIN)/python -m bench big

MINUTES ?= 5
.PHONY: chaos
chaos: $(STAMP) broker ## three replicas through kills, freezes, broker and provider faults; MINUTES=5 SEED=7 RECORDS=25000
	cd tests && ../$(BIN)/python -m chaos --minutes $(MINUTES) $(if $(SEED),--seed $(SEED)) $(if $(RECORDS),--records $(RECORDS))

.PHONY: docs
docs: $(STAMP) ## write the generated parts of the README anew
	cd tests && ../$(BIN)/python -m acceptance.readme_blocks

.PHONY: lock
lock: ## resolve the locked package versions anew
	test -x $(BIN)/uv || ($(PYTHON) -m venv $(VENV) && $(BIN)/python -m pip install --quiet "uv==$(UV_VERSION)")
	$(BIN)/uv pip compile pyproject.toml --universal --python-version 3.11 --generate-hashes --no-header --no-annotate \
	  --no-emit-index-url --extra demo --group dev --quiet -o requirements.lock

.PHONY: schemas
schemas: $(STAMP) ## write the published JSON Schemas and the AsyncAPI document
	$(BIN)/batchferry schemas --write schemas

.PHONY: clean
clean: ## remove what the targets made (not the broker cache)
	rm -rf $(VENV) .demo .bench .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
