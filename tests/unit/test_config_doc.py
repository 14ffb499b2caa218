"""docs/CONFIG.md says what the config structs say."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec
import pytest

from connector.config import FIELDS
from store_worker.cli import config_doc

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_is_up_to_date() -> None:
    stored = (ROOT / "docs" / "CONFIG.md").read_text(encoding="utf-8")
    assert stored == config_doc.page(), "run: make docs"


def test_every_key_is_on_the_page() -> None:
    assert [name for name, *_ in config_doc.documented()] == list(FIELDS)


class Sample(msgspec.Struct, kw_only=True):
    """Stands in for Config."""

    share: Annotated[float, msgspec.Meta(gt=0, le=1, description="A | b.")] = 0.5
    mode: Annotated[Literal["a", "b"], msgspec.Meta(description="Mode.")] = "a"
    where: Annotated[str | list[str], msgspec.Meta(description="Where.")]


def test_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_doc, "Config", Sample)
    assert list(config_doc.documented()) == [
        ("share", "number, above 0, at most 1", "`0.5`", "A \\| b."),
        ("mode", '`"a"` or `"b"`', '`"a"`', "Mode."),
        ("where", "text or list of text", "(required)", "Where."),
    ]


def test_a_key_without_description_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Bare(msgspec.Struct):
        key: int

    monkeypatch.setattr(config_doc, "Config", Bare)
    with pytest.raises(AssertionError, match="key has no description"):
        list(config_doc.documented())
