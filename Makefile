# `make demo` and `make test` each set up .venv by themselves; nothing else is needed.

PYTHON ?= python3
# make test TORCH=2.14.1, or TORCH=newest: with another release of torch, in an environment of its own
TORCH ?=
VENV := .venv$(if $(TORCH),-torch-$(TORCH))
BIN := $(VENV)/bin
# make demo RECIPE=mxfp8 OVERRIDE=dequantized DEMO_FLAGS="--seconds 20"
DEMO_FLAGS ?=
# make demo MODEL=moe
MODEL ?= lm
RECIPE_FLAGS := $(if $(RECIPE),--recipe $(RECIPE)) $(if $(OVERRIDE),--override $(OVERRIDE))

# make demo-sharded SHARDED_FLAGS="--steps 50"; on GPUs SHARDED_FLAGS="--device cuda"
SHARDED_FLAGS ?= --seconds 15
RANKS ?= 2
# By address, because a machine without a network may not know its own name.
TORCHRUN := OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --local-addr 127.0.0.1 --nproc-per-node $(RANKS)

# make compare COMPARE_FLAGS="--recipes mxfp8 nvfp4 --steps 400"
COMPARE_FLAGS ?=

# make mutants MUTANTS_FLAGS="--only kernels --jobs 1"
MUTANTS_FLAGS ?=

# make test-cuda-build CUDA_TORCH=torch==2.14.1; by default the release of `make test`
CUDA_TORCH ?= $(shell grep ^torch== constraints.txt)
CUDA_VENV ?= .venv-cuda
INTEGRATIONS_VENV ?= .venv-integrations
CUDA_BUILD_TESTS := $(addprefix tests/,plan runtime tensors recipes ops experts te)

.PHONY: demo demo-sharded compare mutants test test-fast test-nightly test-cuda-build \
	test-integrations test-elsewhere docs lint format clean

demo: $(VENV)/.ready
	$(BIN)/python examples/train_$(MODEL).py $(RECIPE_FLAGS) $(DEMO_FLAGS)

demo-sharded: $(VENV)/.ready
	$(TORCHRUN) examples/train_lm.py --fsdp quantized --recipe current --out out/fsdp $(SHARDED_FLAGS)
	$(TORCHRUN) examples/train_lm.py --tp $(RANKS) --sp --out out/tp $(SHARDED_FLAGS)
	$(TORCHRUN) examples/train_moe.py --ep $(RANKS) --out out/ep $(SHARDED_FLAGS)

compare: $(VENV)/.ready
	$(BIN)/python examples/compare_recipes.py $(COMPARE_FLAGS)

mutants: $(VENV)/.ready
	$(BIN)/python tests/mutants/run.py $(MUTANTS_FLAGS)

# worksteal: a worker keeps a file's tests together, and with them what their fixtures made.
test: lint
	$(BIN)/python -m pytest -n auto --dist worksteal

# With every combination of the parameters of tests that `make test` takes a sample of.
test-nightly: lint
	$(BIN)/python -m pytest -n auto --dist worksteal --full

# make test-fast AFFECTED_FLAGS="--since HEAD~3 --steps 3"
test-fast: $(VENV)/.ready
	tests=$$($(BIN)/python tests/affected.py $(AFFECTED_FLAGS)) && \
		$(BIN)/python -m pytest -n auto --dist worksteal $$tests

# The tests that need neither ranks nor compilers, with a torch that is built for CUDA, as
# `pip install torch` brings it; no GPU needed.
test-cuda-build: $(CUDA_VENV)/.ready
	$(CUDA_VENV)/bin/python -m pytest -n auto --dist worksteal $(CUDA_BUILD_TESTS)

# The tests of models of transformers and adapters of PEFT, in an environment of their own.
test-integrations: $(INTEGRATIONS_VENV)/.ready
	$(INTEGRATIONS_VENV)/bin/python -m pytest -n auto --dist worksteal tests/integrations

$(INTEGRATIONS_VENV)/.ready: pyproject.toml forecast/pyproject.toml constraints.txt
	$(PYTHON) -m venv $(INTEGRATIONS_VENV)
	$(INTEGRATIONS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check \
		-c constraints.txt -e ".[test,integrations]" -e ./forecast
	touch $@

$(CUDA_VENV)/.ready: pyproject.toml forecast/pyproject.toml constraints.txt
	$(PYTHON) -m venv $(CUDA_VENV)
	grep -v ^torch== constraints.txt > $(CUDA_VENV)/constraints.txt
	$(CUDA_VENV)/bin/python -m pip install --quiet --disable-pip-version-check \
		-c $(CUDA_VENV)/constraints.txt "$(CUDA_TORCH)" -e ".[test]" -e ./forecast
	$(CUDA_VENV)/bin/python -c "import sys, torch; torch.version.cuda or sys.exit(f'pip has installed \
	torch {torch.__version__}, which is not built for CUDA; CUDA_TORCH= names another release.')"
	touch $@

# As on another machine: CONTRIBUTING.md, "What a test may expect of torch".
test-elsewhere: $(VENV)/.ready
	FUSER_TEST_OTHER_SUMS=1 ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 \
		$(BIN)/python -m pytest -n auto --dist worksteal tests --ignore tests/gpu

# The site, in out/site; needs Python 3.11 or later, and no network.
docs: $(VENV)/.ready
	$(BIN)/python -m sphinx -W --keep-going -b html -c docs/site . out/site
	@echo "out/site/docs/index.html"

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
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(VENV)/constraints.txt \
		$(if $(filter-out newest,$(TORCH)),torch==$(TORCH)) -e ".[dev]" -e ./forecast
	touch $@

clean:
	rm -rf .venv .venv-torch-* $(CUDA_VENV) $(INTEGRATIONS_VENV) out build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
