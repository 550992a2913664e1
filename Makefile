# The commands of the project. Each sets up what it needs; see tools/setup.sh.
PYTHON := .venv/bin/python
JOBS := $(shell nproc)

.PHONY: help setup library build demo test bench docs format lint sanitize asan tsan fuzz valgrind check-wheel clean
help:  ## list the commands
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' Makefile | expand -t 16

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

test: build  ## check the format, then run the C++ tests, again with sanitizers, and the Python tests
	tools/check_format.sh
	ctest --preset dev -j $(JOBS)
	$(MAKE) sanitize
	$(PYTHON) -m pytest -q -n $(JOBS)

sanitize: asan tsan  ## C++ tests under the address, undefined behaviour and thread sanitizers
asan tsan: setup
	cmake --preset $@ >/dev/null
	cmake --build --preset $@ -j $(JOBS)
	ctest --preset $@ -j $(JOBS)

# Memcheck's long double has the precision of a double: no tests that compare doubles with the long double oracle.
valgrind: build  ## small C++ tests of the release build under memcheck
	valgrind --quiet --error-exitcode=1 --leak-check=full build/tests/cpp/dualkv_tests --gtest_brief=1 \
	  --gtest_filter='Forest*:Pack*:AttentionErrors*:Attention.KeysOnly*:Attention.Nan*:LinearLogprob*Refus*:LinearLogprobOfType/1.BitsOf*:Half*'

fuzz: setup  ## ten minutes of any bytes as calls of the C interface; needs clang-14 and libclang-rt-14-dev
	cmake --preset fuzz >/dev/null
	cmake --build --preset fuzz -j $(JOBS) --target abi_fuzz
	mkdir -p out/corpus/abi
	build/fuzz/fuzz/abi_fuzz -max_total_time=600 -max_len=600 out/corpus/abi fuzz/corpus/abi

check-wheel:  ## build the wheel from the last commit, try it with the oldest torch; downloads 3 GB
	tools/check_wheel.sh

bench: build  ## benchmarks of the C++ side, and attention and log-probs against PyTorch
	build/bench/dualkv_bench
	PYTHONPATH=python $(PYTHON) bench/attention_cpu.py
	PYTHONPATH=python $(PYTHON) bench/linear_logprob.py

CHARTS := $(addprefix docs/images/,attention.svg attention_forward.svg learning.svg)
docs: library $(CHARTS)  ## draw the pictures of docs/
	PYTHONPATH=python $(PYTHON) tools/draw_plans.py
	PYTHONPATH=python $(PYTHON) tools/draw_hopper_forward.py
	PYTHONPATH=python $(PYTHON) tools/draw_hopper_backward.py
	$(PYTHON) tools/draw_policy_update.py bench/results/h200/policy_update.json docs/images/policy_update.svg docs/policy_update.md

docs/images/attention.svg docs/images/attention_forward.svg: bench/results/h200/attention.json tools/draw_attention_bench.py tools/charts.py bench/attention_batches.py
	$(PYTHON) tools/draw_attention_bench.py $< $@ $(if $(findstring forward,$@),forward)

docs/images/learning.svg: bench/results/cpu/learning.json tools/draw_learning.py tools/charts.py
	$(PYTHON) tools/draw_learning.py $< $@

format: setup  ## format all files
	tools/check_format.sh --fix

lint: build  ## static analysis
	clang-tidy -p build --quiet $(shell git ls-files 'src/*.cpp')
	.venv/bin/ruff check .

clean:  ## remove the build folder
	rm -rf build
