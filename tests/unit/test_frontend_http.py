"""The HTTP front end over an engine in memory: replies, streams, limits, errors, cancellation."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import pytest

from connector.stats import Stats
from engine_shim.errors import EngineDead, RequestFailed
from engine_shim.frontend.app import build_app
from engine_shim.frontend.chat_template import render
from engine_shim.frontend.state import Frontend, FrontendConfig
from engine_shim.tokenizer import encode
from tests.frontend_fakes import MAX_MODEL_LEN, FakeEngine, reply_text, served
from tests.waiting import eventually


@dataclass
class Front:
    frontend: Frontend
    url: str
    http: httpx.Client
    openai: openai.OpenAI

    @property
    def engine(self) -> FakeEngine:
        assert isinstance(self.frontend.engine, FakeEngine)
        return self.frontend.engine

    def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.http.post(path, content=raw, headers=headers)


@pytest.fixture(scope="module")
def server() -> Iterator[Front]:
    config = FrontendConfig(served_model_name="shim", bytes_per_token=64)
    frontend = Frontend(FakeEngine(), config)
    with served(build_app(frontend)) as url, httpx.Client(base_url=url, timeout=20) as client:
        yield Front(
            frontend, url, client,
            openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0),
        )  # fmt: skip


@pytest.fixture
def front(server: Front) -> Front:
    """The module's server with a fresh engine behind it."""
    server.frontend.engine = FakeEngine()
    return server


def sse(text: str) -> list[Any]:
    """Events of a stream; the last one is [DONE] where the API has it."""
    frames = [frame for frame in text.split("\n\n") if frame]
    found: list[Any] = []
    for frame in frames:
        value = next(line for line in frame.splitlines() if line.startswith("data: "))[6:]
        found.append(value if value == "[DONE]" else json.loads(value))
    return found


# ---- completions ------------------------------------------------------------------------------


def test_completion_with_the_openai_client(front: Front) -> None:
    reply = front.openai.completions.create(model="shim", prompt="hello there", max_tokens=5)
    prompt = encode("hello there")
    assert reply.choices[0].text == reply_text(prompt, 5)
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage is not None
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (11, 5)
    assert reply.usage.prompt_tokens_details.cached_tokens == 48
    assert front.engine.seen[0].params.max_tokens == 5


def test_completion_default_is_sixteen_tokens(front: Front) -> None:
    reply = front.openai.completions.create(model="shim", prompt="hello")
    assert reply.usage is not None and reply.usage.completion_tokens == 16


def test_completion_stream_with_the_openai_client(front: Front) -> None:
    stream = front.openai.completions.create(
        model="shim", prompt="hello", max_tokens=6, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    chunks = list(stream)
    text = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
    assert text == reply_text(encode("hello"), 6)
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    last = chunks[-1]
    assert not last.choices and last.usage is not None and last.usage.completion_tokens == 6
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_stream_without_usage_ends_with_done(front: Front) -> None:
    reply = front.post("/v1/completions", {"prompt": "a", "max_tokens": 2, "stream": True})
    events = sse(reply.text)
    assert events[-1] == "[DONE]" and len(events) == 3
    assert all("usage" not in event for event in events[:-1])


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", [[97, 98]]),
        (["ab", "c"], [[97, 98], [99]]),
        ([97, 98], [[97, 98]]),
        ([[97], [98, 99]], [[97], [98, 99]]),
    ],
)
def test_all_forms_of_a_prompt(front: Front, prompt: Any, expected: list[list[int]]) -> None:
    reply = front.post("/v1/completions", {"prompt": prompt, "max_tokens": 1}).json()
    assert sorted(seen.prompt for seen in front.engine.seen) == sorted(expected)
    assert [choice["index"] for choice in reply["choices"]] == list(range(len(expected)))
    for choice, tokens in zip(reply["choices"], expected, strict=True):
        assert choice["text"] == reply_text(tokens, 1)
    assert reply["usage"]["prompt_tokens"] == sum(map(len, expected))


