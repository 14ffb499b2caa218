"""Prefill and decode on two vLLM servers behind the proxy, through the public `openai` client."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import openai
import pytest

from tests.servers import Server
from tests.shim_server import CommandServer
from tests.vllm.dialogs import Dialog, Messages, Reference, StoreView
from tests.vllm.servers import (
    MODEL_NAME,
    TOKENS_PER_BLOCK,
    Spec,
    VllmServer,
    running,
    transfer_config,
)
from tests.waiting import eventually

pytestmark = pytest.mark.timeout(500)
# What is tested is what happens, not how fast: the machine may be busy.
PATIENT = {
    "pd_wait_s": 10.0, "lookup_deadline_s": 10.0, "load_deadline_s": 20.0, "cost_model": False,
}  # fmt: skip
HITS = ("vllm:prefix_cache_hits_total", "vllm:external_prefix_cache_hits_total")


@dataclass
class Rig:
    """The proxy, its two engines, and the index between them."""

    prefill: VllmServer
    decode: VllmServer
    proxy: CommandServer
    view: StoreView


@pytest.fixture(scope="module")
def rig(reference: Reference) -> Iterator[Rig]:
    with contextlib.ExitStack() as stack:
        redis = stack.enter_context(Server(memory="1gb", tcp=True))
        specs = [
            Spec(
                role,
                transfer_config(redis.tcp_url, pd_role=role, **PATIENT),
                flags=("--enable-scale-out",),  # the tokens-in entrance
            )
            for role in ("prefill", "decode")
        ]
        prefill, decode = stack.enter_context(running(*specs))
        proxy = stack.enter_context(
            CommandServer(
                "proxy", "--port", "0", "--prefill", prefill.url, "--decode", decode.url,
                "--store", redis.tcp_url, "--wait-s", "10",
            )
        )  # fmt: skip
        yield Rig(prefill, decode, proxy, StoreView(redis.tcp_url))


def hits(server: VllmServer) -> float:
    """Prompt tokens that were not computed, by whatever cache."""
    found = server.metrics()
    return sum(found.get(name, 0.0) for name in HITS)


def streamed(url: str, messages: Messages, session: str, tokens: int) -> tuple[str, int, int]:
    """(text, prompt tokens, cached tokens) of one streamed turn."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        chunks = list(
            client.chat.completions.create(
                model=MODEL_NAME, messages=messages, temperature=0, max_tokens=tokens,  # type: ignore[arg-type]
                stream=True, stream_options={"include_usage": True},
                extra_headers={"X-Session-ID": session},
            )
        )  # fmt: skip
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    usage = chunks[-1].usage
    assert usage is not None
    details = usage.prompt_tokens_details
    return text, usage.prompt_tokens, (details.cached_tokens or 0) if details else 0


def test_conversation_streamed_through_the_proxy(rig: Rig, reference: Reference) -> None:
    dialog: Dialog = reference.dialog(seed=7001, turns=4)
    for index, turn in enumerate(dialog.turns):
        if index:
            rig.view.wait_for("pd", dialog.need(index) // TOKENS_PER_BLOCK)
        before = hits(rig.prefill)
        text, prompt, cached = streamed(
            rig.proxy.url, turn.messages, "pd", len(turn.reply.text)
        )
        assert text == turn.reply.text and prompt == turn.reply.prompt_tokens
        # Decode computes no whole block of the prompt, prefill none of the turns before.
        whole = (prompt - 1) // TOKENS_PER_BLOCK * TOKENS_PER_BLOCK
        assert cached >= whole, rig.decode.troubles()
        assert hits(rig.prefill) - before >= dialog.need(index), rig.prefill.troubles()


def test_tokens_in_keeps_the_id(rig: Rig) -> None:
    """vLLM reads the header only here; the proxy puts the id there from any channel."""
    tokens = list(range(40, 40 + 3 * TOKENS_PER_BLOCK))
    body = {
        "token_ids": tokens, "sampling_params": {"max_tokens": 4, "temperature": 0},
        "session_id": "tokens-in",
    }  # fmt: skip
    reply = rig.proxy.http.post(rig.proxy.url + "/inference/v1/generate", json=body)
    assert reply.status_code == 200 and reply.headers["X-Session-ID"] == "tokens-in"
    rig.view.wait_for("tokens-in", 3)
    usage = reply.json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 2 * TOKENS_PER_BLOCK


def test_client_that_goes_leaves_nothing(rig: Rig) -> None:
    body = {
        "model": MODEL_NAME, "prompt": "somebody leaves " * 12, "max_tokens": 300,
        "ignore_eos": True, "stream": True, "session_id": "left",
    }  # fmt: skip
    with rig.proxy.http.stream("POST", rig.proxy.url + "/v1/completions", json=body) as reply:
        assert next(reply.iter_bytes())
    for server in (rig.prefill, rig.decode):
        eventually(server.idle, 20, f"{server.spec.name} to be idle", 0.05)
        eventually(server.reset_local_cache, 20, f"{server.spec.name} holds nothing", 0.05)


def test_refusal_is_vllms_own(rig: Rig) -> None:
    reply = httpx.post(rig.proxy.url + "/v1/completions", json={"model": "no", "prompt": "a"})
    assert reply.status_code == 404 and "no" in json.dumps(reply.json())
