"""Guards of the core that no other test would miss: deadlines, hooks called twice, a slow index."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from connector.ids import RequestId
from connector.lookup import LookupOp, LookupOutcome
from tests.unit.core_kit import FakeRequest, Kit
from tests.unit.test_index_client import Client, chain
from tests.waiting import eventually


def request(tokens: int = 22, name: str = "r") -> FakeRequest:
    return FakeRequest(name, num_prompt_tokens=tokens, num_tokens=tokens)


def test_fault_30_39_jobs_carry_their_deadlines() -> None:
    kit, r = Kit(load_deadline_s=3.0, save_deadline_s=7.0), request()
    kit.arrive(r)
    kit.hit(2)
    kit.allocate(r, 2, kit.match(r) or 0)
    (load,), _ = kit.step()
    kit.report(load)
    kit.step(r, 8, 14)
    kit.grant()
    _, (save,) = kit.step()
    assert (load.deadline_s, save.deadline_s) == (3.0, 7.0)


def test_fault_31_the_end_of_a_request_that_was_never_announced() -> None:
    kit = Kit()
    assert kit.finish(request(), 20) is None
    kit.core.on_preempted(RequestId("nobody"))
    kit.core.on_allocated(RequestId("nobody"), [], 0)
    assert kit.match(request()) == 0 and kit.idle()


def test_i8_every_hook_called_twice_changes_nothing_the_second_time() -> None:
    kit, r = Kit(), request()
    for _ in range(2):
        kit.arrive(r)
    assert sum(isinstance(op, LookupOp) for op in kit.index.posted) == 1
    kit.hit(2)
    assert kit.match(r) == kit.match(r) == 8
    for tokens in (8, 0):
        kit.allocate(r, 2, tokens)
    (load,), _ = kit.step()
    assert kit.step() == ([], [])
    for _ in range(2):
        kit.report(load)
    kit.step(r, 8, 14)
    kit.grant()
    _, (save,) = kit.step()
    for _ in range(2):
        kit.report(save)
    kit.commit()
    kit.core.poll()
    posted = len(kit.index.posted)
    for _ in range(2):
        kit.finish(r, 20)
    # The second end posts nothing.
    assert len(kit.index.posted) <= posted + 1
    kit.done()
    kit.core.poll()
    assert kit.idle()


class SlowIndex:
    """An index whose `recall` waits for the test."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.asked, self.go = threading.Event(), threading.Event()
        self.waited_in_vain = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def recall(self, *args: Any) -> Any:
        self.asked.set()
        self.waited_in_vain = not self.go.wait(3.0)
        return self._inner.recall(*args)


@pytest.fixture
def slow() -> Iterator[tuple[Client, SlowIndex]]:
    made: list[SlowIndex] = []

    def wrap(index: Any) -> SlowIndex:
        made.append(SlowIndex(index))
        return made[0]

    client = Client(wrap)
    yield client, made[0]
    made[0].go.set()
    client.client.close(2.0)


def test_fault_51_nobody_waits_for_a_slow_index(slow: tuple[Client, SlowIndex]) -> None:
    """`post` and `poll` return while the index is thinking; the answer comes later."""
    client, index = slow
    op = LookupOp(
        ticket=1, request=RequestId("r"), namespace=b"n" * 16, session_id="s", cache_salt=None,  # type: ignore[arg-type]
        hashes=chain(3), deadline_s=30.0, lease_s=10.0,
    )  # fmt: skip
    assert client.client.post(op)
    eventually(index.asked.is_set, 10.0, "the client thread to ask")
    assert client.client.poll() == () and client.client.pending() == 1
    index.go.set()
    eventually(client._take, 10.0, "the answer")
    assert not index.waited_in_vain, "the caller waited for the index"
    assert client.replies[0].outcome is LookupOutcome.MISS