def test_batch_with_n_numbers_its_choices_prompt_by_prompt(front: Front) -> None:
    body = {"prompt": ["a", "b"], "n": 2, "max_tokens": 3, "seed": 7, "session_id": "s"}
    reply = front.post("/v1/completions", body).json()
    texts = [choice["text"] for choice in reply["choices"]]
    assert texts == [reply_text([97], 3)] * 2 + [reply_text([98], 3)] * 2
    assert {seen.options.session_id for seen in front.engine.seen} == {"s"}
    assert all(seen.params.n == 1 for seen in front.engine.seen)
    assert sorted(seen.params.seed or 0 for seen in front.engine.seen) == [7, 7, 8, 8]
    assert reply["usage"] == {
        "prompt_tokens": 2, "completion_tokens": 12, "total_tokens": 14,
        "prompt_tokens_details": {
            "cached_tokens": 96, "local_cached_tokens": 32, "external_cached_tokens": 64,
        },
    }  # fmt: skip


def test_batch_stream_interleaves_by_index(front: Front) -> None:
    body = {"prompt": ["a", "b"], "max_tokens": 3, "stream": True}
    events = sse(front.post("/v1/completions", body).text)[:-1]
    texts = {0: "", 1: ""}
    for event in events:
        texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert texts == {0: reply_text([97], 3), 1: reply_text([98], 3)}


def test_echo_puts_the_prompt_first_streamed_or_not(front: Front) -> None:
    body = {"prompt": "abc", "max_tokens": 2, "echo": True}
    whole = front.post("/v1/completions", body).json()["choices"][0]["text"]
    events = sse(front.post("/v1/completions", {**body, "stream": True}).text)[:-1]
    assert whole == "abc" + reply_text(encode("abc"), 2)
    assert "".join(event["choices"][0]["text"] for event in events) == whole


def test_completion_logprobs(front: Front) -> None:
    reply = front.openai.completions.create(model="shim", prompt="abc", max_tokens=3, logprobs=2)
    found = reply.choices[0].logprobs
    assert found is not None and "".join(found.tokens or []) == reply.choices[0].text
    assert found.token_logprobs == [-0.5] * 3 and found.text_offset == [0, 1, 2]
    assert all(len(top) == 2 for top in found.top_logprobs or [])


# ---- chat and responses -----------------------------------------------------------------------

MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]


def test_chat_with_the_openai_client(front: Front) -> None:
    reply = front.openai.chat.completions.create(model="shim", messages=MESSAGES, max_tokens=4)
    prompt = render(MESSAGES)
    assert front.engine.seen[0].prompt == prompt
    assert reply.choices[0].message.content == reply_text(prompt, 4)
    assert reply.choices[0].message.role == "assistant"
    assert reply.usage is not None and reply.usage.prompt_tokens == len(prompt)


def test_chat_without_a_limit_runs_to_the_context(front: Front) -> None:
    front.openai.chat.completions.create(model="shim", messages=MESSAGES)
    assert front.engine.seen[0].params.max_tokens is None


def test_chat_stream_with_the_openai_client(front: Front) -> None:
    chunks = list(
        front.openai.chat.completions.create(
            model="shim", messages=MESSAGES, max_completion_tokens=4, stream=True,
            stream_options={"include_usage": True}, n=2,
        )
    )
    texts = {0: "", 1: ""}
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == dict.fromkeys((0, 1), reply_text(render(MESSAGES), 4))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 8
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == 48


def test_chat_logprobs(front: Front) -> None:
    reply = front.openai.chat.completions.create(
        model="shim", messages=MESSAGES, max_tokens=2, logprobs=True, top_logprobs=1
    )
    found = reply.choices[0].logprobs
    assert found is not None and found.content is not None
    assert "".join(entry.token for entry in found.content) == reply.choices[0].message.content
    assert [len(entry.top_logprobs) for entry in found.content] == [1, 1]


def test_response_with_the_openai_client(front: Front) -> None:
    reply = front.openai.responses.create(
        model="shim", input="hi", instructions="be brief", max_output_tokens=4
    )
    assert reply.output_text == reply_text(render(MESSAGES), 4)
    assert reply.status == "incomplete" and reply.usage is not None
    assert reply.usage.input_tokens_details.cached_tokens == 48


