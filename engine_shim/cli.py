"""`session-kv serve | demo | demo-pd | proxy`. Heavy imports wait until a command runs."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from connector.errors import ConfigError, SessionKVError
from connector.session import DEFAULT_HEADERS

EXIT_FAILED, EXIT_NOT_TRIED = 1, 2


def add_parser(subparsers: Any) -> None:
    """Add this module's commands."""
    _add_serve(subparsers)
    _add_proxy(subparsers)
    _add_demo(subparsers)


def run(args: argparse.Namespace) -> int:
    """Run one of them; the exit code. Raises SessionKVError."""
    runs: Mapping[str, Callable[[argparse.Namespace], int]] = {
        "serve": run_serve,
        "proxy": run_proxy,
        "demo": run_demo,
        "demo-pd": run_demo,
    }
    return runs[args.command](args)


def _add_serve(subparsers: Any) -> None:
    parser = subparsers.add_parser("serve", help="run the shim engine with its front ends")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0: any free one")
    parser.add_argument("--grpc-port", type=int, default=None, help="also serve gRPC here")
    parser.add_argument("--served-model-name", default="shim", metavar="NAME")
    parser.add_argument(
        "--kv-transfer-config", metavar="JSON", default=None, help="the connector, as vLLM's flag"
    )
    parser.add_argument("--log-level", default="warning", choices=LOG_LEVELS)
    parser.add_argument("--json", action="store_true", help="tell the addresses as JSON")
    engine = parser.add_argument_group("engine")
    for flag, default, text in ENGINE_NUMBERS:
        engine.add_argument(f"--{flag}", type=int, default=default, help=text)
    engine.add_argument("--device", default=None, help="cpu, cuda or cuda:N")
    engine.add_argument("--dtype", default=None, choices=("float32", "bfloat16", "float16"))
    engine.add_argument("--model", default=None, metavar="JSON", help="shape of the model")
    engine.add_argument("--no-enable-prefix-caching", action="store_true")
    engine.add_argument("--enable-session-cache", action="store_true")
    engine.add_argument("--async-scheduling", action="store_true")


ENGINE_LOG_LEVEL = "SESSION_KV_LOG_LEVEL"  # what the engine's own process reads
LOG_LEVELS = ("debug", "info", "warning", "error")
# (flag, default, help); a default of None leaves EngineConfig's.
ENGINE_NUMBERS: tuple[tuple[str, int | None, str], ...] = (
    ("tp-size", None, "worker ranks"),
    ("block-size", None, "tokens of a KV block"),
    ("num-blocks", None, "KV blocks of each rank"),
    ("max-model-len", None, "tokens of prompt and answer"),
    ("max-num-seqs", None, "requests running at once"),
    ("max-num-batched-tokens", None, "tokens computed in one step"),
    ("cpu-threads", None, "torch's threads; 0 leaves torch's choice"),
    ("seed", None, "seed of the weights"),
    ("sampling-seed", None, "seed of requests that bring none"),
)


def engine_config(args: argparse.Namespace) -> Any:
    """EngineConfig of the flags. Raises ConfigError."""
    import msgspec

    from engine_shim.config import EngineConfig, ModelConfig

    shape: dict[str, Any] = dict(_json(args.model, "model") or {})
    if args.dtype is not None:
        shape["dtype"] = args.dtype
    if args.seed is not None:
        shape["seed"] = args.seed
    fields: dict[str, Any] = {
        name: getattr(args, name)
        for name in (
            "tp_size", "block_size", "num_blocks", "max_model_len", "max_num_seqs",
            "max_num_batched_tokens", "cpu_threads", "device",
        )
        if getattr(args, name) is not None
    }  # fmt: skip
    if args.sampling_seed is not None:
        fields["seed"] = args.sampling_seed
    try:
        model = msgspec.convert(shape, ModelConfig)
    except msgspec.ValidationError as error:
        raise ConfigError("model", args.model, f"valid fields ({error})") from error
    return EngineConfig(
        model=model,
        enable_prefix_caching=not args.no_enable_prefix_caching,
        enable_session_cache=args.enable_session_cache,
        async_scheduling=args.async_scheduling,
        kv_transfer_config=_json(args.kv_transfer_config, "kv-transfer-config"),
        **fields,
    ).check()


