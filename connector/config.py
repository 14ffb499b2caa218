"""`kv_connector_extra_config`, parsed once into frozen structs.

Leaf module: standard library and msgspec only. Everything a key may be is in the structs below;
`docs/CONFIG.md` is generated from them. Raises ConfigError, which names the key, the value, what
was expected and the nearest known key.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Annotated, Literal, NamedTuple
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from connector.errors import ConfigError
from connector.session import DEFAULT_HEADERS

EMBEDDED = "embedded"
SENTINEL = "redis+sentinel"
INDEX_SCHEMES = ("redis", "rediss", SENTINEL, "unix", "memory")
DATA_SCHEMES = ("redis", "rediss", "unix", "memory", "mooncake")

PositiveFloat = Annotated[float, Meta(gt=0)]
PositiveInt = Annotated[int, Meta(gt=0)]
Share = Annotated[float, Meta(gt=0, le=1)]


class StoreConfig(msgspec.Struct, frozen=True):
    """Where the store is: one index and one or more data nodes. `embedded` is resolved later."""

    index: str
    data: tuple[str, ...]


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All keys of `kv_connector_extra_config`."""

    store: Annotated[
        str | dict[str, str | list[str]],
        Meta(description="`redis://`, `rediss://` or `unix://` URL of one server for index and "
             'data, `"embedded"` (two local Valkeys, started or joined), or '
             '`{"index": URL, "data": URL or [URL, ...]}`; data may also be `mooncake://`.'),
    ]
    tenant: Annotated[
        str,
        Meta(description="Whose data this is; tenants see nothing of each other's."),
    ] = "default"
    engine_name: Annotated[
        str, Meta(description="What this engine is called in the store; empty: host and process.")
    ] = ""
    session_headers: Annotated[
        tuple[str, ...], Meta(description="Headers that may carry the session id, in order (shim).")
    ] = DEFAULT_HEADERS
    session_secret: Annotated[
        str,
        Meta(description="Hex key (32+ bytes) of the session HMAC; empty: made in the index."),
    ] = ""
    model_revision: Annotated[
        str, Meta(description="Names the weights, where the engine can't; part of the namespace.")
    ] = ""
    weights_version: Annotated[
        str, Meta(description="Epoch that `reset_cache` moves to; empty: a random new one.")
    ] = ""
    policy: Annotated[
        str,
        Meta(
            pattern=r"^(return|lru|[\w.]+:\w+)$",
            description="What is evicted first: `return`, `lru`, or your own as `module:Class`.",
        ),
    ] = "return"
    placement: Annotated[
        Literal["session", "block"],
        Meta(description="`session`: one home per conversation; `block`: by hash, for comparison."),
    ] = "session"
    pd_role: Annotated[
        Literal["none", "prefill", "decode"],
        Meta(description="Part in prefill/decode disaggregation; loads and saves happen in each."),
    ] = "none"
    pd_wait_s: Annotated[
        PositiveFloat, Meta(description="How long a decode engine waits for a hand-off's commit.")
    ] = 2.0
    min_load_tokens: Annotated[
        int, Meta(ge=0, description="Shorter hits are recomputed rather than loaded.")
    ] = 0
    cost_model: Annotated[
        bool, Meta(description="Leave a load that would take longer than computing (measured).")
    ] = True
    checksums: Annotated[
        bool, Meta(description="Verify the payload's checksum on every load (the header always).")
    ] = True
    load_failure_policy: Annotated[
        Literal["recompute"],
        Meta(description="What vLLM's `kv_load_failure_policy` is set to: no request may fail."),
    ] = "recompute"
    connect_timeout_s: Annotated[
        PositiveFloat, Meta(description="Limit for one connection attempt to a server.")
    ] = 1.0
    lookup_deadline_s: Annotated[
        PositiveFloat, Meta(description="A lookup that takes longer is a miss.")
    ] = 0.5
    save_wait_s: Annotated[
        float,
        Meta(ge=0, description="How long a lookup waits for a save that would lengthen its hit."),
    ] = 0.1
    index_timeout_s: Annotated[
        PositiveFloat, Meta(description="Limit for one call to the index.")
    ] = 1.0
    load_deadline_s: Annotated[
        PositiveFloat, Meta(description="A load that takes longer ends; the rest is recomputed.")
    ] = 5.0
    save_deadline_s: Annotated[
        PositiveFloat, Meta(description="A save that takes longer ends; its blocks are released.")
    ] = 30.0
    object_ttl_s: Annotated[
        PositiveFloat, Meta(description="Life of an object that was written but never committed.")
    ] = 600.0
    capacity_bytes: Annotated[
        int, Meta(ge=0, description="Bytes a node may hold; 0: `capacity_share` of its maxmemory.")
    ] = 0
    capacity_share: Annotated[
        Share, Meta(description="Share of a node's maxmemory that is used.")
    ] = 0.9
    embedded_bytes: Annotated[
        PositiveInt, Meta(description="Memory limit of the embedded data server.")
    ] = 2 << 30
    embedded_dir: Annotated[
        str, Meta(description="Directory of the embedded servers' sockets; empty: per user.")
    ] = ""
    blocks_per_job_max: Annotated[
        int, Meta(ge=1, le=128, description="Blocks of one save or load job.")
    ] = 128
    save_bytes_in_flight_max: Annotated[
        PositiveInt, Meta(description="More bytes waiting to be saved are declined.")
    ] = 512 << 20
    load_bytes_in_flight_max: Annotated[
        PositiveInt, Meta(description="More bytes waiting to be loaded become misses.")
    ] = 2 << 30
    staging_bytes: Annotated[
        PositiveInt, Meta(description="Pinned staging memory per direction (GPU caches, Mooncake).")
    ] = 256 << 20
    hold_share_max: Annotated[
        Share, Meta(description="Share of the engine's cache that saves may hold at once.")
    ] = 0.25
    queue_ops_max: Annotated[
        PositiveInt, Meta(description="Operations waiting for the index client thread.")
    ] = 4096
    io_threads: Annotated[
        int, Meta(ge=1, le=16, description="Load threads, and save threads, of each worker rank.")
    ] = 1
    pinned_bytes_max: Annotated[
        int, Meta(ge=0, description="Bytes a tenant may pin; 0: no pins.")
    ] = 1 << 30
    sessions_max: Annotated[
        PositiveInt, Meta(description="Sessions a tenant may have stored.")
    ] = 1_000_000
    mooncake_check: Annotated[
        bool, Meta(description="Ask Mooncake whether planned objects are there before a promise.")
    ] = True

    def resolved_store(self) -> StoreConfig:
        """Index and data URLs; ("embedded", ("embedded",)) where two local servers are to serve."""
        if isinstance(self.store, str):
            return StoreConfig(index=self.store, data=(self.store,))
        data = self.store["data"]
        index = self.store["index"]
        assert isinstance(index, str)
        return StoreConfig(index=index, data=(data,) if isinstance(data, str) else tuple(data))