def test_response_stream_with_the_openai_client(front: Front) -> None:
    events = list(
        front.openai.responses.create(
            model="shim", input=MESSAGES, max_output_tokens=4, stream=True
        )
    )
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.incomplete"
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == events[-1].response.output_text == reply_text(render(MESSAGES), 4)
    assert [event.sequence_number for event in events] == list(range(len(events)))


# ---- tokens in, and SGLang's form -------------------------------------------------------------


def test_tokens_in_tokens_out(front: Front) -> None:
    body = {"token_ids": [97, 98], "sampling_params": {"max_tokens": 3, "temperature": 0}}
    reply = front.post("/inference/v1/generate", {**body, "return_token_ids": True}).json()
    choice = reply["choices"][0]
    assert bytes(choice["token_ids"]).decode() == reply_text([97, 98], 3)
    assert "text" not in choice and reply["output_mode"] == "tokens"
    assert reply["prompt_token_ids"] == [97, 98]
    assert front.engine.seen[0].params.temperature == 0
    events = sse(front.post("/inference/v1/generate", {**body, "stream": True}).text)[:-1]
    streamed = [token for event in events for token in event["choices"][0]["token_ids"]]
    assert streamed == choice["token_ids"]


def test_tokens_in_without_max_tokens_fills_the_context(front: Front) -> None:
    front.post("/inference/v1/generate", {"token_ids": [97], "sampling_params": {}})
    assert front.engine.seen[0].params.max_tokens is None


def test_tokens_in_as_text_with_logprobs(front: Front) -> None:
    body = {"token_ids": [97], "sampling_params": {"max_tokens": 2, "logprobs": 2}}
    text = front.post("/inference/v1/generate", {**body, "output_mode": "text"}).json()
    assert text["choices"][0]["text"] == reply_text([97], 2)
    plain = front.post("/inference/v1/generate", body).json()["choices"][0]["logprobs"]["content"]
    assert [entry["rank"] for entry in plain] == [1, 1]
    assert [len(entry["top_logprobs"]) for entry in plain] == [2, 2]


def test_native_form_single_batch_and_stream(front: Front) -> None:
    one = front.post("/generate", {"text": "ab", "sampling_params": {"max_new_tokens": 3}}).json()
    assert one["text"] == reply_text([97, 98], 3)
    assert one["meta_info"]["finish_reason"] == {"type": "length", "length": 3}
    assert one["meta_info"]["cached_tokens"] == 48
    many = front.post(
        "/generate",
        {"input_ids": [[97], [98]], "sampling_params": {"max_new_tokens": 1}, "rid": ["x", "y"]},
    ).json()
    assert [reply["meta_info"]["id"] for reply in many] == ["x", "y"]
    events = sse(
        front.post(
            "/generate", {"text": "ab", "sampling_params": {"max_new_tokens": 3}, "stream": True}
        ).text
    )
    assert events[-2]["text"] == one["text"] and events[-1] == "[DONE]"


def test_legacy_session_continues_its_prompt(front: Front) -> None:
    sid = front.post("/open_session", {"capacity_of_str_len": 100}).json()
    first = front.post("/generate", legacy("abc", sid)).json()
    rid = first["meta_info"]["id"]
    front.post("/generate", legacy("de", sid, rid=rid))
    whole = encode("abc") + first["output_ids"] + encode("de")
    assert front.engine.seen[1].prompt == whole
    front.post("/generate", legacy("f", sid, rid=rid, drop_previous_output=True))
    assert front.engine.seen[2].prompt == encode("abcf")
    front.post("/generate", legacy("g", sid, rid=rid, offset=2))
    assert front.engine.seen[3].prompt == encode("abg")
    assert {seen.options.session_id for seen in front.engine.seen} == {sid}
    too_long = front.post("/generate", legacy("x" * 101, sid))
    assert too_long.status_code == 400 and "capacity_of_str_len" in too_long.text
    closed = front.post("/close_session", {"session_id": sid}).json()
    assert closed["legacy"] and closed["freed_tokens"] == 0
    assert front.post("/generate", legacy("h", sid)).status_code == 400


