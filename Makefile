# Every target makes what it needs, from python3 (3.10 or newer) and make alone; the second time is quick.

PYTHON ?= python3
VENV   := .venv
RUN    := $(VENV)/bin/python
PIP    := $(RUN) -m pip install -qq --disable-pip-version-check --constraint constraints.txt
ARGS   ?=

# On some processors oneDNN's choice for a bfloat16 matmul dies with an illegal instruction; under this cap it
# does not. It only lowers what oneDNN may use, and is set here because a library must not set it for others.
export ONEDNN_MAX_CPU_ISA ?= AVX512_CORE_BF16

.DEFAULT_GOAL := help
.PHONY: help train test check format docs bench zoo faults kills release-check

help:  ## this list
	@echo 'make TARGET [ARGS="..."]'
	@echo
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1\t\2/p' $(MAKEFILE_LIST)

train: $(VENV)/.ready  ## the textbook's experiment, measured: ARGS="--epochs 3 --clip 1.0"
	@$(VENV)/bin/bigbatch train $(ARGS)

# One torch thread per worker: workers that each start a thread per core only wait for one another.
test: $(VENV)/.ready-test  ## every test: ARGS="-k window -x"
	@OMP_NUM_THREADS=1 $(RUN) -m pytest --numprocesses auto --maxprocesses 8 --dist worksteal $(ARGS)

check: $(VENV)/.ready-lint  ## format, lint and types, changing nothing
	@$(RUN) -m ruff format --check .
	@$(RUN) -m ruff check .
	@$(RUN) -m mypy

format: $(VENV)/.ready-lint  ## put the code into its format and fix what can be fixed
	@$(RUN) -m ruff check --fix-only --quiet .
	@$(RUN) -m ruff format .

docs: $(VENV)/.ready-docs  ## the documentation, into build/site: ARGS="serve" shows it while you write
	@NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs $(or $(ARGS),build --quiet)

bench: $(VENV)/.ready-bench  ## the tables of exactness and overhead: ARGS="--json"
	@$(RUN) -m benchmarks.exactness $(ARGS)
	@$(RUN) -m benchmarks.overhead $(ARGS)

zoo: $(VENV)/.ready-zoo  ## other libraries' models and losses: ARGS="--seed 1"
	@OMP_NUM_THREADS=1 $(RUN) -m tests.zoo $(ARGS)

faults: $(VENV)/.ready-test  ## 10,000 exceptions at every place of a step, some minutes: ARGS="--seed 7 --count 500 --jobs 2"
	@OMP_NUM_THREADS=1 $(RUN) -m tests.faults $(ARGS)

kills: $(VENV)/.ready-test  ## 200 trainings, killed and resumed: ARGS="--seed 7 --count 20"
	@OMP_NUM_THREADS=1 $(RUN) -m tests.faults.kills $(ARGS)

# Both distributions, from their sdists: built, checked, installed into bare environments, and tried there.
release-check: $(VENV)/.ready  ## build, install and try what is released
	@$(PIP) build twine
	@rm -rf dist && $(RUN) -m build --outdir dist . && $(RUN) -m build --outdir dist lint
	@$(RUN) -m twine check --strict dist/*
	@$(PYTHON) -m venv dist/bare && dist/bare/bin/pip install -qq --disable-pip-version-check dist/bigbatch_lint-*.whl
	@! dist/bare/bin/bigbatch-lint tests/lint/cases/BB103.py >dist/findings && grep BB103 dist/findings | head -1
	@$(PYTHON) -m venv --clear dist/bare
	@dist/bare/bin/pip install -qq --disable-pip-version-check --constraint constraints.txt torch numpy dist/bigbatch-0*.whl
	@cd dist && bare/bin/python -c 'import bigbatch; bigbatch.Accumulator, bigbatch.BigStep; print("imported", bigbatch.__file__)'
	@dist/bare/bin/pip install -qq --disable-pip-version-check typer
	@cd dist && bare/bin/bigbatch train --epochs 1

# The environment grows in steps, so that the first command of a newcomer waits for little. Each stamp
# is written last: an interrupted install is taken up again.
$(VENV)/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "bigbatch needs Python 3.10 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1)." >&2; \
	  echo "hint: name another one, as in: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(RUN) -m pip --version >/dev/null 2>&1 || { echo "Making $(VENV) ..." >&2; $(PYTHON) -m venv $(VENV); }
	@echo "Installing torch and bigbatch into $(VENV) ..." >&2
	@$(PIP) torch numpy  # numpy: torch warns at import where it is missing
	@$(PIP) --editable '.[cli]'
	@touch $@

$(VENV)/.ready-bench: $(VENV)/.ready
	@echo "Installing what the benchmarks compare with ..." >&2
	@$(PIP) --editable '.[bench]'
	@touch $@

$(VENV)/.ready-test: $(VENV)/.ready-bench
	@echo "Installing the test tools ..." >&2
	@$(PIP) --editable '.[test]'
	@touch $@

$(VENV)/.ready-docs: $(VENV)/.ready
	@echo "Installing what makes the documentation ..." >&2
	@$(PIP) --editable '.[docs]'
	@touch $@

# mypy reads the tests too, so it needs what they import.
$(VENV)/.ready-lint: $(VENV)/.ready-test
	@echo "Installing the linters ..." >&2
	@$(PIP) --editable '.[lint]'
	@touch $@

# Beside a CPU build of torch PyPI's torchvision has models but no operators, and a transformers that finds it does not
# import: so it is installed apart, with what needs it, where the zoo alone looks.
$(VENV)/.ready-zoo: $(VENV)/.ready-test
	@echo "Installing the libraries of the zoo ..." >&2
	@$(PIP) --editable '.[zoo]'
	@$(PIP) --no-deps --upgrade --target $(VENV)/zoo timm torchvision segmentation-models-pytorch
	@touch $@
