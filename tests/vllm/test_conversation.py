"""A conversation moves between two vLLM servers on one Redis. A third server, without a connector,
says what is right.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import pytest

from connector.session import short
from tests.servers import Server
from tests.vllm import tiny_model
from tests.vllm.dialogs import (
    Dialog,
    Reference,
    SharedStore,
    StoreView,
    assert_cached,
    chat,
    client_of,
    follow,
)
from tests.vllm.servers import (
    MODEL_NAME,
    PATIENCE,
    TOKENS_PER_BLOCK,
    Spec,
    running,
    transfer_config,
)
from tests.waiting import eventually

pytestmark = pytest.mark.timeout(400)


@dataclass(kw_only=True)
class Pair(SharedStore):
    """Two servers on one Redis, and a client of each."""

    redis: Server


@pytest.fixture(scope="module")
def pair(reference: Reference) -> Iterator[Pair]:
    with contextlib.ExitStack() as stack:
        redis = stack.enter_context(Server(memory="1gb", tcp=True))
        transfer = transfer_config(redis.tcp_url, **PATIENCE)
        flags = ("--enable-scale-out",)  # the tokens-in entrance
        specs = [Spec(name, transfer, blocks=2048, flags=flags) for name in "ab"]
        servers = stack.enter_context(running(*specs))
        clients = [stack.enter_context(client_of(server)) for server in servers]
        view = StoreView(redis.tcp_url, servers)
        yield Pair(redis=redis, servers=servers, clients=clients, view=view)


def test_a_conversation_alternates_between_two_servers(pair: Pair, reference: Reference) -> None:
    dialog = reference.dialog(1, turns=5)
    replies = follow(pair.clients, dialog, "talk-1", pair.view)
    assert replies[0].cached_tokens == 0
    assert_cached(dialog, replies)
    assert dialog.need(1) > 0


def test_the_text_depends_on_what_is_loaded(pair: Pair, reference: Reference) -> None:
    """The control of all tests here: another early token gives another text."""
    turn = reference.dialog(1, turns=5).turns[-1]
    first, *rest = turn.messages
    other = [{**first, "content": first["content"].replace("1 is", "2 is", 1)}, *rest]
    assert chat(pair.clients[0], other, tokens=24).text != turn.reply.text


def test_a_hit_comes_from_the_store_when_the_local_cache_is_empty(
    pair: Pair, reference: Reference
) -> None:
    dialog = reference.dialog(2, turns=2, words=400)
    follow(pair.clients[:1], dialog, "talk-2", pair.view)
    last = dialog.turns[-1]
    pair.view.wait_for("talk-2", last.reply.prompt_tokens // TOKENS_PER_BLOCK)
    pair.reset_local()
    for client in pair.clients:
        reply = chat(client, last.messages, "talk-2")
        assert reply.text == last.reply.text
        whole = (reply.prompt_tokens - 1) // TOKENS_PER_BLOCK * TOKENS_PER_BLOCK
        assert reply.cached_tokens == whole, "\n".join(s.troubles() for s in pair.servers)


def test_no_session_id_works_too(pair: Pair, reference: Reference) -> None:
    dialog = reference.dialog(3, turns=3)
    assert_cached(dialog, follow(pair.clients, dialog, "", pair.view))


def test_prompt_logprobs_beside_a_stored_prefix(pair: Pair, reference: Reference) -> None:
    dialog = reference.dialog(4, turns=2)
    follow(pair.clients[:1], dialog, "talk-4", pair.view)
    last = dialog.turns[-1]
    pair.view.wait_for("talk-4", last.reply.prompt_tokens // TOKENS_PER_BLOCK)
    pair.reset_local()
    asked = {"extra_body": {"prompt_logprobs": 1}}
    reply = chat(pair.clients[0], last.messages, "talk-4", **asked)
    assert (reply.text, reply.cached_tokens) == (last.reply.text, 0)
    answer = pair.clients[1].chat.completions.create(
        model=MODEL_NAME,
        messages=last.messages,  # type: ignore[arg-type]
        max_tokens=1,
        temperature=0,
        extra_headers={"X-Session-ID": "talk-4"},
        **asked,
    )
    assert len(answer.prompt_logprobs) == last.reply.prompt_tokens  # type: ignore[attr-defined]
    again = chat(pair.clients[1], last.messages, "talk-4")
    assert again.text == last.reply.text


def test_streaming_gives_the_same_text(pair: Pair, reference: Reference) -> None:
    dialog = reference.dialog(5, turns=4)
    for index, turn in enumerate(dialog.turns):
        stream = pair.clients[index % 2].chat.completions.create(
            model=MODEL_NAME,
            messages=turn.messages,  # type: ignore[arg-type]
            max_tokens=24,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_headers={"X-Session-ID": "talk-5"},
        )
        text, cached = "", 0
        for part in stream:
            if part.choices:
                text += part.choices[0].delta.content or ""
            if part.usage is not None and part.usage.prompt_tokens_details is not None:
                cached = part.usage.prompt_tokens_details.cached_tokens or 0
        assert text == turn.reply.text
        assert cached >= dialog.need(index)
        if index + 1 < len(dialog.turns):
            pair.view.wait_for("talk-5", dialog.need(index + 1) // TOKENS_PER_BLOCK)


def test_many_conversations_at_once(pair: Pair, reference: Reference) -> None:
    count = 32
    with concurrent.futures.ThreadPoolExecutor(count) as threads:
        made = [threads.submit(reference.dialog, 600 + i, 3, 40, 16) for i in range(count)]
        dialogs = [job.result() for job in made]
        turned = pair.clients[::-1]
        held = [
            threads.submit(follow, turned if i % 2 else pair.clients, d, f"many-{i}", pair.view)
            for i, d in enumerate(dialogs)
        ]
        for dialog, job in zip(dialogs, held, strict=True):
            assert_cached(dialog, job.result())
    pair.reset_local()


def test_a_template_that_strips_reasoning_keeps_the_earlier_prompt(
    pair: Pair, reference: Reference
) -> None:
    template = {"extra_body": {"chat_template": tiny_model.REASONING_TEMPLATE}}
    first = reference.dialog(7, turns=1, words=200, **template).turns[0]
    thought = {"role": "assistant", "content": f"<think>{first.reply.text}</think>Yes."}
    question = {"role": "user", "content": "And then? " * 20}
    messages = [*first.messages, thought, question]
    right = reference.reply(messages, **template)
    assert right.gap > 1e-4
    assert chat(pair.clients[0], first.messages, "talk-7", **template).text == first.reply.text
    pair.view.wait_for("talk-7", first.reply.prompt_tokens // TOKENS_PER_BLOCK)
    reply = chat(pair.clients[1], messages, "talk-7", **template)
    assert reply.text == right.text
    # The old prompt ended in "<think>"; the new one goes on differently from there.
    common = (first.reply.prompt_tokens - len("<think>")) // TOKENS_PER_BLOCK * TOKENS_PER_BLOCK
    assert reply.cached_tokens >= common > 0


def post(pair: Pair, path: str, body: dict[str, object], **headers: str) -> None:
    """Send a request that the `openai` client has no name for."""
    reply = httpx.post(pair.servers[0].url + path, json=body, headers=headers, timeout=60)
    assert reply.status_code == 200, reply.text


ENTRANCES = {
    "chat": ("/v1/chat/completions", "max_tokens"),
    "completions": ("/v1/completions", "max_tokens"),
    "responses": ("/v1/responses", "max_output_tokens"),
}


def body_for(entrance: str, seed: str) -> dict[str, object]:
    """A request of some new blocks, that no other shares."""
    text = f"{seed} says: " + "what a long and winding road this is. " * 4
    messages = [{"role": "user", "content": text}]
    content = {"chat": {"messages": messages}, "completions": {"prompt": text}}
    what = content.get(entrance, {"input": text})
    return {"model": MODEL_NAME, "temperature": 0, ENTRANCES[entrance][1]: 2, **what}


@pytest.mark.parametrize("channel", ["body", "header", "xargs", "body before header"])
@pytest.mark.parametrize("entrance", ENTRANCES)
def test_an_id_reaches_the_store_thread(pair: Pair, entrance: str, channel: str) -> None:
    session, other = f"{entrance}/{channel}/mine", f"{entrance}/{channel}/other"
    body, headers = body_for(entrance, session), {}
    if channel.startswith("body"):
        body["session_id"] = session
    if channel == "header":
        headers["X-Session-ID"] = session
    if channel == "xargs":
        body["vllm_xargs"] = {"session_id": session}
    if channel == "body before header":
        headers["X-Session-ID"] = other
    post(pair, ENTRANCES[entrance][0], body, **headers)
    assert_seen(pair, session)
    assert digest(pair, other) not in pair.servers[0].log()


def test_the_tokens_in_entrance_reads_the_header(pair: Pair) -> None:
    tokens = tiny_model.token_ids("tokens in, " * 12)
    body = {"token_ids": tokens, "sampling_params": {"max_tokens": 2, "temperature": 0}}
    post(pair, "/inference/v1/generate", body, **{"X-Session-ID": "tokens-in"})
    assert_seen(pair, "tokens-in")


def test_both_children_of_n_2_carry_the_id(pair: Pair) -> None:
    body = {**body_for("chat", "two"), "n": 2, "temperature": 1.0, "seed": 7, "max_tokens": 70}
    post(pair, ENTRANCES["chat"][0], body, **{"X-Session-ID": "twice"})

    def requests() -> set[str]:
        lines = [x for x in pair.servers[0].log().splitlines() if digest(pair, "twice") in x]
        return {x.partition("request=")[2].partition(" ")[0] for x in lines if "save job" in x}

    eventually(lambda: len(requests()) == 2, 10, "saves of two requests")


def test_an_id_that_is_too_long_counts_as_none(pair: Pair) -> None:
    name = "vllm:session_kv_sessions_invalid_total"
    before = pair.servers[0].metrics().get(name, 0.0)
    post(pair, ENTRANCES["chat"][0], {**body_for("chat", "long"), "session_id": "x" * 257})
    eventually(lambda: pair.servers[0].metrics().get(name, 0.0) == before + 1, 10, name)


def digest(pair: Pair, session: str) -> str:
    """How the store thread's log names a session."""
    return f"session={short(pair.view.key(session))} "