def legacy(text: str, sid: str, **params: Any) -> dict[str, Any]:
    return {
        "text": text,
        "sampling_params": {"max_new_tokens": 4},
        "session_params": {"id": sid, **params},
    }


def test_session_id_and_session_params_together_are_refused(front: Front) -> None:
    sid = front.post("/open_session", {}).json()
    reply = front.post("/generate", {**legacy("a", sid), "session_id": "other"})
    assert reply.status_code == 400
    assert reply.json()["error"]["code"] == "conflicting_session"
    assert not front.engine.seen


# ---- kv_transfer_params, extra arguments -------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
def test_transfer_params_go_in_and_out(front: Front, path: str) -> None:
    front.engine.handoff = {"session_kv": {"tip": "00"}}
    given = {"session_kv": {"tip": "ff"}, "session_id": "from-params"}
    body = {"prompt": "a", "messages": MESSAGES, "input": "a", "max_tokens": 1}
    reply = front.post(path, {**body, "kv_transfer_params": given})
    assert reply.json()["kv_transfer_params"] == front.engine.handoff
    assert reply.headers["X-Session-ID"] == "from-params"
    options = front.engine.seen[0].options
    assert options.session_id == "from-params"
    assert options.kv_transfer_params == {"session_kv": {"tip": "ff"}}


def test_xargs_reach_the_engine_without_the_id(front: Front) -> None:
    xargs = {"session_id": "from-xargs", "flavour": 3}
    front.post("/v1/completions", {"prompt": "a", "vllm_xargs": xargs, "cache_salt": "salt"})
    seen = front.engine.seen[0]
    assert seen.options.session_id == "from-xargs" and seen.options.cache_salt == "salt"
    assert seen.params.extra_args == {"flavour": 3}


# ---- administration ---------------------------------------------------------------------------


def test_models_health_info_and_reset(front: Front) -> None:
    card = front.openai.models.list().data[0]
    assert card.id == "shim" and front.openai.models.retrieve("shim").id == "shim"
    assert front.http.get("/health").status_code == 200
    info = front.http.get("/session_kv/info").json()
    assert info["bytes_per_token"] == 64 and info["namespace"] == ""
    assert front.post("/reset_prefix_cache", b"").json() == {"success": True}
    front.engine.errored = True
    assert front.http.get("/health").status_code == 503


def test_metrics_flatten_numbers_and_carry_no_id(front: Front) -> None:
    connector = Stats()
    connector.add("load_bytes", 640)
    connector.add("lookups", 3, by="hit_tip")
    connector.add("lookups", 1, by="miss")
    for seconds in (0.0004, 0.03, 0.04, 99.0):
        connector.observe("load", seconds)
    front.engine.stats_value = {
        "num_running": 2,
        "free_blocks": 7,
        "prompt_tokens": 11,
        "by_reason": {"stop": 1},
        "connector": {
            **connector.peek(), "open_jobs": 1, "namespace": "ab12",
            "gauge:node_up{node=n}": 1,
        },
    }
    front.post("/v1/completions", {"prompt": "a", "max_tokens": 1, "session_id": "secret-id"})
    text = front.http.get("/metrics").text
    for line in (
        "session_kv_load_bytes_total 640.0",
        'session_kv_lookups_total{by="hit_tip"} 3.0',
        "session_kv_open_jobs 1.0",
        'session_kv_node_up{node="n"} 1.0',
        'session_kv_load_seconds_bucket{le="0.0005"} 1.0',
        'session_kv_load_seconds_bucket{le="0.05"} 3.0',
        'session_kv_load_seconds_bucket{le="+Inf"} 4.0',
        "session_kv_load_seconds_count 4.0",
        "shim_num_running 2.0",
        "shim_free_blocks 7.0",
        "shim_prompt_tokens_total 11.0",
        'shim_by_reason_total{kind="stop"} 1.0',
        'shim_http_requests_total{entrance="completions",status="200"}',
    ):
        assert line in text, line
    assert "secret-id" not in text and "seconds_sum_total" not in text
    assert front.http.get("/session_kv/info").json()["namespace"] == "ab12"


