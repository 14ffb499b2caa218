"""`kv_hints`: what an orchestrator says of a conversation's KV.

An envelope `{protocol_version, message_id, actions: [{action_id, action_type, action_version,
payload}]}`, as vLLM's `Request.kv_hints` has it, or the same JSON under
`kv_transfer_params["kv_hints"]`. Known actions, each in version "1":

    retain  {priority: -8..8, ttl_s > 0}   evict later (or, below 0, sooner) until then
    pin     {ttl_s > 0}                    don't evict before then, within the tenant's limit
    release {}                             the session has ended
    demote  {}                             evict before everything else

An unknown type or version is ignored and counted: envelopes are meant for many receivers.

Pure functions. Leaf module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from connector.errors import HintError
from connector.lookup import HintKind, HintOp

FIELD = "kv_hints"
VERSIONS = ("1", 1)
PRIORITY_MAX = 8
TTL_S_MAX = 7 * 24 * 3600.0
ACTIONS_MAX = 32
_KINDS = frozenset(kind.value for kind in HintKind)


class ParsedHints(NamedTuple):
    """ops: actions to carry out. ignored: how many had an unknown type or version."""

    ops: tuple[HintOp, ...] = ()
    ignored: int = 0


def parse_hints(envelope: object, session_id: str | None, cache_salt: str | None) -> ParsedHints:
    """The actions of an envelope, for the request's session. None is no hints.

    Raises HintError if the envelope or a known action is malformed, or if there is no session to
    apply it to; its text is fit for the client.
    """
    if envelope is None:
        return ParsedHints()
    actions = _get(envelope, "actions")
    if not isinstance(actions, Sequence) or isinstance(actions, str | bytes):
        raise HintError(f"{FIELD}.actions: expected a list of actions, got {_kind(actions)}")
    if len(actions) > ACTIONS_MAX:
        raise HintError(f"{FIELD}.actions: {len(actions)} actions, at most {ACTIONS_MAX} are taken")
    ops, ignored = [], 0
    for number, action in enumerate(actions):
        where = f"{FIELD}.actions[{number}]"
        kind = _known(action, where)
        if kind is None:
            ignored += 1
            continue
        if session_id is None:
            raise HintError(f"{where}: {kind.value!r} needs a session; send a session_id with it")
        payload = _get(action, "payload")
        payload = {} if payload is None else payload
        if not isinstance(payload, Mapping):
            raise HintError(f"{where}.payload: expected an object, got {_kind(payload)}")
        ops.append(_op(kind, payload, where, session_id, cache_salt))
    return ParsedHints(tuple(ops), ignored)


def _get(source: object, name: str) -> object:
    """A field of a JSON object or of an engine's own struct."""
    if isinstance(source, Mapping):
        return source.get(name)
    if isinstance(source, str | bytes | int | float | list | tuple):
        raise HintError(f"{FIELD}: expected an object, got {_kind(source)}")
    return getattr(source, name, None)


def _kind(value: object) -> str:
    return "nothing" if value is None else type(value).__name__


def _known(action: object, where: str) -> HintKind | None:
    name = _get(action, "action_type")
    if not isinstance(name, str) or not name:
        raise HintError(f"{where}.action_type: expected a name, got {_kind(name)}")
    if name not in _KINDS or _get(action, "action_version") not in VERSIONS:
        return None
    return HintKind(name)


def _op(
    kind: HintKind,
    payload: Mapping[str, object],
    where: str,
    session_id: str,
    cache_salt: str | None,
) -> HintOp:
    ttl_s = 0.0
    priority = 0
    if kind in (HintKind.PIN, HintKind.RETAIN):
        ttl_s = _number(payload, "ttl_s", where)
        if not 0 < ttl_s <= TTL_S_MAX:
            raise HintError(f"{where}.payload.ttl_s: {ttl_s:g} is not within 0 and {TTL_S_MAX:g}")
    if kind is HintKind.RETAIN:
        value = _number(payload, "priority", where)
        if value != int(value) or abs(value) > PRIORITY_MAX:
            raise HintError(
                f"{where}.payload.priority: {value:g} is not a whole number within "
                f"-{PRIORITY_MAX} and {PRIORITY_MAX}"
            )
        priority = int(value)
    return HintOp(
        session_id=session_id, cache_salt=cache_salt, kind=kind, ttl_s=ttl_s, priority=priority
    )


def _number(payload: Mapping[str, object], name: str, where: str) -> float:
    value = payload.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise HintError(f"{where}.payload.{name}: expected a number, got {_kind(value)}")
    return float(value)