def assert_seen(pair: Pair, session: str) -> None:
    """The store thread has saved blocks of this session; its id is in no log line."""
    wanted = digest(pair, session)
    eventually(lambda: wanted in pair.servers[0].log(), 10, f"a save of {session}")
    assert session not in pair.servers[0].log()


def test_redis_dies_and_comes_back_empty(pair: Pair, reference: Reference) -> None:
    dialogs = [reference.dialog(800 + i, turns=3, words=150) for i in range(6)]
    halves = [Dialog(d.turns[:1]) for d in dialogs]
    for i, half in enumerate(halves):
        follow(pair.clients, half, f"lost-{i}")
    pair.reset_local()
    pair.redis.kill()
    with concurrent.futures.ThreadPoolExecutor(len(dialogs)) as threads:
        jobs = [
            threads.submit(follow, pair.clients, d, f"lost-{i}") for i, d in enumerate(dialogs)
        ]
        pair.redis.start()
        for job in jobs:
            job.result()  # every text right, whatever was hit
    pair.reset_local()
    fresh = reference.dialog(820, turns=2, words=150)

    def hits_again() -> bool:
        replies = follow(pair.clients, fresh, "after", pair.view)
        pair.reset_local()
        return replies[-1].cached_tokens >= fresh.need(1)

    eventually(hits_again, 30, "hits without a restart", again_s=0.2)


def test_nothing_failed_and_nothing_is_held(pair: Pair) -> None:
    pair.reset_local()
    for server in pair.servers:
        found = server.metrics()
        assert server.idle()
        assert found.get("vllm:kv_cache_usage_perc", 0.0) == 0.0
        log = server.log()
        assert "Traceback" not in log, log[log.index("Traceback") - 500 :][:3000]