def test_close_session(front: Front) -> None:
    reply = front.post("/close_session", {"session_id": "s", "cache_salt": "x"})
    assert reply.json()["freed_tokens"] == 48 and reply.headers["X-Session-ID"] == "s"
    front.post("/close_session", b"", **{"X-Session-ID": "t"})
    assert front.engine.closed == [("s", "x"), ("t", None)]
    assert front.post("/close_session", {}).status_code == 400


# ---- bad input --------------------------------------------------------------------------------

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
TOO_LONG = "x" * (MAX_MODEL_LEN + 1)
DEEP = b'{"prompt": "a", "vllm_xargs": ' + b'{"a":' * 10**5 + b"1" + b"}" * (10**5 + 1)
BAD: list[tuple[str, Any, int, str | None]] = [
    (TEXT, b"{", 400, None),
    (TEXT, b"", 400, None),
    (TEXT, b"\xff\xfe", 400, None),
    (TEXT, [], 400, None),
    (TEXT, {}, 400, "prompt"),
    (TEXT, {"prompt": 5}, 400, "prompt"),
    (TEXT, {"prompt": ""}, 400, "prompt"),
    (TEXT, {"prompt": []}, 400, "prompt"),
    (TEXT, {"prompt": [[]]}, 400, "prompt"),
    (TEXT, {"prompt": ["a", 1]}, 400, "prompt"),
    (TEXT, {"prompt": [-1]}, 400, "prompt[0]"),
    (TEXT, {"prompt": TOO_LONG}, 400, "prompt"),
    (TEXT, {"prompt": "a", "max_tokens": -1}, 400, "max_tokens"),
    (TEXT, {"prompt": "a", "max_tokens": "5"}, 400, "max_tokens"),
    (TEXT, {"prompt": "a", "max_tokens": 1.5}, 400, "max_tokens"),
    (TEXT, {"prompt": "a", "temperature": -1}, 400, "temperature"),
    (TEXT, {"prompt": "a", "temperature": "hot"}, 400, "temperature"),
    (TEXT, {"prompt": "a", "top_p": 0}, 400, "top_p"),
    (TEXT, {"prompt": "a", "n": 0}, 400, "n"),
    (TEXT, {"prompt": "a", "n": 10**6}, 400, "n"),
    (TEXT, {"prompt": ["a"] * 200, "n": 200}, 400, "n"),
    (TEXT, {"prompt": "a", "logit_bias": {"5": 1}}, 400, "logit_bias"),
    (TEXT, {"prompt": "a", "presence_penalty": 1}, 400, "presence_penalty"),
    (TEXT, {"prompt": "a", "kv_transfer_params": []}, 400, "kv_transfer_params"),
    (TEXT, {"prompt": "a", "kv_hints": 5}, 400, "kv_hints"),
    (TEXT, {"prompt": "a", "cache_salt": ""}, 400, "cache_salt"),
    (TEXT, {"prompt": "a", "session_id": "x" * 257}, 400, "session_id"),
    (TEXT, {"prompt": "a", "session_id": "a\nb"}, 400, "session_id"),
    (TEXT, {"prompt": "a", "vllm_xargs": {"session_id": "x" * 257}}, 400, "session_id"),
    (TEXT, {"prompt": "a", "model": "other"}, 404, "model"),
    (TEXT, {"prompt": "a", "priority": 10**30}, 400, "priority"),
    (TEXT, {"prompt": "a", "vllm_xargs": {"a": 10**30}}, 400, None),
    (TEXT, {"prompt": "a", "kv_transfer_params": {"a": [10**30]}}, 400, None),
    (TEXT, DEEP, 400, None),
    (CHAT, {"messages": []}, 400, "messages"),
    (CHAT, {"messages": "hi"}, 400, "messages"),
    (CHAT, {"messages": [{"role": "robot", "content": "a"}]}, 400, "messages[0].role"),
    (CHAT, {"messages": [{"role": "user"}]}, 400, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, 400, "messages[0].content"),
    (CHAT, {"messages": MESSAGES, "top_logprobs": 2}, 400, "top_logprobs"),
    (CHAT, {"messages": MESSAGES, "max_tokens": 0}, 400, "max_tokens"),
    ("/v1/responses", {"input": "a", "previous_response_id": "r"}, 400, "previous_response_id"),
    ("/inference/v1/generate", {"token_ids": [], "sampling_params": {}}, 400, "token_ids"),
    ("/inference/v1/generate", {"token_ids": [1]}, 400, "sampling_params"),
    (
        "/inference/v1/generate",
        {"token_ids": [1], "sampling_params": {"max_tokens": -4}},
        400,
        "max_tokens",
    ),
    ("/generate", {}, 400, "text"),
    ("/generate", {"text": "a", "input_ids": [1]}, 400, "text"),
    ("/generate", {"text": "a", "session_params": {"id": "none"}}, 400, "session_params.id"),
    ("/open_session", {"session_id": "x" * 300}, 400, "session_id"),
    ("/v1/nothing", {}, 404, None),
]


