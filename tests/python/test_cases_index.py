"""Each failure case that the library can show has a test that is named after it, here or in tests/cpp."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

CASES = (
    "A1 A2 B1 B3 B4 B5 B6 B7 B8 C1 C2 C3 D1 D2 D4 E1 E2 E3 E5 F1 F2 G1 G3 G4 H1 H3 H4 H5 H6 I1 I2 I4 I5 "
    "J1 J2 J3 J4 J5 J6 J7 J8 J9 J11 J12 K1 K2 K3 K5 K6 M1 M3 M4 M5"
).split()

# Of packing, schedules and denominators, which are the CPU's; and J12, five steps in fp32, which CUDA's attention does not take.
NOT_ON_A_GPU = "J1 J2 J4 J5 J7 J12 K2 K3".split()

TESTS = Path(__file__).parents[1]
# test_J4_J7_something( in Python, TEST(Suite, J1_Something) in C++
NAMES = re.compile(r"^(?:def test_|TEST(?:_F)?\(\w+, )((?:[A-M]\d+_)+)", re.MULTILINE)


def test_every_case_has_a_test():
    files = [*TESTS.glob("python/test_*.py"), *TESTS.glob("cpp/*_test.cpp")]
    named = {case for file in files for name in NAMES.findall(file.read_text()) for case in name.split("_")}
    assert [case for case in CASES if case not in named] == []


def test_every_case_that_computes_has_a_test_on_a_gpu():
    """Imported tests count: they run once more there, on CUDA tensors."""
    names = [name for path in TESTS.glob("python/test_cuda_*.py") for name in vars(import_module(path.stem))]
    on_gpu = re.compile(r"test_((?:[A-M]\d+_)+)")
    named = {case for name in filter(on_gpu.match, names) for case in on_gpu.match(name)[1].split("_")}
    assert [case for case in CASES if case not in {*named, *NOT_ON_A_GPU}] == []
