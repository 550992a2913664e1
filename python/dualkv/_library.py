"""Finds and loads the C library, and turns its status codes into exceptions."""

from __future__ import annotations

import ctypes
import sys
import weakref
from pathlib import Path

from . import _abi

_FILE_NAME = "libdualkv.dylib" if sys.platform == "darwin" else "libdualkv.so"

_EXCEPTIONS = {
    _abi.INVALID_ARGUMENT: ValueError,
    _abi.UNSUPPORTED: NotImplementedError,
    _abi.OUT_OF_MEMORY: MemoryError,
}


def find() -> Path:
    """Path of the library: beside the package in an installation, in build/ in a source checkout."""
    package = Path(__file__).resolve().parent
    checkout = package.parents[1]
    candidates = [package / _FILE_NAME]
    if (checkout / "include/dualkv/dualkv.h").is_file():
        # Not in the folders below build/: they hold builds with sanitizers, which Python cannot load.
        candidates.append(checkout / "build" / _FILE_NAME)
    for path in candidates:
        if path.is_file():
            return path
    raise ImportError(
        f"dualkv's library {_FILE_NAME} was not found; looked at {', '.join(map(str, candidates))}. "
        "Install the package with 'pip install .', or in a source checkout build it with "
        "'cmake -S . -B build && cmake --build build'."
    )


def load(path: Path) -> ctypes.CDLL:
    """Loads the library and declares all of its functions; those that return a status raise instead."""
    library = ctypes.CDLL(str(path))
    library.dualkv_abi_version.restype = ctypes.c_uint32
    version = library.dualkv_abi_version()
    if version != _abi.ABI_VERSION:
        raise ImportError(
            f"{path} has version {version} of dualkv's C interface, but this package needs version "
            f"{_abi.ABI_VERSION}. Build the library and the package from the same source: 'pip install .', "
            "or 'cmake --build build' in a source checkout."
        )
    for name, (result, arguments) in _abi.FUNCTIONS.items():
        function = getattr(library, name)
        function.argtypes = arguments
        if result is _abi.Status:
            function.restype = ctypes.c_int
            function.errcheck = _check_result
        else:
            function.restype = result
    return library


def check(status: int) -> None:
    """Raises the exception that belongs to a dualkv_status, with the library's message."""
    if status != _abi.OK:
        raise _EXCEPTIONS.get(status, RuntimeError)(library.dualkv_last_error().decode())


def _check_result(status, function, arguments):
    check(status)


class Handle:
    """An object of the C library, made by create(*arguments, &object) and destroyed with its last reference.

    Passes as an argument to the functions in `library`.
    """

    def __init__(self, create, destroy, *arguments):
        pointer = ctypes.c_void_p()
        create(*arguments, ctypes.byref(pointer))
        self._as_parameter_ = pointer
        weakref.finalize(self, destroy, pointer)

    @property
    def address(self) -> int:
        return self._as_parameter_.value


library = load(find())
