# `make demo` and `make test` each set up .venv by themselves; nothing else is needed.

PYTHON ?= python3
# make test TORCH=2.14.1, or TORCH=newest, or TORCH=nightly TORCH_INDEX=...: with another release of
# torch, in an environment of its own
TORCH ?=
# An index that has builds of torch which pip's own index does not have: CPU builds, or nightly ones.
TORCH_INDEX ?=
VENV := .venv$(if $(TORCH),-torch-$(TORCH))
BIN := $(VENV)/bin
# Environments that take packages of .venv need its Python.
BASE_PYTHON = $(if $(wildcard $(VENV)/.ready),$(BIN)/python,$(PYTHON))
# A release that is not final makes pip take others that are not, of torch alone.
TORCH_SPEC := $(if $(filter nightly,$(TORCH)),"torch>=2.11.dev0",$(addprefix torch==,$(filter-out newest,$(TORCH))))
ifeq ($(TORCH)$(TORCH_INDEX),nightly)
$(error TORCH=nightly needs TORCH_INDEX=, the index of nightly builds that torch's page of installation names)
endif
# Of the modules that pip would compile one after another, half a minute, most are never imported;
# Python keeps what it compiles as it imports.
PIP_INSTALL := -m pip install --quiet --no-compile --disable-pip-version-check $(addprefix --extra-index-url ,$(TORCH_INDEX))
unexport PYTHONDONTWRITEBYTECODE

# make test FOLDERS="tests/plan tests/ops"; without it all folders
FOLDERS ?=
# Of tests/stages.py.
STAGE ?= first
# worksteal: a worker keeps a file's tests together, and with them what their fixtures made.
PYTEST := -m pytest -n auto --dist worksteal
# make demo RECIPE=mxfp8 OVERRIDE=dequantized DEMO_FLAGS="--seconds 20"
DEMO_FLAGS ?=
# make demo MODEL=moe
MODEL ?= lm
DEMO_lm := -m fuser demo
DEMO_moe := examples/train_moe.py
RECIPE_FLAGS := $(if $(RECIPE),--recipe $(RECIPE)) $(if $(OVERRIDE),--override $(OVERRIDE))

# make demo-sharded SHARDED_FLAGS="--steps 50"; on GPUs SHARDED_FLAGS="--device cuda"
SHARDED_FLAGS ?= --seconds 25
RANKS ?= 2
# By address, because a machine without a network may not know its own name.
TORCHRUN := OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --local-addr 127.0.0.1 --nproc-per-node $(RANKS)

# make compare COMPARE_FLAGS="--recipes mxfp8 nvfp4 --steps 400"
COMPARE_FLAGS ?=

# make mutants MUTANTS_FLAGS="--only kernels --jobs 1"
MUTANTS_FLAGS ?=

# make wing-out WING="memory plans"
WING ?= cuts

# make test-cuda-build CUDA_TORCH=torch==2.14.1; by default the release of `make test`
CUDA_TORCH ?= $(shell grep ^torch== constraints.txt)
CUDA_VENV ?= .venv-cuda
INTEGRATIONS_VENV ?= .venv-integrations
CUDA_BUILD_TESTS := $(addprefix tests/,plan runtime tensors recipes ops experts te)
INTEGRATIONS_TESTS := tests/integrations
MEGATRON_VENV ?= .venv-megatron
MEGATRON_TESTS := tests/integrations/test_megatron.py
FLOORS_VENV ?= .venv-floors
FLOORS_TESTS := $(addprefix tests/,plan tensors ops docs)

# make wheel; the tools that build, and where the result is installed
BUILD_VENV ?= .venv-build
WHEEL_VENV ?= .venv-wheel
# make release-check TAG=v0.2.0 REPOSITORY=https://HOST/OWNER/NAME
TAG ?=
REPOSITORY ?=

.PHONY: demo demo-sharded compare mutants test test-stage test-fast test-nightly counts sentences \
	compiled test-cuda-build test-floors test-integrations test-megatron test-elsewhere docs lint \
	format wheel \
	release-check release-notes clean

demo: $(VENV)/.ready
	OMP_WAIT_POLICY=passive $(BIN)/python $(DEMO_$(MODEL)) $(RECIPE_FLAGS) $(DEMO_FLAGS)

demo-sharded: $(VENV)/.ready
	$(TORCHRUN) -m fuser demo --fsdp quantized --recipe current --out out/fsdp $(SHARDED_FLAGS)
	$(TORCHRUN) -m fuser demo --tp $(RANKS) --sp --out out/tp $(SHARDED_FLAGS)
	$(TORCHRUN) examples/train_moe.py --ep $(RANKS) --out out/ep $(SHARDED_FLAGS)

compare: $(VENV)/.ready
	$(BIN)/python examples/compare_recipes.py $(COMPARE_FLAGS)

mutants: $(VENV)/.ready
	$(BIN)/python tests/mutants/run.py $(MUTANTS_FLAGS)

test: $(VENV)/.ready
	$(BIN)/python tests/stages.py $(if $(FOLDERS),--folders $(FOLDERS))

# make test-stage STAGE=plain; CI has a job for each.
test-stage: $(VENV)/.ready
	$(BIN)/python tests/stages.py --stage $(STAGE) $(if $(FOLDERS),--folders $(FOLDERS))

# With every combination of the parameters of tests that `make test` takes a sample of.
test-nightly: $(VENV)/.ready
	$(BIN)/python tests/stages.py --full

# The file of the calls of a warm step, tests/runtime/call_counts.json, as they are now.
counts: $(VENV)/.ready
	$(BIN)/python -m pytest -n0 tests/runtime/test_call_counts.py --write-counts

# make test-fast AFFECTED_FLAGS="--since HEAD~3 --steps 3"
test-fast: $(VENV)/.ready
	tests=$$($(BIN)/python tests/affected.py $(AFFECTED_FLAGS)) && \
		$(BIN)/python $(PYTEST) $$tests

# The tests that need neither ranks nor compilers, with a torch that is built for CUDA, as
# `pip install torch` brings it; no GPU needed.
test-cuda-build: $(CUDA_VENV)/.ready
	$(CUDA_VENV)/bin/python $(PYTEST) $(CUDA_BUILD_TESTS)

# The tests of other libraries, in an environment of their own, on top of .venv if it is there;
# torchtitan's need triton too.
test-integrations: $(INTEGRATIONS_VENV)/.ready
	$(INTEGRATIONS_VENV)/bin/python $(PYTEST) $(INTEGRATIONS_TESTS)

# With the newest megatron-core; PYTHON= must be 3.12 or newer, which it needs. It may fail.
test-megatron: $(MEGATRON_VENV)/.ready
	$(MEGATRON_VENV)/bin/python $(PYTEST) $(MEGATRON_TESTS)

# With the oldest releases that pyproject.toml allows; PYTHON= must be 3.10 or 3.11, which they support.
test-floors: $(FLOORS_VENV)/.ready
	$(FLOORS_VENV)/bin/python $(PYTEST) $(FLOORS_TESTS)

# Compiles the kernels whose text differs from tests/kernels/compiled.json, and records them there:
# `make test` then has nothing to compile.
compiled: $(VENV)/.ready
	$(BIN)/python tests/compiled_kernels.py

# The distributions, built as for the package index, and the wheel in a fresh environment, to which
# .venv lends what fuser requires if it is there.
wheel: $(BUILD_VENV)/.ready
	rm -rf dist $(WHEEL_VENV)
	SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) $(BUILD_VENV)/bin/python -m build --no-isolation
	$(BUILD_VENV)/bin/python -m twine check --strict dist/*
	$(BASE_PYTHON) -m venv $(WHEEL_VENV)
	test ! -e $(VENV)/.ready || $(BIN)/python tests/lent.py $(WHEEL_VENV) fuser-ops
	$(WHEEL_VENV)/bin/python $(PIP_INSTALL) -c constraints.txt dist/*.whl
	$(WHEEL_VENV)/bin/python -I tests/installed.py

release-check:
	$(PYTHON) tests/release.py check --tag "$(TAG)" --repository "$(REPOSITORY)"

release-notes:
	@$(PYTHON) tests/release.py notes

$(BUILD_VENV)/.ready: constraints.txt
	$(PYTHON) -m venv $(BUILD_VENV)
	$(BUILD_VENV)/bin/python $(PIP_INSTALL) -c constraints.txt build setuptools twine
	touch $@

$(FLOORS_VENV)/.ready: pyproject.toml forecast/pyproject.toml constraints.txt constraints-floors.txt
	$(PYTHON) -m venv $(FLOORS_VENV)
	sed 's/==.*/==/' constraints-floors.txt | grep -v -f - constraints.txt > $(FLOORS_VENV)/constraints.txt
	$(FLOORS_VENV)/bin/python $(PIP_INSTALL) -c constraints-floors.txt -c $(FLOORS_VENV)/constraints.txt \
		-e ".[test]" -e ./forecast
	touch $@

