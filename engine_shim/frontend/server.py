"""One engine and its front ends in one process: what `session-kv serve` runs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Iterator

import msgspec
import uvicorn

from connector.config import Config, parse_config
from connector.errors import ConfigError
from engine_shim.client import AsyncClient
from engine_shim.config import EngineConfig
from engine_shim.frontend.app import build_app
from engine_shim.frontend.state import DEFAULT_MODEL, Frontend, FrontendConfig

log = logging.getLogger(__name__)

BACKLOG = 512
KEEP_ALIVE_S = 75
DRAIN_S = 10
LOOK_S = 0.5
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class ServeOptions(msgspec.Struct, frozen=True):
    """Where to listen. Port 0: any free one. grpc_port: None for no gRPC."""

    host: str = "127.0.0.1"
    port: int = 8000
    grpc_port: int | None = None
    served_model_name: str = DEFAULT_MODEL
    log_level: str = "warning"


def frontend_config(engine: EngineConfig, served_model_name: str) -> FrontendConfig:
    """What the front end takes from the engine's config. Raises ConfigError."""
    model = engine.model
    elements = model.num_layers * 2 * model.num_kv_heads * model.head_dim
    connector = connector_config(engine)
    headers = connector.session_headers if connector else FrontendConfig().session_headers
    return FrontendConfig(
        served_model_name=served_model_name,
        session_headers=headers,
        bytes_per_token=elements * DTYPE_BYTES[model.dtype],
    )


def connector_config(engine: EngineConfig) -> Config | None:
    """The connector's config if there is one for us to read. Raises ConfigError."""
    flag = engine.kv_transfer_config
    extra = flag.get("kv_connector_extra_config") if flag else None
    return parse_config(extra) if isinstance(extra, dict) and "store" in extra else None


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ConfigError if the address can't be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except (OSError, OverflowError) as error:
        listener.close()
        raise ConfigError("port", port, f"a free port on {host} ({error})") from error
    return listener


class Server(uvicorn.Server):
    """uvicorn that leaves signals to us: its own handling would end the process before the engine
    is stopped."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """No handlers."""
        yield


async def serve(engine: EngineConfig, options: ServeOptions, say: Callable[[str], None]) -> int:
    """Run until SIGTERM, SIGINT, or the engine's end; the exit code.

    say: told the addresses once requests are answered. Raises ConfigError, EngineDead,
    EngineTimeout.
    """
    config = frontend_config(engine, options.served_model_name)
    with bind(options.host, options.port) as listener:
        async with await AsyncClient.start(engine) as client:
            frontend = Frontend(client, config)
            async with contextlib.AsyncExitStack() as stack:
                grpc_address = await _grpc(stack, frontend, options)
                await _http(frontend, listener, options, lambda url: say(url + grpc_address))
            return 1 if client.errored else 0


async def _grpc(
    stack: contextlib.AsyncExitStack, frontend: Frontend, options: ServeOptions
) -> str:
    if options.grpc_port is None:
        return ""
    from engine_shim.frontend.grpc_server import start_grpc

    try:
        server, port = await start_grpc(frontend, f"{options.host}:{options.grpc_port}")
    except OSError as error:
        raise ConfigError("grpc-port", options.grpc_port, f"a free port ({error})") from error
    stack.push_async_callback(server.stop, DRAIN_S)
    return f" grpc://{options.host}:{port}"


async def _http(
    frontend: Frontend, listener: socket.socket, options: ServeOptions, say: Callable[[str], None]
) -> None:
    """Serve HTTP until told to stop."""
    server = Server(
        uvicorn.Config(
            build_app(frontend),
            log_level=options.log_level,
            access_log=False,
            lifespan="off",
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=DRAIN_S,
        )
    )
    watch = asyncio.create_task(_watch_engine(frontend, server))
    try:
        await run_until(server, listener, lambda: say(address_of(listener)))
    finally:
        watch.cancel()


async def run_until(
    server: Server, listener: socket.socket, started: Callable[[], None]
) -> None:
    """Serve until SIGTERM, SIGINT, or `server.should_exit`. started: called once it answers."""
    loop = asyncio.get_running_loop()

    def stop() -> None:
        server.should_exit = True

    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop)
    watch = asyncio.create_task(_announce(server, started))
    try:
        await server.serve([listener])
    finally:
        watch.cancel()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(signum)


def address_of(listener: socket.socket) -> str:
    """The URL of a listening socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def _announce(server: Server, started: Callable[[], None]) -> None:
    while not server.started:
        await asyncio.sleep(0.01)
    started()


async def _watch_engine(frontend: Frontend, server: Server) -> None:
    """Stop serving when the engine has died: somebody has to start us again."""
    while not frontend.engine.errored:
        await asyncio.sleep(LOOK_S)
    log.error("the engine has died; stopping")
    server.should_exit = True
