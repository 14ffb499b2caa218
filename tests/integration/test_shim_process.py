"""The engine in its own process, over its link: life, calls, several clients, death."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Coroutine, Iterator
from typing import Any

import msgspec
import pytest
import zmq

from connector.errors import ConfigError, WireError
from engine_shim.api import Completion, InputChunk, RequestOptions, join
from engine_shim.client import AsyncClient, fan_out
from engine_shim.config import EngineConfig, ModelConfig
from engine_shim.engine_link import EngineLink
from engine_shim.errors import EngineDead, EngineTimeout, InvalidRequest, ShimError
from engine_shim.handshake import Schema, field_digests, make_hello
from engine_shim.protocol import (
    EngineCoreRequest,
    FinishReason,
    MessageType,
    Refusal,
    SamplingParams,
)
from tests.waiting import eventually

TINY = EngineConfig(
    model=ModelConfig(num_layers=2, hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16),
    num_blocks=128,
    max_model_len=1024,
    enable_session_cache=True,
)
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
LONG = SamplingParams(temperature=0.0, max_tokens=900)


class Loop:
    """An event loop of the module, and a client on it."""

    def __init__(self) -> None:
        self.runner = asyncio.Runner()
        self.client = self.run(AsyncClient.start(TINY))

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        async def limited() -> Any:
            async with asyncio.timeout(60):
                return await work

        return self.runner.run(limited())

    def close(self) -> None:
        self.run(self.client.shutdown())
        self.runner.close()


@pytest.fixture(scope="module")
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.close()


async def complete(
    client: AsyncClient, prompt: str, params: SamplingParams = GREEDY, **options: Any
) -> Completion:
    stream = client.generate(prompt, params, RequestOptions(**options))
    return join([delta async for delta in stream])


async def until(look: Any, what: str) -> None:
    """`eventually` for the event loop: the engine's answer is a wait by itself."""
    async with asyncio.timeout(30):
        while not await look():
            await asyncio.sleep(0)


def test_concurrent_requests(loop: Loop) -> None:
    async def work() -> list[Completion]:
        client = loop.client
        prompts = [f"request number {i} " * (i + 1) for i in range(8)]
        together = await asyncio.gather(*(complete(client, prompt) for prompt in prompts))
        alone = [await complete(client, prompt) for prompt in prompts]
        assert [c.text for c in together] == [c.text for c in alone]
        return alone

    found = loop.run(work())
    assert len({completion.text for completion in found}) == 8
    assert all(len(completion.token_ids) == 12 for completion in found)
    assert found[7].usage.local_cached_tokens > 0


def test_stop_string_ends_the_request_in_the_engine(loop: Loop) -> None:
    async def work() -> None:
        client = loop.client
        text = (await complete(client, "Stop me", LONG)).text
        stop = text[10:14]
        params = SamplingParams(temperature=0.0, max_tokens=900, stop=stop)
        found = await complete(client, "Stop me", params)
        assert found.text == text[: text.index(stop)]
        assert (found.finish_reason, found.stop_reason) == (FinishReason.STOP, stop)
        assert found.usage.output_tokens == len(found.token_ids) < 40
        await until(lambda: at_rest(client), "the engine at rest")

    loop.run(work())


async def at_rest(client: AsyncClient) -> bool:
    stats = await client.stats()
    assert await client.check_integrity() == []
    return stats["num_running"] == 0 and stats["free_blocks"] == stats["num_blocks"]


def test_children(loop: Loop) -> None:
    async def work() -> list[Completion]:
        params = SamplingParams(temperature=1.0, n=3, seed=1, max_tokens=12)
        options = RequestOptions(request_id="family", session_id="s")
        streams = [loop.client.generate("Hi", p, o) for p, o in fan_out(params, options)]

        async def read(stream: AsyncIterator[Any]) -> Completion:
            return join([delta async for delta in stream])

        return list(await asyncio.gather(*map(read, streams)))

    children = loop.run(work())
    assert {child.request_id for child in children} == {"family"}
    assert len({child.text for child in children}) == 3


@pytest.mark.parametrize("way", ["close", "cancel", "abort"])
def test_a_reader_that_goes_ends_its_request(loop: Loop, way: str) -> None:
    async def work() -> None:
        client = loop.client
        stream = client.generate("Endless", LONG, RequestOptions(request_id="gone"))
        first = await anext(stream)
        assert first.text
        if way == "close":
            await stream.aclose()  # type: ignore[attr-defined]
        elif way == "abort":
            await client.abort("gone")
            last = [delta async for delta in stream][-1]
            assert last.finish_reason is FinishReason.ABORT
        else:
            task = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        await until(lambda: at_rest(client), "the engine at rest")

    loop.run(work())


