"""The server-side scripts: assembled from the files in `lua/`, with the limits put in front.

A script is a chunk of Lua: the constants it mentions, the libraries it needs, its own file. Its
SHA1 names its version, so engines of different versions never run each other's. Pure.
"""

from __future__ import annotations

import hashlib
import re
from functools import cache
from importlib import resources
from typing import NamedTuple

from store_worker.index import limits
from store_worker.index.records import BUSY
from store_worker.policy import LRU_TABLE

_TREE = ("core", "tree")
_ROOM = (*_TREE, "room")
_ALL = (*_ROOM, "sessions", "conversations")
_NEEDS: dict[str, tuple[str, ...]] = {
    "identity": (),
    "recall": (),
    "probe": (),
    "acquire": (*_TREE, "sessions"),
    "prepare": _ALL,
    "commit": (*_ALL, "copies", "arrive"),
    "copied": _ROOM,
    "moves": (*_ROOM, "copies"),
    "abort": _ROOM,
    "freed": ("core",),
    "dying": (*_ROOM, "sessions"),
    "close": _ALL,
    "forget": _ROOM,
    "retain": (*_TREE, "sessions"),
    "pin": (*_TREE, "sessions"),
    "awaited": ("core",),
    "abandon": ("core",),
    "register": ("core",),
    "down": ("core",),
    "setnode": (),
    "lead": ("core",),
    "scores": (),
    "nodes": (),
    "page": ("core",),
    "stats": (),
    "turns": (),
    "namespaces": (),
}
NAMES = tuple(_NEEDS)


class Script(NamedTuple):
    """text: what SCRIPT LOAD takes; sha: what EVALSHA takes."""

    name: str
    text: bytes
    sha: str


@cache
def script(name: str) -> Script:
    """One of `NAMES`."""
    body = "\n".join(_read(part) for part in (*_NEEDS[name], name))
    constants = {
        f"C_{key}": str(value) for key, value in vars(limits).items() if isinstance(value, int)
    }
    constants["C_BUSY"] = f"'{BUSY[0]}:{BUSY[1]}'"
    constants["C_TIMES"] = f"'{' '.join(map(str, LRU_TABLE.times_min))}'"
    constants["C_TOKENS"] = f"'{' '.join(map(str, LRU_TABLE.tokens_min))}'"
    constants["C_CLASSES"] = str(LRU_TABLE.num_classes)
    used = sorted(set(re.findall(r"\bC_[A-Z_]+\b", body)))
    head = "".join(f"local {key} = {constants[key]}\n" for key in used)
    text = (head + body).encode()
    return Script(name, text, hashlib.sha1(text, usedforsecurity=False).hexdigest())


def _read(part: str) -> str:
    return resources.files("store_worker.index").joinpath("lua", f"{part}.lua").read_text("utf-8")
