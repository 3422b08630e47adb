# Everything a newcomer runs. Each target makes the environment it needs: nothing has to be installed by hand.
PYTHON ?= python3
VENV   ?= .venv
RUN    := $(VENV)/bin
DEMO   ?= engines/demo

.PHONY: help env demo test test-all lint types format bench clean

help:
	@echo "make demo      build, verify, run and profile a RocketKV engine of the shipped model (under ten minutes)"
	@echo "make test      lint, types and the quick tests (under ten minutes)"
	@echo "make test-all  the above and the long suites, with coverage (under 25 minutes); what CI runs"
	@echo "make bench     the CPU benchmarks; results go to benchmarks/results/"

env: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' \
		|| { echo "error: kvc-trt needs Python 3.10 to 3.13, found $$($(PYTHON) --version); set PYTHON=python3.x"; exit 3; }
	$(PYTHON) -m venv $(VENV)
	$(RUN)/pip install --quiet --disable-pip-version-check --editable '.[test]'
	@touch $@

demo: env
	@KVC_TRT=$(RUN)/kvc-trt DEMO=$(DEMO) PYTHON=$(RUN)/python sh docs/demo/demo.sh

lint: env
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .

types: env
	$(RUN)/mypy

format: env
	$(RUN)/ruff check --fix .
	$(RUN)/ruff format .

test: lint types
	$(RUN)/pytest -m "not slow" -n 2 --dist loadfile

test-all: lint types
	$(RUN)/pytest -n 2 --dist loadfile --cov --cov-report=term:skip-covered

bench: env
	$(RUN)/python benchmarks/decode_onnxruntime.py
	$(RUN)/python benchmarks/prefill_memory.py
	$(RUN)/python benchmarks/startup.py

clean:
	rm -rf $(VENV) build dist engines .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage
