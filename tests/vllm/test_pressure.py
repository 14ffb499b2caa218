"""One server with a small cache, its index and its data node apart: preemption, clients that go
away at every stage, an end in mid-run.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import http.client
import json
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import openai
import pytest

from tests.servers import Server
from tests.vllm.dialogs import (
    Messages,
    Reference,
    StoreView,
    Turn,
    chat,
    client_of,
    follow,
)
from tests.vllm.servers import (
    MODEL_NAME,
    TOKENS_PER_BLOCK,
    Spec,
    VllmServer,
    running,
    transfer_config,
)
from tests.waiting import eventually

pytestmark = pytest.mark.timeout(400)
BLOCKS = 290  # 9,248 tokens, and one null block; one request of 8,192 must fit


@dataclass
class Small:
    """The server and its store."""

    server: VllmServer
    client: openai.OpenAI
    index: Server
    data: Server
    view: StoreView

    def nothing_is_held(self) -> None:
        """The engine is idle and its cache can be emptied: vLLM refuses while a block is in use.
        (Its usage gauge is no witness: it stays at what the last step saw.)"""
        eventually(self.server.idle, 60, "an idle engine", 0.05)
        eventually(self.server.reset_local_cache, 60, "nothing is held", 0.05)

    def stream(self, messages: Messages, session: str, tokens: int = 24) -> Any:
        """A streamed request; `close` it and the server aborts it."""
        return self.client.chat.completions.create(
            model=MODEL_NAME,
            messages=messages,  # type: ignore[arg-type]
            max_tokens=tokens,
            temperature=0,
            stream=True,
            extra_headers={"X-Session-ID": session},
        )


@pytest.fixture(scope="module")
def small(reference: Reference) -> Iterator[Small]:
    with contextlib.ExitStack() as stack:
        index = stack.enter_context(Server(tcp=True))
        data = stack.enter_context(Server(memory="1gb", tcp=True))
        transfer = transfer_config(
            {"index": index.tcp_url, "data": data.tcp_url},
            lookup_deadline_s=60.0,
            index_timeout_s=60.0,
            load_deadline_s=60.0,
            cost_model=False,  # to compute is faster than to load from a node that was paused
        )
        spec = Spec("small", transfer, blocks=BLOCKS)
        (server,) = stack.enter_context(running(spec))
        client = stack.enter_context(client_of(server))
        yield Small(server, client, index, data, StoreView(index.tcp_url))
        for redis in (index, data):
            with contextlib.suppress(AssertionError, ProcessLookupError):
                redis.resume()


def test_preempted_requests_say_the_same(small: Small, reference: Reference) -> None:
    count, tokens = 10, 150
    with concurrent.futures.ThreadPoolExecutor(count) as threads:
        made = [threads.submit(reference.dialog, 900 + i, 2, 190, tokens) for i in range(count)]
        dialogs = [job.result() for job in made]
        assert sum(d.turns[0].reply.prompt_tokens + tokens for d in dialogs) > BLOCKS * (
            TOKENS_PER_BLOCK
        )
        held = [
            threads.submit(follow, [small.client], d, f"crowd-{i}") for i, d in enumerate(dialogs)
        ]
        for job in held:
            job.result()
    assert small.server.metrics()["vllm:num_preemptions_total"] > 0
    small.nothing_is_held()


@pytest.fixture
def stored(small: Small, reference: Reference) -> Turn:
    """A turn whose prompt is in the store, and not in the server's own cache."""
    turn = reference.dialog(950, turns=1, words=300).turns[0]
    assert chat(small.client, turn.messages, "gone").text == turn.reply.text
    small.view.wait_for("gone", turn.reply.prompt_tokens // TOKENS_PER_BLOCK)
    small.nothing_is_held()
    return turn


def assert_all_is_well(small: Small, turn: Turn) -> None:
    """Nothing is held; the same request is served, from the store."""
    small.nothing_is_held()
    reply = chat(small.client, turn.messages, "gone")
    assert reply.text == turn.reply.text
    whole = (reply.prompt_tokens - 1) // TOKENS_PER_BLOCK * TOKENS_PER_BLOCK
    assert reply.cached_tokens == whole, small.server.troubles()
    small.nothing_is_held()


def drop(small: Small, messages: Messages, seen: Callable[[], object], what: str) -> None:
    """Send a request, and break its connection once `seen()`."""
    body = {"model": MODEL_NAME, "messages": messages, "max_tokens": 24, "temperature": 0}
    link = http.client.HTTPConnection("127.0.0.1", small.server.port, timeout=30)
    try:
        headers = {"Content-Type": "application/json", "X-Session-ID": "gone"}
        link.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        eventually(seen, 30, what, again_s=0.05)
    finally:
        link.close()


def test_a_client_that_goes_away_during_the_lookup(small: Small, stored: Turn) -> None:
    small.index.pause()
    drop(small, stored.messages, lambda: not small.server.idle(), "a request that looks up")
    eventually(small.server.idle, 30, "the request to be gone, with the index still paused", 0.05)
    small.index.resume()
    assert_all_is_well(small, stored)


def test_a_client_that_goes_away_during_the_load(small: Small, stored: Turn) -> None:
    small.data.pause()
    drop(small, stored.messages, lambda: fetching(small), "a load in progress")
    small.data.resume()
    assert_all_is_well(small, stored)


def test_a_client_that_goes_away_during_the_save(
    small: Small, stored: Turn, reference: Reference
) -> None:
    turn = reference.dialog(951, turns=1, words=300).turns[0]
    small.data.pause()
    stream = small.stream(turn.messages, "gone", tokens=400)
    for _, _part in zip(range(5), stream, strict=False):
        pass
    stream.close()
    eventually(small.server.idle, 30, "the aborted request to be gone", 0.05)
    small.data.resume()
    assert_all_is_well(small, stored)


def test_many_clients_that_go_away_at_any_time(
    small: Small, stored: Turn, reference: Reference
) -> None:
    turns = [reference.dialog(960 + i, turns=1, words=60).turns[0] for i in range(6)]
    for round_ in range(4):
        streams = [small.stream(t.messages, f"w{i}", 200) for i, t in enumerate(turns)]
        for index, stream in enumerate(streams):
            for _, _part in zip(range((index * 3 + round_ * 5) % 17), stream, strict=False):
                pass
            stream.close()
    assert_all_is_well(small, stored)
    for index, turn in enumerate(turns):
        assert chat(small.client, turn.messages, f"w{index}").text == turn.reply.text
    small.nothing_is_held()


def test_killed_in_mid_run_it_leaves_nothing_for_ever(
    small: Small, stored: Turn, reference: Reference
) -> None:
    """The last test of this module: SIGTERM with vLLM's default, which waits for nothing."""
    turn = reference.dialog(952, turns=1, words=300).turns[0]
    stream = small.stream(turn.messages, "last", tokens=1000)
    next(iter(stream))
    small.server.signal(signal.SIGTERM)
    stream.close()  # vLLM's API server waits for its clients, though the engine is gone
    small.server.wait_exit(60)
    eventually(lambda: not small.server.group(), 60, "the end of every process")
    with small.data.client() as client:
        keys = list(client.scan_iter(match="skvo:*", count=1000))
        lasting = [key for key in keys if client.ttl(key) == -1]
    assert 0 < len(lasting) <= small.view.index.stats()["blocks"]


def fetching(small: Small) -> bool:
    """A request waits for its load."""
    lines = small.server.metric_lines('stage="in_progress"')
    return any(not line.startswith("#") and float(line.rpartition(" ")[2]) for line in lines)
