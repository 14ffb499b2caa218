"""The prefill side's hand-off: `kv_transfer_params = {"session_kv": {...}}`.

Fields: `session` (id or null), `tip` (hex hash of the last whole prompt block), `num_tokens` (that
the tip covers), `namespace` (hex; engines that differ in it can't share blocks).

Pure functions. Leaf module.
"""

from __future__ import annotations

from collections.abc import Mapping

from connector.ids import NO_HASH, BlockHash, Namespace

HAND_OFF = "session_kv"


def make_hand_off(
    session_id: str | None, tip: BlockHash, num_tokens: int, namespace: Namespace
) -> dict[str, object]:
    """What goes to the client with a prefill engine's reply."""
    return {
        HAND_OFF: {
            "session": session_id,
            "tip": tip.hex(),
            "num_tokens": num_tokens,
            "namespace": namespace.hex(),
        }
    }


def hand_off_of(params: Mapping[str, object] | None) -> Mapping[str, object] | None:
    """The hand-off in a request's kv_transfer_params, or None."""
    found = (params or {}).get(HAND_OFF)
    return found if isinstance(found, Mapping) else None


def is_probe(hand_off: Mapping[str, object] | None) -> bool:
    """A proxy asks for the namespace of an engine: any reply with a hand-off will do."""
    return hand_off is not None and hand_off.get("probe") is True


def hand_off_tip(hand_off: Mapping[str, object] | None, namespace: Namespace) -> BlockHash | None:
    """The tip to wait for; NO_HASH if there is none; None if it is not for this namespace or makes
    no sense (to be counted: the request is then served as any other)."""
    if hand_off is None or is_probe(hand_off):
        return NO_HASH
    tip, theirs = hand_off.get("tip"), hand_off.get("namespace")
    if not isinstance(tip, str) or theirs != namespace.hex():
        return None
    try:
        return BlockHash(bytes.fromhex(tip))
    except ValueError:
        return None
