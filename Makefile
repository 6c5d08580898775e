# Builds, tests, benchmarks and runs inflight. `make help` lists the targets.
#
#   make PYTHON=python3.12 …   builds .venv with another Python (3.10 to 3.13)
#   make TORCH_INDEX=URL …     installs torch from another package index, such as that of its CPU builds
#   make serve ARGS="--tensor-parallel-size 2"   hands options to `inflight serve`; other targets hand theirs to what they
#                                               run, except help, prometheus, aarch64, lint and clean, which take none

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
CHECKPOINT := model_repository/llm/1/checkpoint
IMAGE ?= inflight:latest
PROMETHEUS := build/prometheus
AARCH64 := build/aarch64
ARGS ?=
# Of each run the slowest tests are told; CONTRIBUTING.md has a budget for each folder.
DURATIONS := --durations 10 --durations-min 1

# Tests start processes by the hundred, each of which would compile all modules of the engine again.
unexport PYTHONDONTWRITEBYTECODE

# Package index of another build of torch than the default one. Without a GPU the CPU build suffices; it is gigabytes
# smaller.
TORCH_INDEX ?=
PIP := $(BIN)/python -m pip --disable-pip-version-check
PIP_INSTALL := $(PIP) install --constraint constraints.txt --no-warn-script-location

.PHONY: help serve docs pictures test test-full test-changed references green unit kernels L0 prometheus aarch64 lint \
  bench bench-features bench-host bench-openai bench-front-ends load-test demo-survival families chaos mutants default-model dist \
  sbom image test-gpu gpu-bench gpu-bench-kernels gpu-tune-kernels clean

help: ## list the targets
	@sed -n 's/^\([a-zA-Z0-9-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | while IFS=$$'\t' read -r word meaning; do \
	  printf '  make %-17s %s\n' "$$word" "$$meaning"; done

$(READY): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "There is no $(PYTHON) here: name a Python 3.10 to 3.13 with make PYTHON=…" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' || { \
	  echo "inflight runs on Python 3.10 to 3.13, and $(PYTHON) is $$($(PYTHON) -V): name another with make PYTHON=…" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "$(PYTHON) cannot make virtual environments: install its package python3-venv, or name another with make PYTHON=…" >&2; exit 1; }
	@if $(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 13))'; then \
	  echo "Python 3.13: numpy 1.26 is built from source, which takes some minutes, once."; \
	  command -v c++ >/dev/null || { echo "That needs a C++ compiler, and there is none: install g++, or name an older Python with make PYTHON=…" >&2; exit 1; }; fi
	@if [ ! -x $(BIN)/python ]; then echo "Making $(VENV) with $$($(PYTHON) -V)"; $(PYTHON) -m venv $(VENV); fi
	$(PIP_INSTALL) --upgrade pip
	$(PIP_INSTALL) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) torch
	$(PIP_INSTALL) editables hatchling
	$(PIP_INSTALL) --no-build-isolation --editable '.[dev]'
	@rmdir $(VENV)/lib/python3*/site-packages/inflight 2>/dev/null || true  # left empty by an older install; it would hide ours
	$(BIN)/inflight install-server
	@touch $@

serve: $(READY) ## serve the default model until Ctrl-C, and stream one completion
	@exec $(BIN)/inflight serve $(ARGS)

# What waits for servers leaves the cores to what computes, so unit tests fill one run with those against servers.
test: $(READY) prometheus aarch64 kernels ## run every test; builds .venv first if needed
	$(FILES_AT_A_TIME) 4 ci/L0_* ci/unit $(DURATIONS) $(UNCHANGED)

# Each random history of the scheduler and the KV cache is one of 50 steps.
test-full: ## the same with what passed before, and 20 times as many random histories of scheduler and KV cache
	INFLIGHT_FUZZ_EXAMPLES=2000 INFLIGHT_REFERENCES=live $(MAKE) test GREEN=run

test-changed: $(READY) ## run the test files that depend on what changed since main; ARGS="--base HEAD~3 -- -x"
	$(BIN)/python -m ci.changed_tests $(ARGS)

references: $(READY) ## compute with transformers what ci/golden/references.json lacks of what tests compare with
	rm -rf build/references
	INFLIGHT_REFERENCES=keep $(FILES_AT_A_TIME) 2 $(REFERRING)
	$(BIN)/python -m ci.references

# For machines without a cache of their own, such as those of CI. Each kind of processor has its digests. What passed
# before with these files, in `make test`, runs no second time: after that this takes seconds.
green: $(READY) aarch64 ## run what make test may leave out and has not passed here, and keep in ci/green.json what passed
	$(MAKE) kernels GREEN=keep
	$(FILES_AT_A_TIME) 2 ci/unit/gpu ci/unit/guides ci/unit/kernels ci/unit/models --green keep

# Test files that ask transformers for a network's tokens by ci/helpers/references.py.
REFERRING = $$(grep -lE "TinyCheckpoint|make_checkpoint|write_checkpoint|Sample\.of|causal_classes" -r ci/unit --include="test_*.py")