$(INTEGRATIONS_VENV)/.ready: pyproject.toml forecast/pyproject.toml constraints.txt
	$(BASE_PYTHON) -m venv $(INTEGRATIONS_VENV)
	test ! -e $(VENV)/.ready || $(BIN)/python tests/lent.py $(INTEGRATIONS_VENV)
	$(INTEGRATIONS_VENV)/bin/python $(PIP_INSTALL) \
		-c constraints.txt -e ".[test,integrations]" -e ./forecast
	touch $@

$(MEGATRON_VENV)/.ready: pyproject.toml forecast/pyproject.toml constraints.txt
	$(PYTHON) -m venv $(MEGATRON_VENV)
	$(MEGATRON_VENV)/bin/python $(PIP_INSTALL) \
		-c constraints.txt -e ".[test]" -e ./forecast megatron-core psutil triton
	touch $@

$(CUDA_VENV)/.ready: pyproject.toml forecast/pyproject.toml constraints.txt
	$(PYTHON) -m venv $(CUDA_VENV)
	grep -v ^torch== constraints.txt > $(CUDA_VENV)/constraints.txt
	$(CUDA_VENV)/bin/python $(PIP_INSTALL) \
		-c $(CUDA_VENV)/constraints.txt "$(CUDA_TORCH)" -e ".[test]" -e ./forecast
	$(CUDA_VENV)/bin/python -c "import sys, torch; torch.version.cuda or sys.exit(f'pip has installed \
	torch {torch.__version__}, which is not built for CUDA; CUDA_TORCH= names another release.')"
	touch $@