def test_streaming_input(loop: Loop) -> None:
    async def chunks() -> AsyncIterator[InputChunk]:
        yield InputChunk("first piece")
        yield InputChunk(" second", SamplingParams(temperature=0.0, max_tokens=2))

    async def broken() -> AsyncIterator[InputChunk]:
        yield InputChunk("first piece")
        raise RuntimeError("the source broke")

    async def nothing() -> AsyncIterator[InputChunk]:
        return
        yield

    async def work() -> None:
        client = loop.client
        params = SamplingParams(temperature=0.0, max_tokens=3)
        deltas = [delta async for delta in client.generate_stream(chunks(), params)]
        ends = [delta for delta in deltas if delta.finish_reason is not None]
        assert sum(len(delta.token_ids) for delta in deltas) == 5
        assert ends[0].awaiting_input and not ends[-1].awaiting_input
        with pytest.raises(RuntimeError, match="source broke"):
            async for _ in client.generate_stream(broken(), params):
                pass
        assert [d async for d in client.generate_stream(nothing(), params)] == []
        with pytest.raises(InvalidRequest, match="stop strings"):
            client.generate_stream(chunks(), SamplingParams(stop="x"))
        await until(lambda: at_rest(client), "the engine at rest")

    loop.run(work())


def test_bad_requests_are_refused_before_anything_is_sent(loop: Loop) -> None:
    client = loop.client
    for prompt, params, options in (
        ("", GREEDY, RequestOptions()),
        ("x" * 2000, GREEDY, RequestOptions()),
        ([5000], GREEDY, RequestOptions()),
        ("x", SamplingParams(max_tokens=-1), RequestOptions()),
        ("x", SamplingParams(n=2), RequestOptions()),
        ("x", GREEDY, RequestOptions(session_id="s" * 300)),
    ):
        with pytest.raises(InvalidRequest):
            client.generate(prompt, params, options)


def test_sessions(loop: Loop) -> None:
    async def work() -> None:
        client = loop.client
        await client.reset_prefix_cache()
        await complete(client, "A conversation of some length", session_id="talk")
        assert (await client.stats())["session_blocks"] == 2
        result = await client.close_session("talk")
        assert result.existed and result.freed_tokens == 32 and not result.legacy
        assert not (await client.close_session("talk")).existed

        # The legacy path: its own ids, and a close that touches no tag.
        await complete(client, "A conversation of some length", session_id="talk")
        assert await client.open_session("talk") == "talk"
        with pytest.raises(InvalidRequest, match="open already"):
            await client.open_session("talk")
        legacy = await client.close_session("talk")
        assert legacy.legacy and legacy.freed_tokens == 0
        assert (await client.stats())["session_blocks"] == 2
        assert (await client.close_session("talk")).freed_tokens == 32
        assert len(await client.open_session()) == 32

    loop.run(work())


def test_calls_that_fail_say_so(loop: Loop) -> None:
    async def work() -> None:
        link = await EngineLink.open(loop.client.address, 10)
        with pytest.raises(ShimError, match="unknown method 'nonsense'"):
            await link.call("nonsense", [], 10)
        with pytest.raises(ShimError, match="close_session failed"):
            await link.call("close_session", [], 10)
        await link.close()

    loop.run(work())


def test_idle_engine_does_not_step(loop: Loop) -> None:
    async def work() -> None:
        await until(lambda: at_rest(loop.client), "the engine at rest")
        before = (await loop.client.stats())["steps"]
        for _ in range(20):
            assert (await loop.client.stats())["steps"] == before

    loop.run(work())


def test_second_client_gets_its_own_outputs(loop: Loop) -> None:
    async def work() -> None:
        other = await AsyncClient.connect(loop.client.address)
        assert other.info == loop.client.info
        ours, theirs = await asyncio.gather(
            complete(loop.client, "one of us"), complete(other, "one of them")
        )
        assert ours.text != theirs.text
        stream = other.generate("Endless", LONG)
        await anext(stream)
        # It is gone without a word: the engine notices when it sends.
        await other.shutdown()
        with pytest.raises(EngineDead):
            await anext(stream)
        await until(lambda: at_rest(loop.client), "the engine at rest")

    loop.run(work())


