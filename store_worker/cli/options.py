"""Options that several commands share, and what they mean."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
from collections.abc import Iterator

from connector.config import EMBEDDED, Config, StoreConfig, parse_config
from connector.errors import ConfigError

STORE_ENV = "SESSION_KV_STORE"


def add_store(parser: argparse.ArgumentParser) -> None:
    """`--store`: what the connector's config key `store` takes; an object is given as JSON."""
    parser.add_argument(
        "--store",
        metavar="URL",
        default=os.environ.get(STORE_ENV, ""),
        help="redis://, rediss:// or unix:// URL, 'embedded', or "
        f'\'{{"index": URL, "data": [URL, ...]}}\' (default: ${STORE_ENV})',
    )


def add_tenant(parser: argparse.ArgumentParser) -> None:
    """`--tenant`, `--cache-salt`, `--session-secret`: what a session's key is made of."""
    parser.add_argument("--tenant", default="default", help="config key `tenant` of the engines")
    parser.add_argument("--cache-salt", default=None, help="`cache_salt` of the requests, if any")
    parser.add_argument(
        "--session-secret", default="", metavar="HEX", help="only if the engines' config has one"
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    """`--json`: one JSON value on standard output, for programs."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def config_of(args: argparse.Namespace) -> Config:
    """The engine's config as far as the options give it. Raises ConfigError."""
    text = args.store
    if not text:
        raise ConfigError("store", "", "a URL", f"give --store URL, or set {STORE_ENV}")
    extra: dict[str, object] = {"store": text}
    if text.lstrip().startswith("{"):
        try:
            extra["store"] = json.loads(text)
        except ValueError as error:
            raise ConfigError("store", text, f"a URL or valid JSON ({error})") from error
    for option in ("tenant", "session_secret"):
        if getattr(args, option, ""):
            extra[option] = getattr(args, option)
    return parse_config(extra)


@contextlib.contextmanager
def resolved_store(config: Config) -> Iterator[StoreConfig]:
    """The store's URLs; the embedded servers, joined or started, stay for as long as this does."""
    where = config.resolved_store()
    if where.index != EMBEDDED:
        yield where
        return
    from store_worker.embedded import start_or_join

    with start_or_join(config.embedded_dir, config.embedded_bytes) as embedded:
        yield StoreConfig(index=embedded.index_url, data=(embedded.data_url,))
