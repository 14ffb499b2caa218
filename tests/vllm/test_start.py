"""What stops the start of vLLM, and what does not."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole

from connector.errors import ConfigError, UnsupportedError
from tests.servers import free_port
from tests.vllm.dialogs import Reference, chat, client_of
from tests.vllm.scheduler_kit import Engine, cache_config, engine_config, prompt
from tests.vllm.servers import Spec, VllmServer, transfer_config
from tests.waiting import eventually

pytestmark = pytest.mark.timeout(400)

BAD: dict[str, tuple[dict[str, Any], list[str]]] = {
    "no store": ({}, ["store", "redis://"]),
    "unknown key": ({"store": "memory://x", "tennant": "a"}, ["tennant", "tenant"]),
    "bad scheme": ({"store": "rediss3://h"}, ["store", "rediss3://h", "rediss://"]),
    "bad port": ({"store": "redis://h:99999"}, ["store", "99999"]),
    "wrong type": ({"store": "memory://x", "io_threads": "many"}, ["io_threads", "many"]),
    "impossible": ({"store": "memory://x", "hold_share_max": 1.5}, ["hold_share_max", "1.5"]),
    "short lived": (
        {"store": "memory://x", "object_ttl_s": 5.0},
        ["object_ttl_s", "save_deadline_s"],
    ),
}


@pytest.mark.parametrize("role", list(KVConnectorRole))
@pytest.mark.parametrize("name", BAD)
def test_a_bad_value_is_named_with_what_was_expected(name: str, role: KVConnectorRole) -> None:
    extra, words = BAD[name]
    transfer = {**transfer_config("memory://x"), "kv_connector_extra_config": extra}
    config = engine_config(transfer)
    with pytest.raises((ConfigError, UnsupportedError)) as caught:
        KVConnectorFactory.create_connector(config, role, cache_config(16))
    for word in words:
        assert word in str(caught.value)


def test_the_printed_flag_is_enough_and_recompute_is_set() -> None:
    config = engine_config(transfer_config("memory://policy"))
    assert config.kv_transfer_config.kv_load_failure_policy == "fail", "vLLM's default"
    transfer = transfer_config("memory://policy")
    with Engine(transfer) as engine:
        assert engine.scheduler.recompute_kv_load_failures
        assert engine.answer("a", prompt(1, 40)).tokens


@pytest.fixture(scope="module")
def started() -> Iterator[dict[str, VllmServer]]:
    """Two servers on their way up: one with a bad config, one whose store isn't there."""
    nowhere = f"redis://127.0.0.1:{free_port()}"
    specs = [
        Spec("bad", transfer_config(nowhere, tennant="a")),
        Spec("alone", transfer_config(nowhere)),
    ]
    servers = {spec.name: VllmServer(spec) for spec in specs}
    try:
        for server in servers.values():
            server.launch()
        yield servers
    finally:
        for server in servers.values():
            server.stop()


def test_a_bad_config_stops_the_server_with_a_clear_message(
    started: dict[str, VllmServer],
) -> None:
    server = started["bad"]
    assert server.wait_exit(240) != 0, server.tail()
    log = server.log()
    assert "config key 'tennant' = 'a': expected a known key; did you mean 'tenant'?" in log
    eventually(lambda: not server.group(), 60, "the end of every process")


def test_a_store_that_is_down_stops_nobody(
    started: dict[str, VllmServer], reference: Reference
) -> None:
    server = started["alone"].wait_ready()
    turn = reference.dialog(31, turns=1).turns[0]
    with contextlib.closing(client_of(server)) as client:
        for _ in range(3):
            reply = chat(client, turn.messages, "alone")
            assert reply.text == turn.reply.text
    assert server.reset_local_cache()
    assert "Traceback" not in server.log(), server.tail()
