#!/usr/bin/env python3
"""Compiles the CUDA kernels once more and says what they and their compilation take. Fails if a kernel spills
registers or uses local memory, if the compiler serialises its matrix products, if compiling a file takes too
much memory, or if the library is too large:

    tools/check_kernels.py BUILD_FOLDER
"""

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MAX_COMPILER_MB = 1024
MAX_LIBRARY_MB = 8

FUNCTION = re.compile(
    r"Function properties for (.+)\n"
    r"\s*(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads\n"
    r"(?:.*Used (\d+) registers)?"
)
# C7510 and its neighbours: "Potential Performance Loss: wgmma.mma_async instructions are serialized due to ...".
SERIALISED = re.compile(r"C75\d\d|Potential Performance Loss")


def compile_unit(unit: dict) -> tuple[str, float, float]:
    """What ptxas says, the seconds and the compiler's peak of memory in MB."""
    command = shlex.split(unit["command"])
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as log:
        command[command.index("-o") + 1] = f"{folder}/unit.o"
        begin = time.monotonic()
        process = subprocess.Popen(
            [*command, "-Xptxas", "-v"], cwd=unit["directory"], stdout=log, stderr=subprocess.STDOUT
        )
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.monotonic() - begin
        log.seek(0)
        text = subprocess.run(["c++filt"], stdin=log, capture_output=True, text=True, check=True).stdout
    if status != 0:
        sys.exit(f"{unit['file']} does not compile:\n{text}")
    return text, seconds, usage.ru_maxrss / 1024


def main() -> None:
    build = Path(sys.argv[1])
    units = json.loads((build / "compile_commands.json").read_text())
    faults, kernels = [], 0
    for unit in units:
        if "/src/cuda/" not in unit["file"] or not unit["file"].endswith(".cu"):
            continue
        name = unit["file"].split("/src/cuda/")[1]
        text, seconds, megabytes = compile_unit(unit)
        print(f"{name}: {seconds:.1f} s, {megabytes:.0f} MB")
        for function, stack, stores, loads, registers in FUNCTION.findall(text):
            kernels += 1
            function = re.sub(r"^void |\(.*|\bdualkv::cuda::", "", function)
            print(
                f"  {registers or '-':>3} registers, stack {stack}, spills {stores} + {loads} bytes  {function}"
            )
            if any(map(int, (stack, stores, loads))):
                faults.append(f"{name}: {function} spills registers or uses local memory")
        faults += [f"{name}: {line}" for line in text.splitlines() if SERIALISED.search(line)]
        if megabytes > MAX_COMPILER_MB:
            faults.append(f"{name}: the compiler takes {megabytes:.0f} MB, more than {MAX_COMPILER_MB}")

    library = (build / "libdualkv.so").stat().st_size / 2**20
    print(f"libdualkv.so: {library:.1f} MB")
    if library > MAX_LIBRARY_MB:
        faults.append(f"libdualkv.so is larger than {MAX_LIBRARY_MB} MB")
    if kernels == 0:
        faults.append("no kernel was found")
    if faults:
        sys.exit("\n".join(faults))


if __name__ == "__main__":
    main()
