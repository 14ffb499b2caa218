"""The `mooncake://` URL of the config, parsed and checked.

    mooncake://MASTER_HOST:PORT?metadata=URL&admin=URL&protocol=tcp|rdma&devices=NAMES
              &host=ADDRESS&segment=BYTES&buffer=BYTES&direct=true|false

Everything behind the question mark may be left out. Pure functions; any thread.
"""

from __future__ import annotations

import difflib
from typing import Literal
from urllib.parse import SplitResult, parse_qsl, urlsplit

import msgspec

from connector.errors import ConfigError

MASTER_PORT = 50051
METADATA_PORT = 8080
ADMIN_PORT = 9003
BUFFER_BYTES_MIN = 1 << 20
SEGMENT_BYTES_MIN = 16 << 20

KEYS = ("metadata", "admin", "protocol", "devices", "host", "segment", "buffer", "direct")


class MooncakeUrl(msgspec.Struct, frozen=True, kw_only=True):
    """One Mooncake cluster and how this process takes part in it.

    master: `host:port` of the master's RPC port (default 50051).
    metadata: where the transfer engines find each other; default `http://MASTER:8080/metadata`.
    admin: the master's HTTP port, which lists the segments; default `http://MASTER:9003`.
    protocol, devices: of the transfers; devices: RDMA device names, empty: all.
    host: the address under which others reach this process; empty: the one that faces the master.
    segment_bytes: memory that a worker of this process lends to the cluster. It ends with the
        process, and what lies in it as well.
    buffer_bytes: registered staging memory of this process; 0: `staging_bytes` of the config.
    direct: load straight into the cache. The library's calls can't be cancelled: after a deadline
        has passed, a late byte may still land in a page that has a new owner by then.
    """

    master: str
    metadata: str
    admin: str
    protocol: Literal["tcp", "rdma"] = "tcp"
    devices: str = ""
    host: str = ""
    segment_bytes: int = 0
    buffer_bytes: int = 0
    direct: bool = False

    @property
    def master_host(self) -> str:
        return self.master.rpartition(":")[0]

    @property
    def master_port(self) -> int:
        return int(self.master.rpartition(":")[2])


def parse_mooncake_url(url: str) -> MooncakeUrl:
    """Raises ConfigError, which names the part of the URL that can't be."""
    parts = urlsplit(url)
    host, port = _address(url, parts)
    given = _query(url, parts)
    protocol = given.get("protocol", "tcp")
    if protocol not in ("tcp", "rdma"):
        raise _error(url, "protocol", protocol, '"tcp" or "rdma"')
    return MooncakeUrl(
        master=f"{host}:{port}",
        metadata=_metadata(url, given.get("metadata", f"http://{host}:{METADATA_PORT}/metadata")),
        admin=_http(url, "admin", given.get("admin", f"http://{host}:{ADMIN_PORT}")).rstrip("/"),
        protocol=protocol,  # type: ignore[arg-type]
        devices=given.get("devices", ""),
        host=given.get("host", ""),
        segment_bytes=_bytes(url, "segment", given.get("segment", "0"), SEGMENT_BYTES_MIN),
        buffer_bytes=_bytes(url, "buffer", given.get("buffer", "0"), BUFFER_BYTES_MIN),
        direct=_flag(url, "direct", given.get("direct", "false")),
    )


def _error(url: str, name: str, value: object, expected: str, hint: str = "") -> ConfigError:
    return ConfigError("store.data", url, f"{expected} as {name!r}, not {value!r}", hint)


def _address(url: str, parts: SplitResult) -> tuple[str, int]:
    try:
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigError("store.data", url, f"a URL ({error})") from error
    if parts.scheme != "mooncake" or not host:
        raise ConfigError("store.data", url, "mooncake://MASTER_HOST:PORT")
    if parts.path.strip("/"):
        raise _error(url, "path", parts.path, "nothing", "options follow a question mark")
    return f"[{host}]" if ":" in host else host, MASTER_PORT if port is None else port


def _query(url: str, parts: SplitResult) -> dict[str, str]:
    given: dict[str, str] = {}
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        if name not in KEYS:
            close = difflib.get_close_matches(name, KEYS, n=1, cutoff=0.5)
            hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(KEYS)}"
            raise ConfigError("store.data", url, f"no option {name!r}", hint)
        if name in given:
            raise _error(url, name, value, "one value", "it is given twice")
        given[name] = value
    return given


def _metadata(url: str, value: str) -> str:
    if value == "P2PHANDSHAKE" or value.startswith(("etcd://", "redis://")):
        return value
    return _http(url, "metadata", value)


def _http(url: str, name: str, value: str) -> str:
    parts = urlsplit(value)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise _error(url, name, value, "an http:// URL")
    return value


def _bytes(url: str, name: str, value: str, least: int) -> int:
    try:
        number = int(value)
    except ValueError:
        number = -1
    if number < 0 or 0 < number < least:
        raise _error(url, name, value, f"a number of bytes, 0 or at least {least}")
    return number


def _flag(url: str, name: str, value: str) -> bool:
    if value not in ("true", "false"):
        raise _error(url, name, value, '"true" or "false"')
    return value == "true"