@pytest.mark.parametrize(("path", "body", "status", "param"), BAD)
def test_bad_input_is_a_shaped_error_and_the_engine_goes_on(
    front: Front, path: str, body: Any, status: int, param: str | None
) -> None:
    reply = front.post(path, body)
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert error["type"] == "invalid_request_error" and error["message"]
    assert error["param"] == param
    assert not front.engine.seen or "context" in error["message"]
    good = front.openai.completions.create(model="shim", prompt="hello", max_tokens=1)
    assert good.choices[0].text == reply_text(encode("hello"), 1)


def test_wrong_method_is_405(front: Front) -> None:
    reply = front.http.get("/v1/completions")
    assert reply.status_code == 405 and "POST" in reply.headers["allow"]


def test_body_over_the_limit_is_413(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine_shim.frontend.replies.BODY_BYTES_MAX", 100)
    reply = front.post(TEXT, {"prompt": "x" * 200})
    assert reply.status_code == 413


def test_openai_client_sees_its_own_error_types(front: Front) -> None:
    with pytest.raises(openai.NotFoundError):
        front.openai.completions.create(model="other", prompt="a")
    with pytest.raises(openai.BadRequestError):
        front.openai.completions.create(model="shim", prompt="a", max_tokens=-1)


# ---- faults of the engine ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("failure", "status"), [(EngineDead("gone"), 503), (RequestFailed("no"), 500)]
)
def test_fault_before_a_reply_is_a_status(front: Front, failure: Exception, status: int) -> None:
    front.engine.failure = failure
    reply = front.post(TEXT, {"prompt": "a"})
    assert reply.status_code == status and reply.json()["error"]["message"] == str(failure)


def test_unexpected_error_says_nothing_of_itself(front: Front) -> None:
    front.engine.failure = ZeroDivisionError("secret detail")
    reply = front.post(TEXT, {"prompt": "a"})
    assert reply.status_code == 500 and "secret" not in reply.text


def test_fault_in_mid_stream_is_an_event(front: Front) -> None:
    front.engine.failure, front.engine.fail_after = EngineDead("gone"), 2
    events = sse(front.post(TEXT, {"prompt": "a", "stream": True}).text)
    assert events[-1] == "[DONE]" and events[-2]["error"]["message"] == "gone"
    assert len(events) == 4


# ---- clients that go away ---------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_client_that_goes_aborts_its_request(front: Front, stream: bool, n: int) -> None:
    front.engine.gate = asyncio.Event()
    body = {"prompt": "a", "stream": stream, "n": n, "request_id": "mine"}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(front.url + TEXT, json=body, timeout=0.3)
    eventually(lambda: front.engine.aborted == ["mine"] * n, what="the abort")


def test_one_failing_sequence_ends_its_siblings(front: Front) -> None:
    front.engine.failure, front.engine.fail_after = RequestFailed("no"), 3
    assert front.post(TEXT, {"prompt": ["a", "b", "c"]}).status_code == 500
    eventually(lambda: len(front.engine.aborted) == 3, what="all three to end")
