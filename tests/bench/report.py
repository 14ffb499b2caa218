"""Medians with their spread, as rows of a table and as JSON."""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
from collections.abc import Sequence
from typing import NamedTuple


class Row(NamedTuple):
    """One measured thing. what: of which case; values: in `unit`, in order of measurement."""

    what: str
    case: str
    unit: str
    values: Sequence[float]
    note: str = ""


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile."""
    if len(values) < 2:
        return (values[0],) * 3
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def show(rows: Sequence[Row], as_json: bool) -> None:
    """Print a Markdown table, or JSON."""
    if as_json:
        found = [{**row._asdict(), "median": statistics.median(row.values)} for row in rows]
        print(json.dumps({"machine": machine(), "rows": found}))
        return
    print(f"\n{machine()}\n")
    print("| what | case | median | quartiles | n | note |")
    print("| :-- | :-- | --: | --: | --: | :-- |")
    for row in rows:
        low, middle, high = quartiles(row.values)
        unit = row.unit
        print(
            f"| {row.what} | {row.case} | {middle:.3g} {unit} | {low:.3g} to {high:.3g} | "
            f"{len(row.values)} | {row.note} |"
        )
    sys.stdout.flush()


def machine() -> str:
    """What it ran on, and what else did: a load beyond the cores makes times worthless."""
    load = ", ".join(f"{x:.1f}" for x in os.getloadavg())
    return f"{os.cpu_count()} cores ({platform.machine()}), load average {load}"
