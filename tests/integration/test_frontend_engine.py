"""The HTTP front end over the real engine, as a process of its own: `session-kv serve`."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from tests.shim_server import ShimServer
from tests.waiting import eventually

TEXT = "/v1/completions"
CONTEXT = 512


@pytest.fixture(scope="module")
def shim() -> Iterator[ShimServer]:
    with ShimServer("--max-model-len", str(CONTEXT), "--served-model-name", "mine") as server:
        yield server


@pytest.fixture(scope="module")
def client(shim: ShimServer) -> openai.OpenAI:
    http = httpx.Client(verify=False, trust_env=False, timeout=30)
    return openai.OpenAI(
        base_url=f"{shim.url}/v1", api_key="none", max_retries=0, http_client=http
    )


def gauge(server: ShimServer, name: str) -> float:
    found = re.search(rf"^{name} (\S+)$", server.metrics(), re.MULTILINE)
    assert found, f"no metric {name}"
    return float(found[1])


def idle(server: ShimServer) -> bool:
    names = ("shim_num_running", "shim_num_waiting", "shim_num_loading")
    return all(gauge(server, name) == 0 for name in names)


def test_stream_is_the_same_text(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {"model": "mine", "prompt": "tell me", "temperature": 0}
    ask["max_tokens"] = 400  # a client that is slow gets several tokens in a piece
    whole = client.completions.create(**ask)
    pieces = [c.choices[0].text for c in client.completions.create(**ask, stream=True)]
    assert "".join(pieces) == whole.choices[0].text
    assert len(pieces) > 1 and whole.usage is not None


def test_turns_of_a_chat_hit_the_prefix_cache(client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "a first question of some length"}]
    before = 0
    for _ in range(3):
        reply = client.chat.completions.create(
            model="mine", messages=messages, max_tokens=24, temperature=0
        )
        assert reply.usage is not None and reply.usage.prompt_tokens_details is not None
        cached = reply.usage.prompt_tokens_details.cached_tokens
        assert cached is not None and cached >= before // 16 * 16
        # What was said is, token for token, the beginning of the next prompt.
        before = reply.usage.prompt_tokens + reply.usage.completion_tokens - 1
        messages += [
            {"role": "assistant", "content": reply.choices[0].message.content},
            {"role": "user", "content": "and then?"},
        ]


def test_stop_string_ends_the_text(shim: ShimServer, client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {"model": "mine", "prompt": "stop here", "temperature": 0}
    text = client.completions.create(**ask, max_tokens=60).choices[0].text
    stop = text[20:23]
    reply = client.completions.create(**ask, max_tokens=60, stop=stop).choices[0]
    assert reply.text == text[: text.index(stop)] and reply.finish_reason == "stop"
    streamed = client.completions.create(**ask, max_tokens=60, stop=stop, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == reply.text
    eventually(lambda: idle(shim))


def test_seeds_make_samples_repeatable_and_differ_within_n(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {"model": "mine", "prompt": "dice", "max_tokens": 30, "n": 3, "seed": 11}
    first = [choice.text for choice in client.completions.create(**ask).choices]
    again = [choice.text for choice in client.completions.create(**ask).choices]
    assert first == again and len(set(first)) == 3


def test_logprobs_are_of_the_chosen_tokens(client: openai.OpenAI) -> None:
    reply = client.completions.create(
        model="mine", prompt="log", max_tokens=5, temperature=0, logprobs=3
    )
    found = reply.choices[0].logprobs
    assert found is not None and "".join(found.tokens or []) == reply.choices[0].text
    for token, value, top in zip(
        found.tokens or [], found.token_logprobs or [], found.top_logprobs or [], strict=True
    ):
        assert top[token] == value == max(top.values()) < 0


BAD: list[tuple[str, Any, int]] = [
    (TEXT, b"{not json", 400),
    (TEXT, {"prompt": {"a": 1}}, 400),
    (TEXT, {"prompt": "x" * CONTEXT}, 400),
    (TEXT, {"prompt": [1_000_000]}, 400),
    (TEXT, {"prompt": "a", "max_tokens": -1}, 400),
    (TEXT, {"prompt": "a", "max_tokens": 2**40}, 400),
    (TEXT, {"prompt": "a", "temperature": 1e9}, 400),
    (TEXT, {"prompt": "a", "stop": [""]}, 400),
    (TEXT, {"prompt": "a", "stop": ["s"] * 99}, 400),
    (TEXT, {"prompt": "a", "min_tokens": 9, "max_tokens": 3}, 400),
    (TEXT, {"prompt": "\ud800", "max_tokens": 1}, 400),
    (TEXT, {"prompt": "a", "model": "shim"}, 404),
    (TEXT, {"prompt": "a", "session_id": "s" * 300}, 400),
    ("/inference/v1/generate", {"token_ids": [9999], "sampling_params": {}}, 400),
    ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"n": 10**9}}, 400),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * CONTEXT}]}, 400),
]


@pytest.mark.parametrize(("path", "body", "status"), BAD)
def test_bad_input_is_refused_and_the_engine_goes_on(
    shim: ShimServer, path: str, body: Any, status: int
) -> None:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    reply = shim.http.post(shim.url + path, content=raw)
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert error["type"] == "invalid_request_error" and error["message"]
    assert shim.post(TEXT, {"prompt": "a", "max_tokens": 1})["choices"][0]["text"]


@pytest.mark.parametrize("stream", [False, True])
def test_client_that_goes_leaves_nothing_running(shim: ShimServer, stream: bool) -> None:
    body = {"prompt": "long", "max_tokens": 400, "ignore_eos": True, "stream": stream, "n": 4}
    with httpx.Client(verify=False, trust_env=False, timeout=0.25 if not stream else 20) as http:
        if stream:
            with http.stream("POST", shim.url + TEXT, json=body) as reply:
                assert next(reply.iter_bytes())
        else:
            with pytest.raises(httpx.ReadTimeout):
                http.post(shim.url + TEXT, json=body)
    eventually(lambda: idle(shim))
    before = gauge(shim, "shim_free_blocks")
    shim.post("/reset_prefix_cache", {})
    assert gauge(shim, "shim_free_blocks") >= before
    assert gauge(shim, "shim_free_blocks") == gauge(shim, "shim_num_blocks")


def test_many_at_once_get_the_text_they_get_alone(shim: ShimServer) -> None:
    def ask(index: int) -> str:
        body = {"prompt": f"conversation {index}", "max_tokens": 24, "temperature": 0}
        return str(shim.post(TEXT, body)["choices"][0]["text"])

    alone = [ask(index) for index in range(32)]
    shim.post("/reset_prefix_cache", {})
    with ThreadPoolExecutor(32) as pool:
        together = list(pool.map(ask, range(32)))
    assert together == alone and len(set(alone)) == 32


def test_same_request_id_twice_at_once(shim: ShimServer) -> None:
    def ask(prompt: str) -> Any:
        body = {"prompt": prompt, "max_tokens": 30, "temperature": 0}
        return shim.post(TEXT, body, **{"X-Request-Id": "same"})

    with ThreadPoolExecutor(4) as pool:
        replies = list(pool.map(ask, ["aa", "bb", "aa", "bb"]))
    texts = [reply["choices"][0]["text"] for reply in replies]
    assert texts[0] == texts[2] != texts[1] == texts[3]
    assert {reply["id"] for reply in replies} == {"cmpl-same"}


# ---- ends --------------------------------------------------------------------------------------


def test_sigterm_is_a_clean_end() -> None:
    server = ShimServer().start()
    server.post(TEXT, {"prompt": "a", "max_tokens": 1})
    assert server.stop() == 0


def test_engine_that_dies_is_a_503_and_the_server_ends() -> None:
    server = ShimServer("--log-level", "error").start()
    body = {"prompt": "a", "max_tokens": 4000, "ignore_eos": True}
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(server.http.post, server.url + TEXT, json=body)
        eventually(lambda: gauge(server, "shim_num_running") == 1)
        os.kill(engine_pid(server), signal.SIGKILL)
        reply = waiting.result(20)
    assert reply.status_code == 503 and reply.json()["error"]["type"] == "service_unavailable"
    assert eventually(lambda: server.returncode is not None and server.returncode) == 1


def engine_pid(server: ShimServer) -> int:
    """The server's only child that runs the engine."""
    children = f"/proc/{server.pid}/task/{server.pid}/children"
    with open(children) as file:
        for child in file.read().split():
            with open(f"/proc/{child}/cmdline") as command:
                if "engine_proc" in command.read():
                    return int(child)
    raise AssertionError("no engine process")
