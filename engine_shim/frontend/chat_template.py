"""Messages to token ids.

    <s> ( <|im_start|> ROLE "\\n" CONTENT <|im_end|> "\\n" )*  <|im_start|> "assistant\\n"

Specials are single tokens that no text can produce, so a message can't forge a turn. Nothing of
an earlier turn is rewritten: a prompt followed by its reply is a prefix of the next turn's
prompt, token for token, as the engine samples printable bytes only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from engine_shim.errors import InvalidRequest
from engine_shim.tokenizer import BOS, TURN_END, TURN_START, encode

ROLES = ("system", "developer", "user", "assistant", "tool")
TEXT_PARTS = ("text", "input_text", "output_text")


def render(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    field: str = "messages",
) -> list[int]:
    """Token ids of a conversation, up to where the assistant's reply begins.

    tools go into a system message, as JSON with sorted keys. Raises InvalidRequest, naming
    `field`, for an empty list, an unknown role, or content that is not text.
    """
    if not messages:
        raise InvalidRequest(f"{field} is empty; send at least one message", param=field)
    tokens = [BOS]
    if tools:
        tokens += _turn("system", "tools: " + _stable_json(list(tools)))
    for index, message in enumerate(messages):
        name = f"{field}[{index}]"
        tokens += _turn(_role(message, name), _content(message, name))
    return [*tokens, TURN_START, *encode("assistant\n")]


def _turn(role: str, content: str) -> list[int]:
    return [TURN_START, *encode_text(f"{role}\n{content}", "messages"), TURN_END, *encode("\n")]


def encode_text(text: str, field: str) -> list[int]:
    """Bytes of a text as tokens. Raises InvalidRequest on lone surrogates."""
    try:
        return encode(text)
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{field} has a lone surrogate", param=field) from error


def _role(message: Mapping[str, Any], name: str) -> str:
    role = message.get("role")
    if role not in ROLES:
        raise InvalidRequest(
            f"{name}.role is {role!r}: expected one of {', '.join(ROLES)}", param=f"{name}.role"
        )
    return str(role)


def _content(message: Mapping[str, Any], name: str) -> str:
    """Text of a message; tool calls follow it as JSON."""
    text = _text(message.get("content"), f"{name}.content")
    calls = message.get("tool_calls")
    if calls:
        return text + _stable_json(calls)
    if message.get("content") is None:
        raise InvalidRequest(f"{name}.content is missing", param=f"{name}.content")
    return text


def _text(content: object, name: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(f"{name} must be a string or a list of parts", param=name)
    texts = []
    for index, part in enumerate(content):
        known = isinstance(part, Mapping) and part.get("type") in TEXT_PARTS
        if not known or not isinstance(part.get("text"), str):
            raise InvalidRequest(
                f"{name}[{index}] is not text; this engine serves text only",
                param=f"{name}[{index}]",
            )
        texts.append(part["text"])
    return "".join(texts)


def _stable_json(value: object) -> str:
    return msgspec.json.encode(value, order="sorted").decode()
