# The commands of the project. Each sets up what it needs; see tools/setup.sh.
PYTHON := .venv/bin/python
JOBS := $(shell nproc)

.PHONY: help setup library build demo test bench docs format lint clean
help:  ## list the commands
	@sed -n 's/^\([a-z]*\):.*## /  make \1\t/p' Makefile | expand -t 16

setup: .venv/.ready  ## install system packages and .venv
.venv/.ready: tools/setup.sh requirements-dev.txt
	tools/setup.sh

library: setup
	cmake --preset release >/dev/null
	cmake --build --preset release -j $(JOBS)

build: setup  ## build the library, the tests and the benchmarks
	cmake --preset dev >/dev/null
	cmake --build --preset dev -j $(JOBS)

demo: library  ## one GRPO policy update, replicated and packed, side by side
	PYTHONPATH=python $(PYTHON) examples/policy_update.py --output out/demo

test: build  ## check the format, then run the C++ and the Python tests
	tools/check_format.sh
	ctest --preset dev -j $(JOBS)
	$(PYTHON) -m pytest -q -n $(JOBS)

bench: build  ## benchmarks of the C++ side, and attention and log-probs against PyTorch
	build/bench/dualkv_bench
	PYTHONPATH=python $(PYTHON) bench/attention.py
	PYTHONPATH=python $(PYTHON) bench/linear_logprob.py

docs: library  ## draw the pictures of docs/
	PYTHONPATH=python $(PYTHON) tools/draw_plans.py

format: setup  ## format all files
	tools/check_format.sh --fix

lint: build  ## static analysis
	clang-tidy -p build --quiet $(shell git ls-files 'src/*.cpp')
	.venv/bin/ruff check .

clean:  ## remove the build folder
	rm -rf build
