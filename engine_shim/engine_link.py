"""The client's end of the link to an engine: one socket, the streams and calls that use it.

Owned by one asyncio event loop.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from connector.errors import WireError
from engine_shim.api import Delta
from engine_shim.detokenizer import Sequence, merge
from engine_shim.errors import EngineDead, EngineTimeout, ShimError
from engine_shim.handshake import make_hello
from engine_shim.protocol import (
    MESSAGES_MAX,
    AbortMessage,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineInfo,
    FinishReason,
    MessageType,
    Refusal,
    UtilityCall,
    UtilityReply,
)

SEND_TIMEOUT_S = 30.0


class Stream:
    """Deltas of one request on their way to its reader; those not read yet are merged into one."""

    def __init__(self, sequence: Sequence) -> None:
        self.sequence = sequence
        self._pieces: list[Delta] = []
        self._error: BaseException | None = None
        self._closed = False
        self._ready = asyncio.Event()

    def put(self, delta: Delta) -> None:
        """One more delta. Bounded: the last of each piece of input is kept apart, and pieces are
        bounded by the engine."""
        if self._pieces and self._pieces[-1].finish_reason is None:
            self._pieces[-1] = merge(self._pieces[-1], delta)
        else:
            self._pieces.append(delta)
        self._ready.set()

    def fail(self, error: BaseException) -> None:
        """Raise this to the reader, after what was put before."""
        self._error = self._error or error
        self._ready.set()

    def close(self) -> None:
        """Nothing more will come."""
        self._closed = True
        self._ready.set()

    async def next(self) -> Delta | None:
        """The next delta; None after `close`. Raises what `fail` was given."""
        await self._ready.wait()
        if self._pieces:
            delta = self._pieces.pop(0)
            if not (self._pieces or self._error or self._closed):
                self._ready.clear()
            return delta
        if self._error is not None:
            raise self._error
        return None


class EngineLink:
    """See the module."""

    def __init__(self, address: str) -> None:
        """Use `open`."""
        self.address = address
        self._context = zmq.asyncio.Context()
        self._socket: zmq.asyncio.Socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, MESSAGES_MAX)
        self._socket.setsockopt(zmq.RCVHWM, MESSAGES_MAX)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._socket.connect(address)
        self._encoder = msgspec.msgpack.Encoder()
        self._outputs = msgspec.msgpack.Decoder(EngineCoreOutputs)
        self._replies = msgspec.msgpack.Decoder(UtilityReply)
        self._ids = itertools.count(1)
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self.streams: dict[str, Stream] = {}
        self.dead: str | None = None
        """Why nothing can be asked of the engine any more; None while it lives."""
        self.info: EngineInfo

    @classmethod
    async def open(
        cls, address: str, timeout_s: float, ended: Awaitable[str] | None = None
    ) -> EngineLink:
        """Connect and shake hands. ended: done with its last words if the engine ends first.

        Raises WireError, EngineTimeout, EngineDead.
        """
        link = cls(address)
        hello = asyncio.ensure_future(link._shake_hands())
        waits: list[asyncio.Future[Any]] = [hello]
        if ended is not None:
            waits.append(asyncio.ensure_future(asyncio.shield(ended)))
        try:
            await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if hello.done():
                link.info = hello.result()
            elif len(waits) > 1 and waits[1].done():
                raise EngineDead(f"the engine ended at its start: {waits[1].result()}")
            else:
                raise EngineTimeout(f"no engine answered at {address} within {timeout_s} s")
        except BaseException:
            for wait in waits:
                wait.cancel()
            await link.close()
            raise
        for wait in waits[1:]:
            wait.cancel()
        link._tasks = [asyncio.ensure_future(link._receive())]
        if ended is None:
            link._tasks.append(asyncio.ensure_future(link._watch()))
        return link

    async def _shake_hands(self) -> EngineInfo:
        await self.send(MessageType.HELLO, make_hello())
        kind, payload = await self._socket.recv_multipart()
        if kind == MessageType.REFUSED.value:
            refusal = msgspec.msgpack.decode(payload, type=Refusal)
            raise WireError(f"the engine at {self.address} refused: {refusal.message}")
        if kind != MessageType.READY.value:
            raise WireError(f"the peer at {self.address} is no engine of this protocol")
        return msgspec.msgpack.decode(payload, type=EngineInfo)

    async def send(self, kind: MessageType, message: msgspec.Struct) -> None:
        """Raises EngineDead, or EngineTimeout if the link has been full for long."""
        if self.dead is not None:
            raise EngineDead(self.dead)
        frames = [kind.value, self._encoder.encode(message)]
        try:
            async with asyncio.timeout(SEND_TIMEOUT_S):
                await self._socket.send_multipart(frames)
        except TimeoutError:
            raise EngineTimeout(f"the engine took no message for {SEND_TIMEOUT_S} s") from None

    async def call(self, method: str, args: list[Any], timeout_s: float) -> Any:
        """One utility call. Raises EngineDead, EngineTimeout, ShimError (it failed there)."""
        call_id = next(self._ids)
        future = asyncio.get_running_loop().create_future()
        self._calls[call_id] = future
        try:
            await self.send(MessageType.UTILITY, UtilityCall(call_id, method, args))
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError:
            raise EngineTimeout(f"the engine did not answer {method} in {timeout_s} s") from None
        finally:
            self._calls.pop(call_id, None)

    async def _receive(self) -> None:
        try:
            while True:
                kind, payload = await self._socket.recv_multipart()
                await self._take(kind, payload)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            self.die(f"the link broke: {error!r}")

    async def _take(self, kind: bytes, payload: bytes) -> None:
        if kind == MessageType.OUTPUTS.value:
            for output in self._outputs.decode(payload).outputs:
                await self._take_output(output)
        elif kind == MessageType.UTILITY_REPLY.value:
            reply = self._replies.decode(payload)
            future = self._calls.get(reply.call_id)
            if future is not None and not future.done():
                if reply.failure is None:
                    future.set_result(reply.result)
                else:
                    future.set_exception(ShimError(reply.failure))
        elif kind in (MessageType.LOST.value, MessageType.REFUSED.value):
            why = msgspec.msgpack.decode(payload, type=Refusal).message
            self.die(f"the engine gave up on this client: {why}")
        # Other kinds come from a newer engine: nothing asked for them.

    async def _take_output(self, output: EngineCoreOutput) -> None:
        stream = self.streams.get(output.request_id)
        if stream is None:
            return
        try:
            delta = stream.sequence.take(output)
        except ShimError as error:
            stream.fail(error)
            return
        if stream.sequence.wants_stop:
            stop = AbortMessage([output.request_id], FinishReason.STOP)
            await self.send(MessageType.ABORT, stop)
        if delta is not None:
            stream.put(delta)

    async def _watch(self) -> None:
        """The engine's socket is gone: with ipc that happens when its process ends."""
        await self._monitor.recv_multipart()
        self.die("the engine closed the link")

    def die(self, why: str) -> None:
        """The engine is dead: tell everyone who waits, once."""
        if self.dead is not None:
            return
        self.dead = why
        for stream in self.streams.values():
            stream.fail(EngineDead(why))
        for future in self._calls.values():
            if not future.done():
                future.set_exception(EngineDead(why))

    async def close(self) -> None:
        """Give up the link; who still waits gets EngineDead."""
        self.die("the client was shut down")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close()
        self._context.destroy(linger=0)
