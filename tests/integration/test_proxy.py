"""The P/D proxy before engines whose faults are chosen here."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from connector.errors import ConfigError
from engine_shim.frontend.identity import REPLY_HEADER
from engine_shim.pd_proxy import Committed, ProxyConfig
from engine_shim.pd_proxy_bodies import PATHS, TOKENS_IN
from engine_shim.pd_proxy_fleet import Fleet, Limits
from engine_shim.pd_proxy_start import check_namespaces, check_urls, http_client, wait_up
from tests.integration.proxy_fakes import (
    FakePD,
    FakeStore,
    Rig,
    engine_server,
    fakes,
    restarted,
    rig,
)
from tests.waiting import eventually

TEXT = "/v1/completions"
HAND_OFF = {"session_kv": {"tip": "beef", "namespace": "aa", "num_tokens": 16}}


@pytest.fixture(scope="module")
def shared() -> Iterator[Rig]:
    with rig(fakes()) as made:
        yield made


@pytest.fixture
def plain(shared: Rig) -> Rig:
    """One prefill and two decode engines, as new."""
    eventually(lambda: idle(shared), what="the last test's requests to end")
    shared.reset()
    return shared


def post(made: Rig, body: Any = None, path: str = TEXT, **headers: str) -> httpx.Response:
    given = {"prompt": "hi", "max_tokens": 5} if body is None else body
    return httpx.post(made.url + path, json=given, headers=headers, timeout=20)


def client(made: Rig) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{made.url}/v1", api_key="secret", max_retries=0)


def leaves(made: Rig, body: dict[str, Any]) -> None:
    """A client that gives up."""
    with pytest.raises(httpx.TimeoutException):
        httpx.post(made.url + TEXT, json=body, timeout=0.4)


def idle(made: Rig) -> bool:
    engines = [*made.prefill, *made.decode]
    return not (any(e.open for e in engines) or any(e.in_flight for e in made.live.fleet.all))


# ---- the way of a request ----------------------------------------------------------------------


def test_prompt_goes_to_prefill_and_its_hand_off_to_decode(plain: Rig) -> None:
    body = {
        "model": "m", "prompt": "hi", "max_tokens": 5, "n": 2, "logprobs": 3, "min_tokens": 2,
        "temperature": 0, "kv_transfer_params": {"mine": 1, "session_kv": {"tip": "forged"}},
    }  # fmt: skip
    reply = post(plain, body)
    assert reply.json()["choices"][0]["text"] == "D0"
    assert reply.headers["x-session-kv-prefill"] == "prefill-0"
    assert reply.headers["x-session-kv-decode"] == "decode-0"
    assert plain.prefill[0].seen == [
        {
            "model": "m", "prompt": "hi", "max_tokens": 1, "temperature": 0, "stream": False,
            "kv_transfer_params": {"mine": 1},
        }
    ]  # fmt: skip
    assert plain.decode[0].seen == [{**body, "kv_transfer_params": {"mine": 1, **HAND_OFF}}]


@pytest.mark.parametrize("stream", [False, True])
def test_chat_with_the_openai_client(plain: Rig, stream: bool) -> None:
    messages: list[Any] = [{"role": "user", "content": "hi"}]
    reply = client(plain).chat.completions.create(
        model="m", messages=messages, max_completion_tokens=9, stream=stream
    )
    if stream:
        assert "".join(c.choices[0].delta.content or "" for c in reply) == "D0D0D0"  # type: ignore[union-attr]
    else:
        assert reply.choices[0].message.content == "D0"  # type: ignore[union-attr]
    first = plain.prefill[0].seen[0]
    assert (first["max_tokens"], first["stream"]) == (1, False)
    assert "max_completion_tokens" not in first and "stream_options" not in first
    assert plain.decode[0].seen[0]["kv_transfer_params"] == HAND_OFF
    assert plain.prefill[0].headers[0]["authorization"] == "Bearer secret"


def test_tokens_in_limits_its_sampling_params(plain: Rig) -> None:
    body = {"token_ids": [1, 2], "sampling_params": {"max_tokens": 9, "n": 2, "top_k": 3}}
    post(plain, body, TOKENS_IN)
    assert plain.prefill[0].seen[0]["sampling_params"] == {"max_tokens": 1, "top_k": 3}
    assert plain.decode[0].seen[0]["sampling_params"] == body["sampling_params"]


def test_batch_is_prefilled_but_gets_no_hand_off(plain: Rig) -> None:
    post(plain, {"prompt": ["a", "b"]})
    assert plain.prefill[0].seen and "kv_transfer_params" not in plain.decode[0].seen[0]
    post(plain, {"prompt": [1, 2, 3]})
    assert plain.decode[-1].seen or plain.decode[0].seen[1]["kv_transfer_params"] == HAND_OFF


@pytest.mark.parametrize("path", sorted(PATHS))
@pytest.mark.parametrize(
    ("body", "headers"),
    [
        ({"session_id": "s1"}, {}),
        ({"session_id": "s1"}, {REPLY_HEADER: "other"}),
        ({"session_id": ""}, {REPLY_HEADER: "s1"}),
        ({"session_id": 7}, {"x-session-id": "s1"}),
        ({"vllm_xargs": {"session_id": "s1"}}, {}),
        ({"kv_transfer_params": {"session_id": "s1"}}, {}),
    ],
)
def test_id_reaches_both_engines_from_every_channel(
    plain: Rig, path: str, body: dict[str, Any], headers: dict[str, str]
) -> None:
    full = {"prompt": "a", "messages": [], "input": "a", "token_ids": [1], **body}
    reply = post(plain, {**full, "sampling_params": {}}, path, **headers)
    assert reply.headers[REPLY_HEADER] == "s1"
    for engine in (plain.prefill[0], plain.decode[0]):
        assert engine.headers[0]["x-session-id"] == "s1"
        assert engine.seen[0]["session_id"] == "s1"
        assert "session_id" not in (engine.seen[0].get("kv_transfer_params") or {})


def test_bad_id_is_refused_before_any_engine(plain: Rig) -> None:
    reply = post(plain, {"prompt": "a", "session_id": "x" * 257})
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "session_id"
    deep = b'{"a":' * 10**5 + b"1" + b"}" * 10**5
    for raw in (b"{", b"[]", b"", b"\xff", b'{"a": "\\ud800"}', deep):
        assert httpx.post(plain.url + TEXT, content=raw).status_code == 400
    assert not plain.prefill[0].seen


# ---- the wait for the commit -------------------------------------------------------------------


@pytest.mark.parametrize("outcome", [*Committed, RuntimeError("index lost")])
def test_decode_is_asked_after_the_wait_however_it_ends(outcome: Any) -> None:
    store = FakeStore(outcome)
    with rig(fakes(), ProxyConfig(wait_s=1.5), store) as made:
        assert post(made).json()["choices"][0]["text"] == "D0"
        assert store.asked == [("aa", "beef", 1.5)]
        assert made.decode[0].seen[0]["kv_transfer_params"] == HAND_OFF


def test_decode_is_not_asked_before_the_commit() -> None:
    store = FakeStore(hold=asyncio.Event())
    with rig(fakes(), None, store) as made, ThreadPoolExecutor(1) as pool:
        reply = pool.submit(post, made)
        eventually(lambda: store.asked)
        assert not made.decode[0].seen and made.prefill[0].open == 0
        assert store.hold is not None
        store.hold.set()
        made_free(made)
        assert reply.result(10).status_code == 200


def made_free(made: Rig) -> None:
    """Wakes the proxy's loop: an event set from another thread is seen at the loop's next turn."""
    httpx.get(made.url + "/health")


def test_no_hand_off_no_wait() -> None:
    store = FakeStore()
    with rig(fakes(hand_off=False), None, store) as made:
        post(made)
        assert not store.asked and "kv_transfer_params" not in made.decode[0].seen[0]


# ---- affinity ----------------------------------------------------------------------------------


def test_session_stays_on_its_decode_engine() -> None:
    with rig(fakes(decode=3)) as made:
        body = {"prompt": "a", "session_id": "s"}
        first = post(made, body).headers["x-session-kv-decode"]
        made.live.fleet.engines["decode"][0].in_flight = 3  # type: ignore[index]
        assert [post(made, body).headers["x-session-kv-decode"] for _ in range(3)] == [first] * 3
        assert post(made).headers["x-session-kv-decode"] == "decode-1"
        assert httpx.post(made.url + "/close_session", json={"session_id": "s"}).json() == {
            "success": True, "session_id": "s", "freed_tokens": 64,
            "engines": ["prefill-0", "decode-0", "decode-1", "decode-2"],
        }  # fmt: skip
        assert post(made, body).headers["x-session-kv-decode"] == "decode-1"


def test_session_leaves_an_engine_that_is_over_loaded_or_down() -> None:
    with rig(fakes(decode=2), limits=Limits(spare=1)) as made:
        body = {"prompt": "a", "session_id": "s"}
        assert post(made, body).headers["x-session-kv-decode"] == "decode-0"
        busy = made.live.fleet.all[1]
        eventually(lambda: idle(made))
        busy.in_flight = 2
        assert post(made, body).headers["x-session-kv-decode"] == "decode-1"
        busy.in_flight = 0
        made.live.fleet.all[2].healthy = False
        assert post(made, body).headers["x-session-kv-decode"] == "decode-0"


def test_restarted_proxy_goes_on_with_a_conversation(plain: Rig) -> None:
    body = {"prompt": "a", "session_id": "s"}
    post(plain, body)
    with restarted(plain) as url:
        assert httpx.post(url + TEXT, json=body).status_code == 200
    assert [seen["session_id"] for seen in plain.decode[0].seen] == ["s", "s"]


# ---- faults ------------------------------------------------------------------------------------


def test_prefill_is_tried_on_one_other_engine_then_left() -> None:
    with rig(fakes(prefill=3)) as made:
        made.prefill[0].status = 500
        assert post(made).headers["x-session-kv-prefill"] == "prefill-1"
        made.prefill[1].status = 503
        reply = post(made)
        assert reply.status_code == 200 and "x-session-kv-prefill" not in reply.headers
        assert not made.prefill[2].seen
        assert "kv_transfer_params" not in made.decode[0].seen[-1]


@pytest.mark.parametrize("stream", [False, True])
def test_decode_is_tried_on_one_other_engine(stream: bool) -> None:
    with rig(fakes(decode=3)) as made:
        made.decode[0].status = 500
        body = {"prompt": "a", "stream": stream}
        assert post(made, body).headers["x-session-kv-decode"] == "decode-1"
        made.decode[1].status = 500
        reply = post(made, body)
        assert reply.status_code == 503
        assert reply.json()["error"]["type"] == "service_unavailable"
        assert len(made.decode[2].seen) == 0


def test_engine_that_is_gone_is_marked_and_found_again() -> None:
    prefill, decode = fakes()
    with rig((prefill, decode)) as made:
        gone = made.live.fleet.all[1]
        url, gone.url = gone.url, "http://127.0.0.1:9"
        assert post(made).headers["x-session-kv-decode"] == "decode-1"
        assert not gone.healthy
        gone.url = url
        asyncio.run(check(made.live.fleet))
        assert gone.healthy


async def check(fleet: Fleet) -> None:
    async with http_client() as http:
        await fleet.check_health(http)


def test_no_engine_at_all_is_503() -> None:
    with rig(fakes(decode=1)) as made:
        for engine in made.live.fleet.all:
            engine.url = "http://127.0.0.1:9"
        assert post(made).status_code == 503
        assert httpx.get(made.url + "/health").status_code == 503
        assert httpx.get(made.url + "/v1/models").status_code == 503


def test_refused_request_is_the_clients_to_mend(plain: Rig) -> None:
    plain.prefill[0].status = 404
    reply = post(plain, {"prompt": "a", "session_id": "s"})
    assert reply.status_code == 404 and reply.json()["error"]["message"] == "P0 says no"
    assert reply.headers[REPLY_HEADER] == "s" and not plain.decode[0].seen
    plain.prefill[0].status, plain.decode[0].status = 200, 400
    assert post(plain).json()["error"]["message"] == "D0 says no"
    assert not plain.decode[1].seen


def test_stream_that_breaks_says_so(plain: Rig) -> None:
    plain.decode[0].break_after = 1
    text = post(plain, {"prompt": "a", "stream": True}).text
    assert text.endswith("data: [DONE]\n\n") and "lost in mid-reply" in text
    assert text.count('"D0"') == 2  # one piece: its text and its delta
    eventually(lambda: idle(plain))


def test_other_namespace_gets_no_hand_off(plain: Rig) -> None:
    plain.live.fleet.all[1].namespace = "bb"
    post(plain)
    assert "kv_transfer_params" not in plain.decode[0].seen[0]


# ---- clients that go ---------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_client_that_goes_during_prefill(plain: Rig, stream: bool) -> None:
    plain.prefill[0].hold = asyncio.Event()
    leaves(plain, {"prompt": "a", "stream": stream})
    eventually(lambda: plain.prefill[0].left == 1 and idle(plain))
    assert not plain.decode[0].seen


def test_client_that_goes_during_the_wait() -> None:
    store = FakeStore(hold=asyncio.Event())
    with rig(fakes(), None, store) as made:
        leaves(made, {"prompt": "a"})
        eventually(lambda: store.left == 1 and idle(made))
        assert not made.decode[0].seen


@pytest.mark.parametrize("stream", [False, True])
def test_client_that_goes_during_decode(plain: Rig, stream: bool) -> None:
    plain.decode[0].hold = asyncio.Event()
    leaves(plain, {"prompt": "a", "stream": stream})
    eventually(lambda: plain.decode[0].left == 1 and idle(plain))
    metrics = httpx.get(plain.url + "/metrics").text
    assert f'proxy_requests_total{{outcome="cancelled",path="{TEXT}"}}' in metrics


def test_duplicate_request_ids_are_two_requests(plain: Rig) -> None:
    with ThreadPoolExecutor(4) as pool:
        replies = list(pool.map(lambda _: post(plain, None, **{"X-Request-Id": "same"}), range(8)))
    assert [reply.status_code for reply in replies] == [200] * 8
    headers = [h for engine in plain.decode for h in engine.headers]
    assert len(headers) == 8 and {h["x-request-id"] for h in headers} == {"same"}


# ---- pages and limits --------------------------------------------------------------------------


def test_where_is_off_unless_switched_on(plain: Rig) -> None:
    assert httpx.get(plain.url + "/where?session=s").status_code == 404
    with restarted(plain, ProxyConfig(show_where=True), FakeStore()) as url:
        httpx.post(url + TEXT, json={"prompt": "a", "session_id": "s"})
        found = httpx.get(url + "/where", params={"session": "s", "cache_salt": "x"}).json()
        assert found == {
            "session": "s", "prefill": "prefill-0", "decode": "decode-0",
            "store": {"home": "node-1", "salt": "x"},
        }  # fmt: skip
        assert httpx.get(url + "/where").status_code == 400


def test_metrics_name_engines_and_no_id(plain: Rig) -> None:
    post(plain, {"prompt": "a", "session_id": "secret-id"})
    post(plain, {"prompt": "a", "session_id": "secret-id"})
    text = httpx.get(plain.url + "/metrics").text
    assert 'session_kv_proxy_engine_calls_total{engine="prefill-0",outcome="ok"}' in text
    assert 'session_kv_proxy_affinity_total{kept="yes",role="decode"}' in text
    assert "secret-id" not in text and "127.0.0.1" not in text


def test_too_many_requests_are_refused() -> None:
    with rig(fakes(), ProxyConfig(requests_max=1)) as made, ThreadPoolExecutor(1) as pool:
        made.prefill[0].hold = asyncio.Event()
        first = pool.submit(leaves, made, {"prompt": "a"})
        eventually(lambda: made.prefill[0].open)
        assert post(made).status_code == 503
        first.result(10)


# ---- start -------------------------------------------------------------------------------------


def start(engines: list[FakePD]) -> Fleet:
    """What the proxy does before it serves; the first engine prefills."""
    with engine_server(engines) as urls:
        fleet = Fleet([urls["P"]], [urls["D"]])

        async def run() -> None:
            async with http_client() as http:
                await wait_up(fleet, http, 0.5)
                await check_namespaces(fleet, http)

        asyncio.run(run())
        return fleet


def test_start_learns_namespaces() -> None:
    fleet = start([FakePD("P"), FakePD("D", vllm=True)])
    assert [engine.namespace for engine in fleet.all] == ["aa", "aa"]


@pytest.mark.parametrize("vllm", [False, True])
def test_start_refuses_engines_that_share_no_namespace(vllm: bool) -> None:
    with pytest.raises(ConfigError, match="namespace") as caught:
        start([FakePD("P"), FakePD("D", namespace="bb", vllm=vllm)])
    assert "'aa'" in str(caught.value) and "'bb'" in str(caught.value)


def test_start_refuses_engines_that_do_not_answer() -> None:
    with pytest.raises(ConfigError, match="/health"):
        start([FakePD("P"), FakePD("D", healthy=False)])


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        ([], ["http://a"]),
        (["http://a"], []),
        (["a:1"], ["http://a"]),
        (["http://a"] * 2, ["http://b"]),
    ],
)
def test_start_refuses_bad_urls(prefill: list[str], decode: list[str]) -> None:
    with pytest.raises(ConfigError):
        check_urls(prefill, decode)
