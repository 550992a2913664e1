"""How charts of measurements become files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def save_chart(picture: Path, draw: Callable[[list[dict]], plt.Figure], records: list[dict]) -> None:
    """As SVG. The same records give the same file: nothing random or of today is in it, and text is text."""
    picture.parent.mkdir(parents=True, exist_ok=True)
    with plt.rc_context({"svg.fonttype": "none", "svg.hashsalt": "dualkv"}):
        draw(records).savefig(picture, metadata={"Date": None})