# Tests that load no network and start no process run side by side, a worker per core; the slow ones, and those against
# servers, two and four files at a time (ci/conftest.py puts the longest first). Their networks then have one thread
# each: threads that wait for each other by spinning, more of them than cores, made such tests take three times as long.
# Tests of several threads say how many.
FILES_AT_A_TIME := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --dist loadfile --no-loadscope-reorder --numprocesses

# Test files whose results follow from files and versions alone are left out where these passed before with the same
# ones (ci/helpers/green_runs.py), unless options choose tests.
GREEN := skip
UNCHANGED := $(if $(strip $(ARGS)),,--green $(GREEN))

unit: $(READY) ## run the tests that need no server
ifeq ($(strip $(ARGS)),)
	$(BIN)/python -m pytest ci/unit -m "not slow" --numprocesses auto --dist loadfile $(DURATIONS) $(UNCHANGED)
	$(FILES_AT_A_TIME) 2 ci/unit -m slow $(DURATIONS) $(UNCHANGED)
else
	$(BIN)/python -m pytest ci/unit $(DURATIONS) $(ARGS)
endif

# A process of its own, because triton's interpreter, which runs the kernels, is switched on for a whole process.
kernels: $(READY) ## run the kernels' tests
	$(BIN)/python -m pytest ci/kernels --numprocesses auto --dist worksteal $(DURATIONS) $(UNCHANGED) $(ARGS)

L0: $(READY) prometheus ## run the tests against a real tritonserver
	$(FILES_AT_A_TIME) 4 ci/L0_* $(DURATIONS) $(ARGS)

# Of Debian's package, unpacked and not installed. Without it the tests that ask it are skipped.
prometheus: ## fetch Prometheus, which checks metrics, alert rules and dashboard, where apt has it
	@if ! command -v prometheus promtool >/dev/null && [ ! -x $(PROMETHEUS)/usr/bin/promtool ]; then \
	  mkdir -p $(PROMETHEUS) && cd $(PROMETHEUS) && apt-get -q download prometheus && dpkg-deb -x prometheus_*.deb . \
	    && rm prometheus_*.deb || echo "Prometheus cannot be had here: the tests of ci/L0_monitoring will be skipped."; fi

# Likewise. The compiler uses what g++ of this machine brings: libisl, libmpc, libmpfr. Of the emulators only one is kept,
# last: with it all is there.
AARCH64_PACKAGES := g++-12-aarch64-linux-gnu gcc-12-aarch64-linux-gnu cpp-12-aarch64-linux-gnu \
  binutils-aarch64-linux-gnu libgcc-12-dev-arm64-cross libgcc-s1-arm64-cross libgomp1-arm64-cross \
  libstdc++-12-dev-arm64-cross libstdc++6-arm64-cross libc6-dev-arm64-cross libc6-arm64-cross linux-libc-dev-arm64-cross
aarch64: ## fetch a compiler for aarch64 and an emulator, which test the C++ for it, where apt has them
	@if [ ! -x $(AARCH64)/usr/bin/qemu-aarch64-static ] \
	    && ! { command -v aarch64-linux-gnu-g++ && command -v qemu-aarch64-static; } >/dev/null; then \
	  rm -rf $(AARCH64) && mkdir -p $(AARCH64) && cd $(AARCH64) \
	    && apt-get -q download $(AARCH64_PACKAGES) qemu-user-static \
	    && dpkg-deb --fsys-tarfile qemu-user-static_*.deb > qemu.tar && rm qemu-user-static_*.deb \
	    && for package in *.deb; do dpkg-deb -x $$package .; done && rm *.deb \
	    && tar -xf qemu.tar ./usr/bin/qemu-aarch64-static && rm qemu.tar \
	    || echo "A compiler for aarch64 cannot be had here: ci/unit/kernels/test_aarch64.py will be skipped."; fi

