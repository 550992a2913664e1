"""The ctypes mirror against the header, and the loading of the library."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from dualkv import _abi, _library

ROOT = Path(__file__).resolve().parents[2]
HEADER = ROOT / "include/dualkv/dualkv.h"
STRUCTS = [
    value
    for name, value in vars(_abi).items()
    if name.startswith("dualkv_") and isinstance(value, type) and issubclass(value, ctypes.Structure)
]


@pytest.fixture
def compile_c(tmp_path):
    """Compiles C that includes the header; returns the compiler's complaints."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")

    def run(source: str) -> str:
        path = tmp_path / "mirror.c"
        path.write_text(f'#include "dualkv/dualkv.h"\n{source}\n')
        command = [
            compiler,
            "-std=c11",
            "-fsyntax-only",
            "-Wall",
            "-Werror",
            f"-I{ROOT / 'include'}",
            str(path),
        ]
        return subprocess.run(command, check=False, capture_output=True, text=True).stderr

    return run


def fields_of(struct) -> list[str]:
    """Names of all fields, those of base classes first."""
    return [name for base in reversed(struct.__mro__) for name, _ in vars(base).get("_fields_", [])]


def layout_assertions(struct) -> list[str]:
    c_name = struct.__name__
    lines = [f'_Static_assert(sizeof({c_name}) == {ctypes.sizeof(struct)}, "size of {c_name}");']
    for field in fields_of(struct):
        place = getattr(struct, field)
        lines += [
            f'_Static_assert(offsetof({c_name}, {field}) == {place.offset}, "offset of {c_name}.{field}");',
            f'_Static_assert(sizeof((({c_name}*)0)->{field}) == {place.size}, "size of {c_name}.{field}");',
        ]
    return lines


def test_structs_have_the_layout_of_the_header(compile_c):
    assert len(STRUCTS) == 19
    complaints = compile_c("\n".join(line for struct in STRUCTS for line in layout_assertions(struct)))
    assert complaints == ""


def test_a_wrong_layout_is_noticed(compile_c):
    class dualkv_tensor(ctypes.Structure):
        _fields_ = [(name, kind) for name, kind in reversed(_abi.dualkv_tensor._fields_)]

    assert "offset of dualkv_tensor.data" in compile_c("\n".join(layout_assertions(dualkv_tensor)))


def test_structs_have_all_fields_in_the_order_of_the_header():
    header = re.sub(r"/\*.*?\*/", "", HEADER.read_text(), flags=re.DOTALL)
    for struct in STRUCTS:
        body = re.search(rf"typedef struct {struct.__name__} {{(.*?)}}", header, re.DOTALL).group(1)
        assert re.findall(r"(\w+);", body) == fields_of(struct), struct.__name__


def test_constants_have_the_values_of_the_header(compile_c):
    prefixed = "ABI_VERSION OK INVALID_ARGUMENT UNSUPPORTED OUT_OF_MEMORY INTERNAL NO_WINDOW IGNORE_TARGET "
    prefixed += "FLOAT64 FLOAT32 BFLOAT16 FLOAT16 CPU CUDA"
    lines = [f'_Static_assert(DUALKV_{n} == {getattr(_abi, n)}, "{n}");' for n in prefixed.split()]
    assert compile_c("\n".join(lines)) == ""


def test_functions_take_the_arguments_of_the_header(compile_c):
    """A call of each function with the number and kinds of arguments that ctypes passes."""

    def argument(kind) -> str:
        if kind in (ctypes.c_int32, ctypes.c_int64, ctypes.c_size_t):
            return "1"
        return "(void*)0"

    calls = [
        f"  (void){name}({', '.join(map(argument, arguments))});" if result else f"  {name}((void*)0);"
        for name, (result, arguments) in _abi.FUNCTIONS.items()
    ]
    assert compile_c("void call_all(void) {\n" + "\n".join(calls) + "\n}") == ""


def test_functions_that_can_fail_are_declared_so():
    """A status that is not declared as one would never be checked."""
    declarations = re.findall(r"^DUALKV_API ([\w* ]+?)\s+(dualkv_\w+)\(", HEADER.read_text(), re.MULTILINE)
    kinds = {name: kind for kind, name in declarations}
    for name, (result, _) in _abi.FUNCTIONS.items():
        assert (result is _abi.Status) == (kinds[name] == "dualkv_status"), name


def test_every_function_of_the_table_is_in_the_library():
    for name in _abi.FUNCTIONS:
        assert getattr(_library.library, name)


@pytest.mark.parametrize(
    "status, exception",
    [
        (_abi.INVALID_ARGUMENT, ValueError),
        (_abi.UNSUPPORTED, NotImplementedError),
        (_abi.OUT_OF_MEMORY, MemoryError),
        (_abi.INTERNAL, RuntimeError),
    ],
)
def test_statuses_become_exceptions(status, exception):
    with pytest.raises(ValueError, match="window_left must be >= 0"):  # leaves a message
        _library.library.dualkv_forest_visible_pairs(
            _library.Handle(
                _library.library.dualkv_forest_create, _library.library.dualkv_forest_destroy, 0, None, None
            ),
            -2,
            ctypes.byref(ctypes.c_int64()),
        )
    with pytest.raises(exception, match="window_left must be >= 0") as caught:
        _library.check(status)
    assert type(caught.value) is exception


def test_a_handle_destroys_its_object_once():
    destroyed = []

    def create(argument, pointer):
        pointer._obj.value = argument + 1

    handle = _library.Handle(create, lambda pointer: destroyed.append(pointer.value), 41)
    assert handle.address == 42 and destroyed == []
    del handle
    assert destroyed == [42]


def test_a_library_of_another_version_is_refused(tmp_path):
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    source = tmp_path / "other.c"
    source.write_text("unsigned dualkv_abi_version(void) { return 999; }")
    path = tmp_path / "libdualkv.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", path, source], check=True)
    with pytest.raises(ImportError, match=r"999.*needs version 1.*pip install"):
        _library.load(path)


def test_a_missing_library_says_where_it_was_looked_for_and_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setattr(_library, "__file__", str(tmp_path / "python/dualkv/_library.py"))
    with pytest.raises(ImportError, match=rf"{re.escape(str(tmp_path))}.*pip install.*cmake"):
        _library.find()


@pytest.fixture
def checkout(monkeypatch, tmp_path):
    """A source checkout without a library, which the package takes for its own; returns its package folder."""
    package = tmp_path / "python/dualkv"
    for path in (package, tmp_path / "build/asan", tmp_path / "include/dualkv"):
        path.mkdir(parents=True)
    (tmp_path / "include/dualkv/dualkv.h").touch()
    monkeypatch.setattr(_library, "__file__", str(package / "_library.py"))
    return package


def test_the_library_is_looked_for_beside_the_package_first_and_then_in_the_build_folder(checkout, tmp_path):
    for folder in (tmp_path / "build", checkout):
        (folder / _library._FILE_NAME).touch()
        assert _library.find() == folder / _library._FILE_NAME


def test_a_build_with_sanitizers_is_never_found(checkout, tmp_path):
    (tmp_path / "build/asan" / _library._FILE_NAME).touch()
    with pytest.raises(ImportError, match="was not found"):
        _library.find()
