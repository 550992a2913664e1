"""What is measured, for the records of benchmarks."""

from __future__ import annotations

import subprocess
from pathlib import Path


def checked_out_commit() -> str | None:
    """The commit of this checkout, "-dirty" behind it if there are changes; None if it is not one."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    result = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    return result.stdout.strip() if result.returncode == 0 else None
