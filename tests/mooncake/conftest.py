"""Fixtures of the Mooncake tests. They are skipped, with the reason, where Mooncake is missing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mooncake.cluster import MooncakeCluster, missing


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    why = missing()
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.mooncake)
            # What needs no server has `unit` in its module's name.
            if why and "unit" not in item.path.name:
                item.add_marker(pytest.mark.skip(reason=why))


@pytest.fixture(scope="module")
def cluster() -> Iterator[MooncakeCluster]:
    """A master and two owners of 256 MiB each, shared by a module's tests."""
    with MooncakeCluster() as running:
        yield running


@pytest.fixture
def own_cluster() -> Iterator[MooncakeCluster]:
    """The same, for a test that breaks it."""
    with MooncakeCluster() as running:
        yield running
