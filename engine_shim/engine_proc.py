"""The engine process: one thread that reads messages, steps the engine core, sends outputs.

    python -m engine_shim.engine_proc ADDRESS    config as one line of JSON on stdin

It ends when stdin is closed (the parent is gone or wants it), or on SIGTERM. Idle, it sleeps in
poll; while a connector has work open it looks every millisecond.
"""

from __future__ import annotations

import importlib
import logging
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

from connector.errors import SessionKVError, WireError
from engine_shim.config import EngineConfig, load_config
from engine_shim.connector_port import Connector
from engine_shim.engine import EngineCore
from engine_shim.handshake import check_hello, decode_hello, make_hello
from engine_shim.lifecycle import ClientOutput
from engine_shim.protocol import (
    MESSAGES_MAX,
    AbortMessage,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    MessageType,
    Refusal,
    UtilityCall,
    UtilityReply,
)

log = logging.getLogger("engine_shim.engine")

POLL_MS = 1
EXIT_CONFIG = 3
CLIENTS_MAX = 256


def build_connector(config: EngineConfig) -> Connector | None:
    """The connector that the config asks for; None if it asks for none. Raises ConfigError."""
    if config.kv_transfer_config is None:
        return None
    module, _, name = config.connector_factory.partition(":")
    factory: Callable[[EngineConfig], Connector] = getattr(importlib.import_module(module), name)
    return factory(config)