# As on another machine: CONTRIBUTING.md, "What a test may expect of torch".
test-elsewhere: $(VENV)/.ready
	FUSER_TEST_OTHER_SUMS=1 ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 \
		$(BIN)/python $(PYTEST) tests --ignore tests/gpu

# The library without a wing or a product of tests/rooms.py.
wing-out: $(VENV)/.ready
	$(BIN)/python tests/wing_out.py "$(WING)" -- $(PYTEST_FLAGS)

# The site, in out/site; needs Python 3.11 or later, and no network.
docs: $(VENV)/.ready
	$(BIN)/python -m sphinx -W --keep-going -b html -c docs/site . out/site
	@echo "out/site/docs/index.html"

# The table of messages, docs/site/messages.tsv, from the sources; the codes in it are kept.
sentences: $(VENV)/.ready
	$(BIN)/python docs/site/write_messages.py

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(VENV)/.ready: pyproject.toml forecast/pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	sed '$(if $(TORCH),/^torch==/d)' constraints.txt > $(VENV)/constraints.txt
	$(BIN)/python $(PIP_INSTALL) -c $(VENV)/constraints.txt $(TORCH_SPEC) -e ".[dev]" -e ./forecast
	touch $@

clean:
	rm -rf .venv .venv-torch-* $(CUDA_VENV) $(INTEGRATIONS_VENV) $(MEGATRON_VENV) $(FLOORS_VENV) \
		$(BUILD_VENV) $(WHEEL_VENV) out build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