def _json(text: str | None, flag: str) -> dict[str, Any] | None:
    """A flag's JSON object. Raises ConfigError."""
    if text is None:
        return None
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(flag, text, f"a JSON object ({error})") from error
    if not isinstance(value, dict):
        raise ConfigError(flag, text, "a JSON object")
    return value


def run_serve(args: argparse.Namespace) -> int:
    """Serve until told to stop."""
    config = engine_config(args)
    from engine_shim.errors import EngineDead, EngineTimeout

    with needs("shim"):
        from engine_shim.frontend.server import ServeOptions, serve

    options = ServeOptions(
        host=args.host,
        port=args.port,
        grpc_port=args.grpc_port,
        served_model_name=args.served_model_name,
        log_level=args.log_level,
    )
    _log(args.log_level)
    os.environ[ENGINE_LOG_LEVEL] = args.log_level
    try:
        return asyncio.run(serve(config, options, _teller(args.json)))
    except (EngineDead, EngineTimeout) as error:
        print(f"session-kv serve: {error}", file=sys.stderr)
        return EXIT_NOT_TRIED


def _add_proxy(subparsers: Any) -> None:
    parser = subparsers.add_parser("proxy", help="one address before prefill and decode engines")
    for role in ("prefill", "decode"):
        parser.add_argument(
            f"--{role}", nargs="+", action="extend", required=True, metavar="URL",
            help=f"{role} engines, as http://HOST:PORT",
        )  # fmt: skip
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8100, help="0: any free one")
    parser.add_argument(
        "--store", metavar="URL", default=None,
        help="the engines' store: wait there for a prompt's commit before decode is asked",
    )  # fmt: skip
    parser.add_argument("--tenant", default="default", help="config key `tenant` of the engines")
    parser.add_argument(
        "--session-header", action="append", metavar="NAME", help="default: X-Session-ID"
    )
    parser.add_argument("--where", action="store_true", help="answer GET /where?session=ID")
    parser.add_argument("--wait-s", type=float, default=2.0, help="limit of the wait for a commit")
    parser.add_argument("--in-flight-max", type=int, default=256, help="requests at one engine")
    parser.add_argument("--start-timeout-s", type=float, default=120.0)
    parser.add_argument("--log-level", default="warning", choices=LOG_LEVELS)
    parser.add_argument("--json", action="store_true", help="tell the addresses as JSON")


def run_proxy(args: argparse.Namespace) -> int:
    """Relay until told to stop."""
    with needs("shim"):
        from engine_shim.pd_proxy import ProxyConfig
        from engine_shim.pd_proxy_fleet import Limits
        from engine_shim.pd_proxy_start import StartOptions, serve_proxy

    headers = tuple(args.session_header or DEFAULT_HEADERS)
    options = StartOptions(
        prefill=tuple(args.prefill),
        decode=tuple(args.decode),
        host=args.host,
        port=args.port,
        log_level=args.log_level,
        start_timeout_s=args.start_timeout_s,
        config=ProxyConfig(session_headers=headers, wait_s=args.wait_s, show_where=args.where),
        limits=Limits(in_flight_max=args.in_flight_max),
    )
    _log(args.log_level)

    async def main() -> int:
        store = None
        if args.store is not None:
            from engine_shim.proxy_store import open_proxy_store

            store = open_proxy_store(args.store, args.tenant)
        return await serve_proxy(options, _teller(args.json), store)

    return asyncio.run(main())


