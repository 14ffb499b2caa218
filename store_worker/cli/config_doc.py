"""Writes docs/CONFIG.md from the config structs: `python -m store_worker.cli.config_doc FILE`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec import inspect

from connector.config import DATA_SCHEMES, INDEX_SCHEMES, Config

HEAD = """# Configuration

<!-- Generated from connector/config.py by `make docs`; a test keeps it equal. -->

These are the keys of `kv_connector_extra_config`, for vLLM and for the shim engine alike:

```
--kv-transfer-config '{"kv_connector": "SessionKVConnector", "kv_role": "kv_both",
  "kv_connector_extra_config": {"store": "redis://127.0.0.1:6379"}}'
```

They are read once, at start. An unknown key, a value of the wrong type or a limit that can't work
stops the start with a message that names the key, the value, what was expected and the nearest
known key. Sizes are in bytes, times in seconds, as the names say.

"""


def page() -> str:
    """The whole page."""
    rows = [
        f"| `{name}` | {kind} | {default} | {text} |" for name, kind, default, text in documented()
    ]
    lines = ["| key | type | default | meaning |", "|---|---|---|---|", *rows]
    schemes = (
        f"\n`store.index` takes the schemes {schemes_text(INDEX_SCHEMES)}; "
        f"`store.data` takes {schemes_text(DATA_SCHEMES)}.\n"
    )
    return HEAD + "\n".join(lines) + "\n" + schemes


def schemes_text(schemes: tuple[str, ...]) -> str:
    return ", ".join(f"`{scheme}://`" for scheme in schemes)


def documented() -> Iterator[tuple[str, str, str, str]]:
    """(key, type, default, description) in the order of the struct. Every key has a description."""
    info = inspect.type_info(Config)
    assert isinstance(info, inspect.StructType)
    for field in info.fields:
        assert isinstance(field.type, inspect.Metadata), f"{field.name} has no description"
        schema = field.type.extra_json_schema or {}
        text = str(schema["description"]).replace("|", "\\|").replace("\n", " ")
        yield field.encode_name, kind(field.type.type), default(field), text


def default(field: inspect.Field) -> str:
    if field.required:
        return "(required)"
    return f"`{json.dumps(msgspec.to_builtins(field.default))}`"


def kind(spec: inspect.Type) -> str:
    """A type in words, with its limits."""
    match spec:
        case inspect.Metadata(type=inner):
            return kind(inner)
        case inspect.LiteralType(values=values):
            return " or ".join(f"`{json.dumps(value)}`" for value in values)
        case inspect.UnionType(types=types):
            return " or ".join(kind(option) for option in types)
        case inspect.VarTupleType(item_type=item) | inspect.ListType(item_type=item):
            return f"list of {kind(item)}"
        case inspect.DictType():
            return "object"
        case inspect.BoolType():
            return "true or false"
        case inspect.StrType():
            return "text"
        case inspect.IntType():
            return limited("whole number", spec)
        case inspect.FloatType():
            return limited("number", spec)
    raise TypeError(f"no words for {spec!r}: add them here")


def limited(name: str, spec: inspect.IntType | inspect.FloatType) -> str:
    words = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}
    limits = [
        f"{word} {getattr(spec, limit):g}"
        for limit, word in words.items()
        if getattr(spec, limit) is not None
    ]
    return f"{name}, {', '.join(limits)}" if limits else name


def main() -> int:
    """Write the page to the file that is named."""
    if len(sys.argv) != 2:
        print("usage: python -m store_worker.cli.config_doc FILE", file=sys.stderr)
        return 2
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