class EngineServer:
    """Serves one engine core on one ROUTER socket. One thread."""

    def __init__(self, core: EngineCore, address: str, parent_fd: int) -> None:
        self._core = core
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.setsockopt(zmq.SNDHWM, MESSAGES_MAX)
        self._socket.setsockopt(zmq.RCVHWM, MESSAGES_MAX)
        self._socket.bind(address)
        self._parent_fd = parent_fd
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(parent_fd, zmq.POLLIN)
        self._encoder = msgspec.msgpack.Encoder()
        self._adds = msgspec.msgpack.Decoder(EngineCoreRequest)
        self._aborts = msgspec.msgpack.Decoder(AbortMessage)
        self._utilities = msgspec.msgpack.Decoder(UtilityCall)
        self._clients: set[bytes] = set()
        self._stopping = False

    def stop(self) -> None:
        """End `serve` soon. Safe in a signal handler."""
        self._stopping = True

    def serve(self) -> None:
        """Until stopped. Whatever the core raises goes through: the engine is dead then."""
        busy = False
        while not self._stopping:
            self._receive(self._timeout_ms(busy))
            busy = False
            if self._core.has_work or self._core.must_poll:
                outputs, computed = self._core.step()
                self._send(outputs)
                busy = computed or bool(outputs)

    def _timeout_ms(self, busy: bool) -> int | None:
        if busy:
            return 0
        if self._core.has_work or self._core.must_poll:
            return POLL_MS
        return None

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()
        self._context.term()

    # ---- receiving ----------------------------------------------------------------------------

    def _receive(self, timeout_ms: int | None) -> None:
        """Take in all messages that are there; wait up to `timeout_ms` for the first."""
        try:
            events = dict(self._poller.poll(timeout_ms))
        except InterruptedError:
            return
        if self._parent_fd in events and not os.read(self._parent_fd, 4096):
            self._stopping = True
        if self._socket not in events:
            return
        for _ in range(MESSAGES_MAX):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) == 3:
                self._take(*frames)

    def _take(self, client: bytes, kind: bytes, payload: bytes) -> None:
        if kind == MessageType.HELLO.value:
            self._greet(client, payload)
            return
        if client not in self._clients:
            self._reply(client, MessageType.REFUSED, Refusal("say Hello first"))
            return
        try:
            self._take_from_known(client, kind, payload)
        except msgspec.MsgspecError as error:
            # The handshake was good, so this is a bug of that client; others are not to suffer.
            log.warning("a message could not be read: %s", error)
            self._drop(client, f"a message of kind {kind.hex()} could not be read: {error}")

    def _take_from_known(self, client: bytes, kind: bytes, payload: bytes) -> None:
        if kind == MessageType.ADD.value:
            self._core.add_request(self._adds.decode(payload), client)
        elif kind == MessageType.ABORT.value:
            message = self._aborts.decode(payload)
            self._core.abort(message.request_ids, message.reason)
        elif kind == MessageType.UTILITY.value:
            call = self._utilities.decode(payload)
            self._reply(client, MessageType.UTILITY_REPLY, self._call(call))

    def _greet(self, client: bytes, payload: bytes) -> None:
        try:
            check_hello(make_hello(), decode_hello(payload))
            if len(self._clients) >= CLIENTS_MAX:
                raise WireError(f"{CLIENTS_MAX} clients are connected, no more are served")
        except WireError as error:
            log.warning("a client was refused: %s", error)
            self._reply(client, MessageType.REFUSED, Refusal(str(error)))
            return
        self._clients.add(client)
        self._reply(client, MessageType.READY, self._core.info)

    def _call(self, call: UtilityCall) -> UtilityReply:
        methods: dict[str, Callable[..., Any]] = {
            "reset_prefix_cache": self._core.reset_prefix_cache,
            "close_session": self._core.close_session,
            "stats": self._core.stats,
            "check_integrity": self._core.check_integrity,
        }
        method = methods.get(call.method)
        if method is None:
            return UtilityReply(call.call_id, f"unknown method {call.method!r}")
        try:
            return UtilityReply(call.call_id, None, method(*call.args))
        except Exception as error:
            log.exception("utility call %s failed", call.method)
            return UtilityReply(call.call_id, f"{call.method} failed: {error}")

    # ---- sending ------------------------------------------------------------------------------

    def _send(self, outputs: list[ClientOutput]) -> None:
        by_client: dict[bytes, list[EngineCoreOutput]] = {}
        for client, output in outputs:
            by_client.setdefault(client, []).append(output)
        for client, own in by_client.items():
            if client in self._clients:
                self._reply(client, MessageType.OUTPUTS, EngineCoreOutputs(own))

    def _reply(self, client: bytes, kind: MessageType, message: msgspec.Struct) -> None:
        frames = [client, kind.value, self._encoder.encode(message)]
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            self._drop(client, f"this client left {MESSAGES_MAX} messages unread")
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._drop(client, "")

    def _drop(self, client: bytes, why: str) -> None:
        """A client that is gone, does not read or can't be read: end what it asked for."""
        if client in self._clients:
            self._clients.discard(client)
            self._core.abort_client(client)
            if why:
                self._reply(client, MessageType.LOST, Refusal(why))


def read_line(fd: int) -> bytes:
    """One line, unbuffered, so that poll sees whatever comes behind it."""
    line = b""
    while not line.endswith(b"\n"):
        piece = os.read(fd, 1)
        if not piece:
            break
        line += piece
    return line


def main(arguments: list[str]) -> int:
    """Exit code: 0 asked to end, EXIT_CONFIG for a config that can't work, 1 died."""
    level = os.environ.get("SESSION_KV_LOG_LEVEL", "WARNING").upper()
    form = "%(levelname)s %(name)s: %(message)s"
    logging.basicConfig(stream=sys.stderr, level=level, format=form)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent_fd = sys.stdin.fileno()
    try:
        config = load_config(read_line(parent_fd))
        core = EngineCore(config, build_connector(config))
    except SessionKVError as error:
        log.error("%s", error)
        return EXIT_CONFIG
    server = EngineServer(core, arguments[0], parent_fd)
    signal.signal(signal.SIGTERM, lambda _signal, _frame: server.stop())
    try:
        server.serve()
    except Exception:
        log.exception("the engine died")
        return 1
    finally:
        core.shutdown()
        server.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
