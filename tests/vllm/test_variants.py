"""The same conversation where our connector is a child of MultiConnector, and at TP=2."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import openai
import pytest

from tests.servers import Server
from tests.vllm.dialogs import Reference, StoreView, assert_cached, chat, client_of, follow
from tests.vllm.servers import (
    PATIENCE,
    TOKENS_PER_BLOCK,
    Spec,
    VllmServer,
    running,
    transfer_config,
)
from tests.waiting import eventually

pytestmark = pytest.mark.timeout(400)
DRAIN_S = 30


def parent_of(*children: Mapping[str, object]) -> dict[str, object]:
    """MultiConnector over full configs of its children; the policy is the parent's to give."""
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": list(children)},
    }


OTHER = {
    "kv_connector": "SlowLoader",
    "kv_connector_module_path": "tests.vllm.slow_loader",
    "kv_role": "kv_both",
}


@dataclass
class Variants:
    """by_name and by_path: MultiConnector. tp2: plain, on two ranks."""

    servers: dict[str, VllmServer]
    clients: dict[str, openai.OpenAI]
    view: StoreView

    def empty(self, name: str) -> None:
        """Empty a server's own cache, which works as soon as nothing is held."""
        eventually(self.servers[name].reset_local_cache, 30, f"{name} holds nothing", 0.05)


@pytest.fixture(scope="module")
def variants(reference: Reference) -> Iterator[Variants]:
    with contextlib.ExitStack() as stack:
        redis = stack.enter_context(Server(memory="1gb", tcp=True))
        plain = transfer_config(redis.tcp_url, **PATIENCE)
        by_path = {**plain, "kv_connector_module_path": "connector"}
        drain = ("--shutdown-timeout", str(DRAIN_S))
        specs = [
            Spec("by_name", parent_of(plain)),
            Spec("by_path", parent_of(OTHER, by_path)),
            Spec("tp2", plain, flags=("--tensor-parallel-size", "2", *drain)),
        ]
        servers = {s.spec.name: s for s in stack.enter_context(running(*specs))}
        clients = {n: stack.enter_context(client_of(s)) for n, s in servers.items()}
        yield Variants(servers, clients, StoreView(redis.tcp_url))


def test_under_multiconnector_by_name_and_by_module_path(
    variants: Variants, reference: Reference
) -> None:
    dialog = reference.dialog(21, turns=5)
    clients = [variants.clients["by_name"], variants.clients["by_path"]]
    replies = follow(clients, dialog, "multi", variants.view)
    assert_cached(dialog, replies)
    variants.empty("by_name")
    variants.empty("by_path")


@pytest.mark.parametrize("name", ["by_name", "by_path"])
def test_metrics_of_a_child_reach_the_metrics_page(
    variants: Variants, reference: Reference, name: str
) -> None:
    dialog = reference.dialog(22, turns=2)
    follow([variants.clients[name]], dialog, f"counted-{name}", variants.view)
    variants.empty(name)
    follow([variants.clients[name]], dialog, f"counted-{name}", variants.view)
    found = variants.servers[name].metrics("vllm:session_kv_")
    assert found["vllm:session_kv_tokens_loaded_total"] > 0
    assert found["vllm:session_kv_tokens_saved_total"] > 0
    assert variants.servers[name].exit_code() is None
    assert "Traceback" not in variants.servers[name].log()


def test_at_tp2_a_block_is_found_on_every_rank(variants: Variants, reference: Reference) -> None:
    dialog = reference.dialog(23, turns=3, words=150)
    client = variants.clients["tp2"]
    for index, turn in enumerate(dialog.turns):
        reply = chat(client, turn.messages, "ranks")
        assert reply.text == turn.reply.text
        if index:
            assert reply.cached_tokens >= dialog.need(index), variants.servers["tp2"].troubles()
        covered = turn.reply.prompt_tokens // TOKENS_PER_BLOCK
        variants.view.wait_for("ranks", covered)
        variants.empty("tp2")
    loaded = variants.servers["tp2"].metrics("vllm:session_kv_")
    assert loaded["vllm:session_kv_tokens_loaded_total"] >= dialog.need(1) + dialog.need(2), (
        variants.servers["tp2"].troubles()
    )
    state = variants.view.index.session(variants.view.key("ranks"))
    assert state is not None and state.blocks >= dialog.need(2) // TOKENS_PER_BLOCK


def test_tp2_and_tp1_share_nothing(variants: Variants, reference: Reference) -> None:
    turn = reference.dialog(23, turns=3, words=150).turns[0]
    reply = chat(variants.clients["by_name"], turn.messages, "ranks")
    assert (reply.text, reply.cached_tokens) == (turn.reply.text, 0)


def test_sigterm_drains_what_runs_and_leaves_no_process(
    variants: Variants, reference: Reference
) -> None:
    """The last test of this module: it ends the server."""
    server, answers = variants.servers["tp2"], []
    turn = reference.dialog(24, turns=1, words=80, tokens=120).turns[0]

    def ask() -> None:
        answers.append(chat(variants.clients["tp2"], turn.messages, "last", tokens=120))

    thread = threading.Thread(target=ask)
    thread.start()
    eventually(lambda: not server.idle(), 30, "the request to run")
    server.signal(signal.SIGTERM)
    server.wait_exit(DRAIN_S + 30)
    thread.join(30)
    eventually(lambda: not server.group(), 30, "the end of every process")
    assert [a.text for a in answers] == [turn.reply.text]
    # What was not committed expires by itself; what stays is listed.
    stays_or_expires(variants.view)


def stays_or_expires(view: StoreView) -> None:
    """No object that the index doesn't list is there for ever."""
    ranks_max, found = 2, view.index.stats()
    client: Any = view.raw
    keys = list(client.scan_iter(match="skvo:*", count=1000))
    lasting = [key for key in keys if client.ttl(key) == -1]
    assert len(lasting) <= found["blocks"] * ranks_max
    assert keys, "something was saved"
