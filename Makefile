# make demo | test | lint | format | docs | clean: everything from a fresh clone, with Python 3.10+ and make.
#
#   PYTHON=python3.12   the interpreter to start from
#   VENV=.venv          where the environment goes; VENV= (empty) uses PYTHON as it is and installs nothing but accel,
#                       without its dependencies: for a GPU machine that has them and reaches no package registry
#   TORCH='torch==2.9'  the torch to install where none is importable
#   TESTS='-m gpu'      what `make test` passes to pytest

PYTHON ?= python3
VENV ?= .venv
TORCH ?= $(if $(shell command -v nvidia-smi),torch,torch==2.13.0)
TESTS ?=

ifeq ($(strip $(VENV)),)
RUN := $(PYTHON)
READY := no-venv
else
RUN := $(VENV)/bin/python
READY := $(VENV)/.ready
endif

.PHONY: demo test lint format docs clean setup no-venv
.DEFAULT_GOAL := demo

demo: setup
	$(RUN) -m accel demo

test: setup
	$(RUN) -m pytest $(TESTS)

lint: setup
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

format: setup
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

# the variable: the theme's word about a mkdocs that is not out
docs: setup
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict

clean:
	rm -rf .venv build dist site *.egg-info .pytest_cache .ruff_cache .hypothesis

setup: $(READY)

# torch comes first: asked for by another package, pip would take whichever is newest
$(VENV)/.ready: pyproject.toml
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(RUN) -c 'import torch' 2>/dev/null || $(RUN) -m pip install '$(TORCH)'
	$(RUN) -m pip install -e '.[test]'
	touch $@

no-venv:
	@$(RUN) -c 'import importlib.metadata as m; m.version("fla-accel")' 2>/dev/null || \
	$(RUN) -m pip install --no-deps --no-build-isolation -e .
