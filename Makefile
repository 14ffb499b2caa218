# Each target does all of its own set-up, on a machine that has only bash, make and Python 3.11.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

DEV := .venv
VLLM := .venv-vllm
BIN := $(DEV)/bin
# What needs .venv-vllm, where vLLM and Mooncake are.
ENGINE_TESTS := tests/vllm tests/mooncake tests/contract/test_data_node.py
# Processes that share the tests, and flags for pytest: make test ARGS='-k close -x'
JOBS ?= 2
ARGS ?=
# One thread per process: the tests run side by side on few cores.
export OMP_NUM_THREADS ?= 1

.PHONY: help demo demo-pd test test-vllm lint format bench docs proto setup setup-vllm

help: ## this list
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/^([a-z-]+):[^#]*## /\1\t/' | expand -t 14

demo: $(DEV)/STAMP ## a conversation moves between two engine processes
	@$(BIN)/session-kv demo $(ARGS)

demo-pd: $(DEV)/STAMP ## prefill and decode on different engines
	@$(BIN)/session-kv demo-pd $(ARGS)

test: $(DEV)/STAMP lint ## lint, then all tests that need no vLLM
	@echo '[test] pytest, $(JOBS) processes'
	@$(BIN)/python -m pytest tests --ignore=tests/vllm -n $(JOBS) --dist loadfile $(ARGS)

test-vllm: $(VLLM)/STAMP ## the tests against real vLLM and Mooncake
	@echo '[test-vllm] pytest $(ENGINE_TESTS)'
	@$(VLLM)/bin/python -m pytest $(ENGINE_TESTS) $(ARGS)

lint: $(DEV)/STAMP ## ruff and mypy
	@echo '[lint] ruff'
	@$(BIN)/python -m ruff check .
	@echo '[lint] mypy'
	@$(BIN)/python -m mypy

format: $(DEV)/STAMP ## rewrite the source as ruff likes it
	@$(BIN)/python -m ruff check --fix .

bench: $(DEV)/STAMP $(VLLM)/STAMP ## all measurements of tests/bench, one after the other
	@for file in tests/bench/bench_*.py; do \
	    name=$$(basename $$file .py); venv=$(DEV); \
	    [[ $$name == bench_vllm* || $$name == bench_mooncake* ]] && venv=$(VLLM); \
	    echo "[bench] $$name"; \
	    $$venv/bin/python -m tests.bench.$$name $(ARGS); \
	done

docs: $(DEV)/STAMP ## rewrite the generated pages of docs/
	@$(BIN)/python -m store_worker.cli.config_doc docs/CONFIG.md

# An old generator: its code runs with every later protobuf and grpcio, not the other way round.
proto: ## rewrite the code generated from engine_shim/proto/shim.proto
	@python3 -m venv .cache/proto
	@.cache/proto/bin/pip install -q 'grpcio-tools==1.66.2' 'setuptools<81'
	@.cache/proto/bin/python -m grpc_tools.protoc -I . --python_out=. --pyi_out=. \
	    --grpc_python_out=. engine_shim/proto/shim.proto

setup: $(DEV)/STAMP ## only make .venv

setup-vllm: $(VLLM)/STAMP ## only make .venv-vllm

$(DEV)/STAMP: pyproject.toml scripts/venv.sh
	@scripts/venv.sh dev

$(VLLM)/STAMP: pyproject.toml scripts/venv.sh
	@scripts/venv.sh vllm
