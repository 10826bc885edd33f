# Everything is a target here; CI calls nothing else. `make help` lists them.
.DEFAULT_GOAL := help
SHELL := /bin/bash
PYTHON ?= python3.11
VENV ?= .venv
PIP_ARGS ?=
BIN := $(VENV)/bin
PROTOS := $(wildcard protos/paceline/v1/*.proto)
GENERATED := clients/python

.PHONY: help install demo test test-full lint fmt protos verify-protos buf lock models bench clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

install: $(VENV)/.installed ## a virtual environment with everything, in .venv

$(VENV)/.installed: pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "Python 3.11 is needed; say PYTHON=... if it has another name"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV) (some minutes the first time; torch is the large part) ..."
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) -c constraints.txt -e '.[dev]'
	@touch $@

demo: install ## stream real text through real processes, compare the strategies, draw the timeline
	$(BIN)/paceline demo

test: install ## every test but the long forms
	$(BIN)/python -m pytest -m "not full"

test-full: install ## the long form of the equality proof (about an hour)
	$(BIN)/python -m pytest -m full

lint: install verify-protos ## ruff, mypy, import-linter, and that generated code is fresh
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --config pyproject.toml

fmt: install ## format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

protos: install ## generate the Python code from protos/
	$(BIN)/python protos/generate.py $(GENERATED)

verify-protos: install ## fail if the generated code is not what protos/ says
	$(BIN)/python protos/generate.py --check $(GENERATED)

buf: ## lint the protos and compare them with the main branch (needs npm)
	cd protos && npx --yes @bufbuild/buf@1 lint
	cd protos && against=$$(git show-ref --quiet --verify refs/heads/main && echo branch=main || echo ref=HEAD) \
	  && npx --yes @bufbuild/buf@1 breaking --against "../.git#$$against,subdir=protos"

lock: ## pin what is installed into constraints.txt, from a fresh environment
	rm -rf build/lock && $(PYTHON) -m venv build/lock
	build/lock/bin/python -m pip install --quiet $(PIP_ARGS) '.[dev]'
	build/lock/bin/python -m pip freeze --exclude paceline | sed -E 's/\+cpu$$//' > constraints.txt

models: install ## train the bundled models again (hours)
	$(BIN)/python models/train.py

clean: ## remove what the targets made
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
