"""Charts of measurements, drawn as `make docs` draws them."""

from __future__ import annotations

import json
import sys
from pathlib import Path


def draw_twice(tool, records: list[dict], folder: Path, monkeypatch) -> str:
    """The text of the picture that a tool's main draws, in a folder that is not there yet: twice the same."""
    source = folder / "records.json"
    source.write_text(json.dumps(records))
    pictures = [folder / "images" / name for name in ("one.svg", "two.svg")]
    for picture in pictures:
        monkeypatch.setattr(sys, "argv", [tool.__file__, str(source), str(picture)])
        tool.main()
    drawn = [picture.read_text() for picture in pictures]
    assert drawn[0] == drawn[1]
    return drawn[0]
