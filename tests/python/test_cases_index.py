"""Each failure case that the library can show has a test that is named after it, here or in tests/cpp."""

from __future__ import annotations

import re
from pathlib import Path

CASES = (
    "A1 A2 B1 B3 B4 B5 B6 B7 B8 C1 C2 C3 D1 D2 D4 E1 E2 E3 E5 F1 F2 G1 G4 H1 H3 H4 H5 H6 I1 I2 I4 I5 "
    "J1 J2 J3 J4 J5 J6 J7 J8 J9 J11 J12 K1 K2 K3 K5 K6 M1 M3 M4 M5"
).split()

TESTS = Path(__file__).parents[1]
# test_J4_J7_something( in Python, TEST(Suite, J1_Something) in C++
NAMES = re.compile(r"^(?:def test_|TEST(?:_F)?\(\w+, )((?:[A-M]\d+_)+)", re.MULTILINE)


def test_every_case_has_a_test():
    files = [*TESTS.glob("python/test_*.py"), *TESTS.glob("cpp/*_test.cpp")]
    named = {case for file in files for name in NAMES.findall(file.read_text()) for case in name.split("_")}
    assert [case for case in CASES if case not in named] == []
