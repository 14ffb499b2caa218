"""The table of faults is true: what it names exists, and nothing is missing from it."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.faults import KNOWN, LEFT_OUT, ROOT, ROWS, Row, functions_of, numbered_tests

BY_NUMBER = [pytest.param(row, id=f"fault {row.number}") for row in ROWS]


@pytest.mark.parametrize("row", BY_NUMBER)
def test_the_guard_exists(row: Row) -> None:
    path, _, name = row.guard.partition(":")
    assert name in set(functions_of(path))


@pytest.mark.parametrize("row", BY_NUMBER)
def test_every_test_exists(row: Row) -> None:
    assert row.tests
    for test in row.tests:
        path, _, start = test.partition("::")
        assert any(name.split(".")[-1].startswith(start) for name in functions_of(path)), test


@pytest.mark.parametrize("row", [row for row in BY_NUMBER if row.values[0].mutant])
def test_the_mutant_applies(row: Row) -> None:
    assert row.mutant is not None
    text = (ROOT / row.mutant.path).read_text(encoding="utf-8")
    assert text.count(row.mutant.old) == 1, row.mutant
    compile(text.replace(row.mutant.old, row.mutant.new), row.mutant.path, "exec")


def test_every_known_fault_has_a_row_or_a_reason() -> None:
    numbers = Counter(row.number for row in ROWS)
    assert not [number for number, count in numbers.items() if count > 1]
    assert set(numbers) | set(LEFT_OUT) == KNOWN
    assert not set(numbers) & set(LEFT_OUT)
    assert all(len(reason) > 40 for reason in LEFT_OUT.values())


def test_a_number_in_a_tests_name_is_a_rows() -> None:
    assert set(numbered_tests()) <= {row.number for row in ROWS}