lint: $(READY) ## check style, types, the C++ and the Dockerfile
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror kernels/inflight_kernels/cpu/native/*.* kernels/inflight_kernels/cpu/native/isa/* \
	  ci/helpers/native_digests/*
	$(BIN)/hadolint Dockerfile

# mkdocs-material tells of its successor at each build unless it is told not to.
docs: $(READY) ## build the site of all pages into build/site; a broken link fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet --config-file ci/site/mkdocs.yml

pictures: $(READY) prometheus ## take and draw the pages' pictures again, from real runs
	$(BIN)/python -m ci.pictures.survival --record
	$(BIN)/python -m ci.pictures.diagrams
	@$(BIN)/python -m ci.pictures.at_work

bench: $(READY) ## measure the engine against transformers: a table and one JSON line
	$(BIN)/python -m ci.bench $(ARGS)

bench-host: $(READY) ## measure the host's time per step, with a device that does nothing
	$(BIN)/python -m ci.bench.host_work $(ARGS)

bench-openai: $(READY) ## measure the OpenAI server's CPU time per streamed token, on a played engine
	$(BIN)/python -m ci.bench.openai_stream $(ARGS)

bench-front-ends: $(READY) ## measure gRPC streams and the OpenAI server's against the engine in process
	$(BIN)/python -m ci.bench.front_ends $(ARGS)

bench-features: $(READY) ## measure what features gain or cost
	$(BIN)/python -m ci.bench.features $(ARGS)

load-test: $(READY) ## start a server and load-test it: a table, a plot and a page
	@$(BIN)/python ci/load_test.py $(ARGS)

demo-survival: $(READY) ## kill a rank in the middle of a JSON answer, and compare its bytes with an undisturbed one's
	@$(BIN)/python ci/demo_survival.py $(ARGS)

families: $(READY) ## serve a small checkpoint of each native family, and compare what clients get with transformers
	@$(BIN)/python -m ci.served_families $(ARGS)

chaos: $(READY) ## inject faults into a server under load for 10 minutes, and compare every stream with what it gets alone
	@$(BIN)/python -m ci.chaos $(ARGS)

mutants: $(READY) ## plant 40 small faults, one at a time, and tell which tests catch them; ARGS="--seed 7 --faults 100"
	@$(BIN)/python -m ci.mutants $(ARGS)

default-model: $(READY) ## train the default checkpoint and its adapters again
	$(BIN)/python ci/default_model/train.py --out $(CHECKPOINT) $(ARGS)
	$(BIN)/python ci/default_model/train_adapters.py --checkpoint $(CHECKPOINT) --out $(CHECKPOINT)/../adapters

# Each wheel is built from its own sdist, which is thereby known to be whole. VARIANTS are the sets of instructions that
# the engine's carries libraries for: all, none, here, or names (kernels/inflight_kernels/cpu/prebuilt.py).
DIST := dist
VARIANTS := all
LIBRARIES = $(abspath $(DIST))/libraries
SDIST = $(abspath $(BIN))/python -m hatchling build --target sdist --directory $(abspath $(DIST))
dist: $(READY) ## build sdist and wheel, of the engine and of the client alone, in dist/; VARIANTS=here is faster
	@rm -rf $(DIST)/inflight-* $(DIST)/inflight_client-* $(LIBRARIES)
	PYTHONPATH=kernels $(BIN)/python -m inflight_kernels.cpu.prebuilt $(LIBRARIES) $(VARIANTS)
	$(SDIST)
	cd client && $(SDIST)
	INFLIGHT_LIBRARIES=$(LIBRARIES) $(PIP) wheel --quiet --no-deps --no-build-isolation --wheel-dir $(DIST) \
	  $(DIST)/*.tar.gz
	@rm -r $(LIBRARIES)
	@ls -l $(DIST)/*.whl

sbom: $(READY) ## write the software bill of materials (CycloneDX) of what constraints.txt pins, in dist/
	@$(BIN)/python -m ci.sbom $(ARGS)

# A GPU machine needs neither tritonserver nor .venv: a Python with torch, triton, pytest and the engine's packages
# suffices. These packages may lie in build/peers, which is searched after what is installed.
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
GPU_PATH := .:backend:kernels:client
GPU_TEST := PYTHONPATH=$(GPU_PATH) $(GPU_PYTHON) -m pytest -p no:cacheprovider

test-gpu: ## run kernel tests and engine parity on this machine's GPU
	@$(GPU_PYTHON) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null || { \
	  echo "There is no GPU here that a torch of $(GPU_PYTHON) sees: name another Python with make GPU_PYTHON=…," \
	    "or run the kernels' tests in triton's interpreter with make kernels" >&2; exit 1; }
	$(GPU_TEST) ci/kernels $(ARGS)
	$(GPU_TEST) -m gpu ci/unit/models ci/unit/runtime $(ARGS)

# Without a GPU these targets are dry runs, which measure nothing.
GPU_BENCH := PYTHONPATH=$(GPU_PATH) $(GPU_PYTHON) -m ci.bench

gpu-bench: ## test and measure the engine on this machine's GPU in under nine minutes, beside what is predicted
	$(GPU_BENCH).gpu $(ARGS)

gpu-bench-kernels: ## measure the kernels on this machine's GPU, compared with its peak rates and all installed peers
	$(GPU_BENCH).kernels $(ARGS)

gpu-tune-kernels: ## find the kernels' fastest configurations on this machine's GPU and save them as its table
	$(GPU_BENCH).kernels.tune $(ARGS)

image: ## build the container image with docker, podman or buildah
	@if tool=$$(command -v docker || command -v podman); then exec "$$tool" build --tag $(IMAGE) $(ARGS) .; \
	elif tool=$$(command -v buildah); then exec "$$tool" build --tag $(IMAGE) $(ARGS) .; \
	else echo "Building the image needs docker, podman or buildah, and none of them is here." >&2; exit 1; fi

clean: ## remove everything that was built, including .venv
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis load-test
