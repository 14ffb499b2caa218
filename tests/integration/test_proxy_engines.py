"""Prefill and decode on real engines behind the real proxy, with a real store between them."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import pytest

from tests.servers import Server
from tests.shim_server import CommandServer, ShimServer, together
from tests.waiting import eventually

TEXT = "/v1/completions"
BLOCK = 16
WAIT_S = 5.0


@dataclass
class Rig:
    """One prefill and one decode engine, one without a connector, and the proxy."""

    index: Server
    data: Server
    prefill: ShimServer
    decode: ShimServer
    cold: ShimServer
    proxy: CommandServer

    @property
    def store(self) -> str:
        return json.dumps({"index": self.index.url, "data": [self.data.url]})

    def proxy_before(self, prefill: ShimServer, *flags: str) -> CommandServer:
        return CommandServer(
            "proxy", "--port", "0", "--prefill", prefill.url, "--decode", self.decode.url,
            "--store", self.store, *flags,
        )  # fmt: skip

    def expected(self, prompt: str, max_tokens: int = 20) -> str:
        return str(self.cold.post(TEXT, ask(prompt, max_tokens))["choices"][0]["text"])


def flag(index: Server, data: Server, role: str) -> str:
    extra = {
        "store": {"index": index.url, "data": [data.url]}, "pd_role": role, "pd_wait_s": WAIT_S,
    }  # fmt: skip
    config = {"kv_connector": "SessionKVConnector", "kv_role": "kv_both"}
    return json.dumps({**config, "kv_connector_extra_config": extra})


def engine(index: Server, data: Server, role: str, *flags: str) -> ShimServer:
    return ShimServer(
        "--kv-transfer-config", flag(index, data, role), "--max-model-len", "2048", *flags
    )


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with contextlib.ExitStack() as stack:
        index, data = stack.enter_context(Server()), stack.enter_context(Server())
        prefill, decode = engine(index, data, "prefill"), engine(index, data, "decode")
        cold = ShimServer("--max-model-len", "2048")
        stack.enter_context(together(prefill, decode, cold))
        made = Rig(index, data, prefill, decode, cold, CommandServer())
        made.proxy = stack.enter_context(made.proxy_before(prefill, "--where", "--wait-s", "20"))
        yield made


def ask(prompt: str, max_tokens: int = 20, **more: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, **more}


def text_of(reply: Any) -> str:
    return str(reply["choices"][0]["text"])


def cached(reply: Any) -> int:
    return int(reply["usage"]["prompt_tokens_details"]["cached_tokens"])


def all_blocks(prompt: str) -> int:
    """Tokens of a prompt that a decode engine can be given."""
    return (len(prompt) - 1) // BLOCK * BLOCK


def gauge(server: ShimServer, name: str) -> float:
    found = re.search(rf"^{name}(?:\{{[^}}]*\}})? (\S+)$", server.metrics(), re.MULTILINE)
    return float(found[1]) if found else 0.0


def quiet(*servers: ShimServer) -> None:
    """Nothing runs, nothing is transferred, nothing is held."""
    for server in servers:
        for name in ("shim_num_running", "shim_num_waiting", "shim_num_loading",
                     "session_kv_open_jobs"):  # fmt: skip
            eventually(lambda s=server, n=name: gauge(s, n) == 0, what=f"{name} at {server.url}")


def answered(server: ShimServer) -> bool:
    """The engine has computed and replied, and still has something to save."""
    return gauge(server, "session_kv_open_jobs") > 0 and gauge(server, "shim_num_running") == 0


@contextlib.contextmanager
def paused(server: Server) -> Iterator[None]:
    """The server answers nobody; it goes on at the end."""
    server.pause()
    try:
        yield
    finally:
        server.resume()


# ---- as it should go ---------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_openai_client_through_the_proxy(rig: Rig, stream: bool) -> None:
    http = httpx.Client(verify=False, trust_env=False, timeout=30)
    front = openai.OpenAI(base_url=f"{rig.proxy.url}/v1", api_key="-", http_client=http)
    messages: list[Any] = [{"role": "user", "content": f"a question, stream {stream} " * 4}]
    body: dict[str, Any] = {
        "model": "shim", "messages": messages, "max_tokens": 24, "temperature": 0,
    }  # fmt: skip
    cold = rig.cold.post("/v1/chat/completions", body)
    size = rig.decode.http.get(rig.decode.url + "/session_kv/info").json()["bytes_per_token"]

    def not_computed() -> float:
        loaded = gauge(rig.decode, "session_kv_load_bytes_total") / size
        return loaded + gauge(rig.decode, "shim_prefix_hit_tokens_total")

    before = not_computed()
    if stream:
        pieces = front.chat.completions.create(**body, stream=True)
        text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
    else:
        text = front.chat.completions.create(**body).choices[0].message.content or ""
    assert text == cold["choices"][0]["message"]["content"]
    tokens = (cold["usage"]["prompt_tokens"] - 1) // BLOCK * BLOCK
    assert not_computed() - before == tokens


def test_next_turn_is_prefilled_from_what_decode_wrote(rig: Rig) -> None:
    first = "a conversation that goes on, " * 4
    one = rig.proxy.post(TEXT, ask(first, 40, session_id="goes-on"))
    assert cached(one) == all_blocks(first) and text_of(one) == rig.expected(first, 40)
    quiet(rig.prefill, rig.decode)
    second = first + text_of(one) + " and now the second turn of it"
    before = gauge(rig.prefill, "shim_external_loaded_tokens_total")
    own = gauge(rig.prefill, "shim_prefix_hit_tokens_total")
    # Another proxy: nothing it remembers is needed.
    with rig.proxy_before(rig.prefill) as restarted:
        two = restarted.post(TEXT, ask(second, 20, session_id="goes-on"))
    assert text_of(two) == rig.expected(second)
    stored = (len(first) + 40 - 1) // BLOCK * BLOCK
    got = gauge(rig.prefill, "shim_external_loaded_tokens_total") - before
    assert got > 0 and got + gauge(rig.prefill, "shim_prefix_hit_tokens_total") - own == stored
    assert cached(two) == all_blocks(second)


def test_where(rig: Rig) -> None:
    rig.proxy.post(TEXT, ask("where does it live? " * 4, session_id="somewhere"))
    quiet(rig.prefill, rig.decode)
    found = rig.proxy.http.get(rig.proxy.url + "/where", params={"session": "somewhere"}).json()
    assert (found["prefill"], found["decode"]) == ("prefill-0", "decode-0")
    assert found["store"], "the index knows the session"


# ---- faults ------------------------------------------------------------------------------------


def test_slow_puts_are_waited_for(rig: Rig) -> None:
    prompt = "its blocks take their time " * 6
    with ThreadPoolExecutor(1) as pool:
        with paused(rig.data):
            reply = pool.submit(rig.proxy.post, TEXT, ask(prompt, session_id="slow"))
            eventually(lambda: answered(rig.prefill), what="the prefill engine's answer")
            assert gauge(rig.decode, "shim_num_running") == 0, "decode was asked too early"
        assert text_of(reply.result(30)) == rig.expected(prompt)
        assert cached(reply.result(0)) == all_blocks(prompt)


def test_decode_asked_first_waits_itself(rig: Rig) -> None:
    prompt = "decode is asked before the commit " * 5
    with ThreadPoolExecutor(1) as pool:
        with paused(rig.data):
            handed = rig.prefill.post(TEXT, ask(prompt, 1, session_id="early"))
            params = handed["kv_transfer_params"]
            assert params["session_kv"]["num_tokens"] == len(prompt) // BLOCK * BLOCK
            body = ask(prompt, 20, session_id="early", kv_transfer_params=params)
            reply = pool.submit(rig.decode.post, TEXT, body)
            eventually(lambda: gauge(rig.decode, "shim_num_waiting") == 1, what="decode's wait")
        assert text_of(reply.result(30)) == rig.expected(prompt)
        assert cached(reply.result(0)) == all_blocks(prompt)


def test_prefill_engine_killed_before_its_commit(rig: Rig) -> None:
    prompt = "whoever computed this is no more " * 5
    with (
        engine(rig.index, rig.data, "prefill") as doomed,
        rig.proxy_before(doomed, "--wait-s", "1") as proxy,
        ThreadPoolExecutor(1) as pool,
    ):
        with paused(rig.data):
            reply = pool.submit(proxy.post, TEXT, ask(prompt, 20, session_id="orphan"))
            eventually(lambda: answered(doomed), what="the prefill engine's answer")
            doomed.kill()
        assert text_of(reply.result(60)) == rig.expected(prompt)
        # And with no prefill engine at all decode does it alone.
        other = "nobody prefills this one " * 5
        assert text_of(proxy.post(TEXT, ask(other))) == rig.expected(other)
    quiet(rig.decode)


def test_client_that_goes_in_mid_stream_leaves_nothing(rig: Rig) -> None:
    body = ask("somebody leaves " * 6, 1500, stream=True, ignore_eos=True, session_id="left")
    # The proxy's client is left open: what ends is this one reply.
    with rig.proxy.http.stream("POST", rig.proxy.url + TEXT, json=body) as reply:
        assert next(reply.iter_bytes())
    quiet(rig.prefill, rig.decode)
    for server in (rig.prefill, rig.decode):
        assert server.post("/reset_prefix_cache", {})["success"], "blocks are still held"
        assert gauge(server, "shim_free_blocks") == gauge(server, "shim_num_blocks")


def test_duplicate_request_ids(rig: Rig) -> None:
    prompts = [f"one of several, number {index % 2} " * 5 for index in range(6)]

    def one(prompt: str) -> str:
        return text_of(rig.proxy.post(TEXT, ask(prompt), **{"X-Request-Id": "the-same"}))

    with ThreadPoolExecutor(6) as pool:
        texts = list(pool.map(one, prompts))
    assert texts == [rig.expected(prompt) for prompt in prompts]
    quiet(rig.prefill, rig.decode)


def test_tip_that_was_evicted_is_computed_again(rig: Rig) -> None:
    prompt = "stored, and then it was not " * 6
    handed = rig.prefill.post(TEXT, ask(prompt, 1, session_id="evicted"))
    quiet(rig.prefill)
    rig.prefill.post("/close_session", {"session_id": "evicted"})
    params = handed["kv_transfer_params"]
    body = ask(prompt, 20, kv_transfer_params=params)

    def gone() -> bool:
        """The close reaches the index a moment later; then nothing can be loaded."""
        reply = rig.decode.post(TEXT, body)
        assert text_of(reply) == rig.expected(prompt)
        rig.decode.post("/reset_prefix_cache", {})
        return cached(reply) == 0

    eventually(gone, what="the eviction")
    quiet(rig.decode)


def test_store_lost_between_prefill_and_decode(rig: Rig) -> None:
    prompt = "the store will be lost " * 6
    handed = rig.prefill.post(TEXT, ask(prompt, 1, session_id="lost"))
    quiet(rig.prefill)
    for server in (rig.data, rig.index):
        server.kill()
        server.start()
    body = ask(prompt, 20, session_id="lost", kv_transfer_params=handed["kv_transfer_params"])
    assert text_of(rig.decode.post(TEXT, body)) == rig.expected(prompt)
    quiet(rig.decode)
    tries = iter(range(1000))

    def hits_again() -> bool:
        other = f"{next(tries)} prompts after the store was lost " * 4
        reply = rig.proxy.post(TEXT, ask(other))
        assert text_of(reply) == rig.expected(other)
        return cached(reply) == all_blocks(other)

    eventually(hits_again, 20, "hits after the loss")


def test_engines_that_share_no_namespace_are_refused(rig: Rig) -> None:
    with engine(rig.index, rig.data, "decode", "--block-size", "32") as odd:
        command = ["proxy", "--port", "0", "--prefill", rig.prefill.url, "--decode", odd.url]
        done = subprocess.run(
            [sys.executable, "-m", "engine_shim.cli", *command],
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
    assert done.returncode == 2 and "one namespace" in done.stderr
    assert rig.prefill.url in done.stderr and odd.url in done.stderr