def exchange(address: str, *messages: list[bytes]) -> list[bytes]:
    """Send raw frames from a bare socket; the reply to the last."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVTIMEO, 20_000)
        socket.connect(address)
        for frames in messages:
            socket.send_multipart(frames)
            reply = socket.recv_multipart()
        return reply


def refusal(frames: list[bytes]) -> str:
    assert frames[0] in (MessageType.REFUSED.value, MessageType.LOST.value)
    return msgspec.msgpack.decode(frames[1], type=Refusal).message


def test_peers_that_are_not_understood_are_refused(loop: Loop) -> None:
    address = loop.client.address
    assert "Hello first" in refusal(exchange(address, [MessageType.ADD.value, b"\x90"]))
    assert "no Hello" in refusal(exchange(address, [MessageType.HELLO.value, b"\x90"]))
    names = list(EngineCoreRequest.__struct_fields__)
    names.insert(20, "tenant_id")
    schemas = {**make_hello().schemas, "EngineCoreRequest": Schema(names, field_digests(names))}
    hello = msgspec.structs.replace(make_hello(), product="9.9", schemas=schemas)
    text = refusal(
        exchange(address, [MessageType.HELLO.value, msgspec.msgpack.encode(hello)])
    )
    assert "'tenant_id'" in text and "'session_id'" in text and "9.9" in text
    # Greeted well, then sending what can't be read: dropped, and the engine goes on.
    good = [MessageType.HELLO.value, msgspec.msgpack.encode(make_hello())]
    assert "could not be read" in refusal(
        exchange(address, good, [MessageType.ADD.value, b"\x93\x01"])
    )
    assert loop.run(complete(loop.client, "still there")).text


def test_connector_in_the_engine_process() -> None:
    config = msgspec.structs.replace(
        TINY,
        tp_size=1,
        kv_transfer_config={"faults": {"load_steps": 3}},
        connector_factory="tests.shim_toy:one_region",
    )

    async def work() -> None:
        async with await AsyncClient.start(config) as client:
            assert client.info.connector
            prompt = "The same long prompt, twice, with a reset between the two. " * 3
            first = await complete(client, prompt)
            await until(lambda: client.reset_prefix_cache(), "a reset")
            second = await complete(client, prompt)
            assert second.text == first.text
            usage = second.usage
            assert (usage.local_cached_tokens, usage.external_cached_tokens) == (0, 176)

    asyncio.run(work())


def test_start_that_fails_says_why() -> None:
    bad = msgspec.structs.replace(
        TINY, kv_transfer_config={"fail": True}, connector_factory="tests.shim_kit:toy_factory"
    )

    async def work() -> None:
        with pytest.raises(ConfigError, match="tp_size"):
            await AsyncClient.start(msgspec.structs.replace(TINY, tp_size=7))
        with pytest.raises(EngineDead, match="a connector that works"):
            await AsyncClient.start(bad)

    asyncio.run(work())


def test_nobody_at_the_address(tmp_path: Any) -> None:
    async def work() -> None:
        with pytest.raises(EngineTimeout, match="no engine answered"):
            await AsyncClient.connect(f"ipc://{tmp_path}/nobody", timeout_s=0.2)

    asyncio.run(work())


def test_a_peer_that_refuses(tmp_path: Any) -> None:
    address = f"ipc://{tmp_path}/other"

    async def work() -> None:
        context = zmq.asyncio.Context()
        socket = context.socket(zmq.ROUTER)
        socket.bind(address)

        async def refuse() -> None:
            client, *_ = await socket.recv_multipart()
            reply = msgspec.msgpack.encode(Refusal("field 20 differs"))
            await socket.send_multipart([client, MessageType.REFUSED.value, reply])

        task = asyncio.ensure_future(refuse())
        with pytest.raises(WireError, match="field 20 differs"):
            await AsyncClient.connect(address, timeout_s=20)
        await task
        context.destroy(linger=0)

    asyncio.run(work())


def test_death_reaches_everyone_who_waits() -> None:
    async def work() -> None:
        client = await AsyncClient.start(TINY)
        other = await AsyncClient.connect(client.address)
        streams = [client.generate("Endless", LONG), other.generate("Endless too", LONG)]
        for stream in streams:
            await anext(stream)
        assert client.process is not None
        os.kill(client.process.pid, signal.SIGKILL)
        for stream in streams:
            with pytest.raises(EngineDead):
                async for _ in stream:
                    pass
        for dead in (client, other):
            assert dead.errored
            with pytest.raises(EngineDead):
                dead.generate("more", GREEDY)
            with pytest.raises(EngineDead):
                await dead.stats()
            await dead.shutdown()

    asyncio.run(work())


PARENT = """
import asyncio, sys
from engine_shim.client import AsyncClient
from tests.integration.test_shim_process import TINY
async def main():
    client = await AsyncClient.start(TINY)
    print(client.process.pid, flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


def test_engine_does_not_outlive_its_parent() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True, cwd=os.getcwd()
    )
    try:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert os.path.exists(f"/proc/{pid}")
    finally:
        parent.kill()
        parent.wait()
    eventually(lambda: not _alive(pid), 20, "the engine's end")


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