FIELDS = tuple(field.name for field in msgspec.structs.fields(Config))


def parse_config(extra: Mapping[str, object]) -> Config:
    """The one way from a raw mapping to a Config. Raises ConfigError."""
    for key in extra:
        if key not in FIELDS:
            raise ConfigError(key, extra[key], "a known key", _nearest(key))
    if "store" not in extra:
        raise ConfigError("store", None, 'a URL such as "redis://127.0.0.1:6379", or "embedded"')
    for name, value in extra.items():
        _check_type(name, value)
    config = msgspec.convert(dict(extra), Config)
    _check_store(config.store)
    _check_limits(config)
    return config


def _nearest(key: str) -> str:
    close = difflib.get_close_matches(key, FIELDS, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"known keys: {', '.join(FIELDS)}"


def _check_type(name: str, value: object) -> None:
    """One field at a time, so that the error names its key."""
    field = next(f for f in msgspec.structs.fields(Config) if f.name == name)
    try:
        msgspec.convert(value, field.type)
    except msgspec.ValidationError as error:
        raise ConfigError(name, value, _expected(error)) from error


def _expected(error: msgspec.ValidationError) -> str:
    text = str(error)
    return text[len("Expected ") :] if text.startswith("Expected ") else f"a valid value ({text})"


def _check_store(store: str | dict[str, str | list[str]]) -> None:
    if isinstance(store, str):
        if store != EMBEDDED:
            _check_url("store", store, INDEX_SCHEMES)
        return
    for key in store:
        if key not in ("index", "data"):
            raise ConfigError(f"store.{key}", store[key], 'the keys "index" and "data"')
    for key in ("index", "data"):
        if not store.get(key):
            raise ConfigError(f"store.{key}", store.get(key), "a URL")
    index, data = store["index"], store["data"]
    if not isinstance(index, str):
        raise ConfigError("store.index", index, "one URL (the index is never spread)")
    _check_url("store.index", index, INDEX_SCHEMES)
    urls = [data] if isinstance(data, str) else data
    for url in urls:
        _check_url("store.data", url, DATA_SCHEMES)
    if len(set(urls)) != len(urls):
        raise ConfigError("store.data", urls, "each node once")
    if len(urls) > 1 and any(url.startswith("mooncake:") for url in urls):
        raise ConfigError("store.data", urls, "one mooncake URL alone (it names a whole cluster)")


def _check_url(key: str, url: str, schemes: tuple[str, ...]) -> None:
    known = ", ".join(f"{scheme}://" for scheme in schemes)
    if SENTINEL in schemes and url.startswith(f"{SENTINEL}://"):
        if not sentinel_parts(url).hosts:
            raise ConfigError(key, url, f"{SENTINEL}://HOST:PORT[,HOST:PORT...]/SERVICE[/DB]")
        return
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ConfigError(key, url, f"a URL ({error})") from error
    if parts.scheme not in schemes:
        close = difflib.get_close_matches(parts.scheme, schemes, n=1)
        hint = f"did you mean {close[0]}://?" if close else ""
        raise ConfigError(key, url, f"a URL that starts with one of {known}", hint)
    if parts.scheme == "unix" and not parts.path:
        raise ConfigError(key, url, "a socket path, as in unix:///run/valkey.sock")
    if parts.scheme in ("redis", "rediss", "mooncake") and not parts.hostname:
        raise ConfigError(key, url, "a host name after //")
    if port == 0:
        raise ConfigError(key, url, "a port from 1 to 65535")


class SentinelUrl(NamedTuple):
    """A Sentinel URL in parts; `hosts` is empty if it makes no sense."""

    hosts: tuple[tuple[str, int], ...]
    service: str
    database: int
    username: str | None
    password: str | None


def sentinel_parts(url: str) -> SentinelUrl:
    """`redis+sentinel://[USER:PASSWORD@]HOST:PORT[,HOST:PORT...]/SERVICE[/DB]`."""
    parts = urlsplit(url)
    login, _, places = parts.netloc.rpartition("@")
    user, colon, password = login.partition(":")
    service, _, database = parts.path.strip("/").partition("/")
    hosts = []
    for place in places.split(","):
        host, _, port = place.rpartition(":")
        hosts.append((host, int(port) if port.isdigit() else 0))
    good = service and (not database or database.isdigit()) and all(h and p for h, p in hosts)
    return SentinelUrl(
        hosts=tuple(hosts) if good else (),
        service=service,
        database=int(database or 0) if good else 0,
        username=(user or None) if colon else None,
        password=password or None,
    )


def _check_limits(config: Config) -> None:
    secret = config.session_secret
    if secret:
        try:
            length = len(bytes.fromhex(secret))
        except ValueError as error:
            raise ConfigError("session_secret", "(hidden)", "hexadecimal digits") from error
        if length < 32:
            raise ConfigError("session_secret", "(hidden)", "at least 64 hexadecimal digits")
    if not config.session_headers or not all(config.session_headers):
        raise ConfigError("session_headers", config.session_headers, "at least one header name")
    if not config.tenant:
        raise ConfigError("tenant", config.tenant, "a name of at least one character")
    if config.object_ttl_s <= config.save_deadline_s:
        raise ConfigError(
            "object_ttl_s",
            config.object_ttl_s,
            f"more than save_deadline_s ({config.save_deadline_s})",
        )
