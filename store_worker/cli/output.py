"""What commands print: JSON for programs, tables for people (with `rich` where it is installed)."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

STYLES = {
    "PASS": "green",
    "yes": "green",
    "WARN": "yellow",
    "FAIL": "bold red",
    "no": "bold red",
}


def emit_json(value: Any) -> None:
    """One JSON value and a line end, at once."""
    print(json.dumps(value, ensure_ascii=False, default=_plain), flush=True)


def _plain(value: object) -> object:
    """Bytes as hex, enums and other text-like things as text."""
    return value.hex() if isinstance(value, bytes) else str(value)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """A table. Cells that are one of `STYLES` get its colour on a terminal."""
    cells = [[_text(cell) for cell in row] for row in rows]
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        _plain_table(title, columns, cells)
        return
    drawn = Table(title=Text(title) if title else None, title_justify="left", box=box.SIMPLE_HEAD)
    for index, column in enumerate(columns):
        numeric = bool(cells) and all(_is_number(row[index]) for row in cells)
        drawn.add_column(column, justify="right" if numeric else "left", overflow="fold")
    for row in cells:
        drawn.add_row(*(Text(cell, style=STYLES.get(cell, "")) for cell in row))
    Console(file=sys.stdout, soft_wrap=False).print(drawn)


def _plain_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    if title:
        print(title)
    for row in (columns, ["-" * width for width in widths], *rows):
        print("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip())


def _text(cell: object) -> str:
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, float):
        return f"{cell:.3g}" if abs(cell) < 1000 else f"{cell:.0f}"
    return "" if cell is None else str(cell)


def _is_number(text: str) -> bool:
    try:
        float(text.replace(",", ""))
    except ValueError:
        return text == ""
    return True


def count_bytes(size: int) -> str:
    """A size for people: 1536 -> 1.5 KiB."""
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
