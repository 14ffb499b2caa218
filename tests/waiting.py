"""Waiting for an effect, with a deadline: the only place in the tests that sleeps."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

LOOK_AGAIN_S = 0.005
LONGEST_S = float(os.environ.get("SKV_TEST_DEADLINE_S", "inf"))
"""Shorter where effects are expected not to come: on a mutated copy of the sources."""


def eventually(
    look: Callable[[], T], deadline_s: float = 10.0, what: str = "", again_s: float = LOOK_AGAIN_S
) -> T:
    """The first true value of `look()`.

    Raises AssertionError, naming `what` and the last value seen, when the deadline passes.
    Whatever `look` raises goes through at once.
    """
    deadline_s = min(deadline_s, LONGEST_S)
    end = time.monotonic() + deadline_s
    while True:
        value = look()
        if value:
            return value
        if time.monotonic() >= end:
            name = what or getattr(look, "__name__", "the effect")
            raise AssertionError(f"{name}: still {value!r} after {deadline_s} s")
        time.sleep(again_s)