def _add_demo(subparsers: Any) -> None:
    for name, text in (
        ("demo", "a conversation moves between two engine processes"),
        ("demo-pd", "prefill and decode on different engine processes"),
    ):
        parser = subparsers.add_parser(name, help=text)
        parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
        parser.add_argument("--turns", type=int, default=4, help="4 or more")
        parser.set_defaults(pd=name == "demo-pd")
        if name == "demo":
            parser.add_argument("--pd", action="store_true", help="the same as demo-pd")


def run_demo(args: argparse.Namespace) -> int:
    """Show it; exit code 1 if anything was not as it must be."""
    if args.turns < 4:
        raise ConfigError("turns", args.turns, "4 or more")
    with needs("shim"):
        import httpx

        from engine_shim import demo, demo_pd
    from engine_shim.errors import ShimError

    def say(text: str) -> None:
        print(f"[demo] {text}", file=sys.stderr, flush=True)

    run_one = demo_pd.demo_pd if args.pd else demo.demo
    try:
        report = asyncio.run(run_one(args.turns, say))
    except (ShimError, httpx.HTTPError) as error:
        return _not_shown(f"{type(error).__name__}: {error}", args.json)
    _show(report, args)
    return 0 if report.ok else EXIT_FAILED


def _not_shown(why: str, as_json: bool) -> int:
    if as_json:
        print(json.dumps({"ok": False, "error": why, "turns": []}))
    print(f"session-kv demo: {why}", file=sys.stderr)
    return EXIT_FAILED


def _show(report: Any, args: argparse.Namespace) -> None:
    import msgspec

    from store_worker.cli.output import emit_json, table

    rows = [msgspec.to_builtins(turn) for turn in report.turns]
    for problem in report.problems:
        print(f"session-kv demo: {problem}", file=sys.stderr)
    if args.json:
        emit_json({"ok": report.ok, "turns": rows})
        return
    title = "tokens per turn"
    if args.pd:
        rows = [_narrow(row) for row in rows]
        title += "; of the prefill (P) and the decode (D) engine: own+loaded/needed"
    columns = [name.removesuffix("_tokens").replace("_", " ") for name in rows[0]]
    table(title, columns, [list(row.values()) for row in rows])
    print("everything as it must be" if report.ok else "NOT as it must be (see above)")


def _narrow(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of demo-pd for 80 columns; `--json` has every number apart."""

    def tokens(role: str) -> str:
        own, load, need = (row[f"{role}_{part}_tokens"] for part in ("own", "loaded", "need"))
        return f"{own}+{load}/{need}"

    return {
        "turn": row["turn"],
        "P": row["prefilled_by"].replace("prefill-", "P"),
        "P had/need": tokens("prefill"),
        "D": row["decoded_by"].replace("decode-", "D"),
        "D had/need": tokens("decode"),
        "prompt": row["prompt_tokens"],
        "ttft s": row["ttft_s"],
        "equal": row["equal"],
    }


def _log(level: str) -> None:
    logging.basicConfig(level=level.upper(), format="%(levelname)s %(name)s: %(message)s")


@contextlib.contextmanager
def needs(extra: str) -> Iterator[None]:
    """Turns a missing module into the line that says how to get it."""
    try:
        yield
    except ModuleNotFoundError as error:
        remedy = f"pip install 'session-kv-connector[{extra}]'"
        raise ConfigError("extra", extra, f"the module {error.name}", remedy) from error


def _teller(as_json: bool) -> Callable[[str], None]:
    """Tells the addresses, separated by blanks, once requests are answered."""

    def tell(where: str) -> None:
        line = json.dumps({"serving_on": where.split()}) if as_json else f"serving on {where}"
        print(line, flush=True)

    return tell


def main() -> int:
    """Only these commands, without the entry points: for processes that we start ourselves."""
    parser = argparse.ArgumentParser(prog="session-kv")
    add_parser(parser.add_subparsers(dest="command", metavar="COMMAND", required=True))
    args = parser.parse_args()
    try:
        return run(args)
    except SessionKVError as error:
        print(f"session-kv: {error}", file=sys.stderr)
        return EXIT_NOT_TRIED


if __name__ == "__main__":
    sys.exit(main())
