"""SGLang's legacy sessions: the engine remembers a conversation's tokens and a request extends it.

`session_params` rewrites the prompt; it is no identity for caching by itself. Owned by the event
loop. What is kept is bounded: sessions, requests of a session, and each session's tokens.
"""

from __future__ import annotations

from collections import OrderedDict

from engine_shim.errors import InvalidRequest
from engine_shim.frontend.bodies import SessionParams

SESSIONS_MAX = 1024
REQUESTS_MAX = 256
CAPACITY_TOKENS = 1 << 20


class _Turn:
    """One finished request of a session."""

    def __init__(self, prompt: list[int], output: list[int], parent: str | None) -> None:
        self.prompt, self.output, self.parent = prompt, output, parent


class LegacySessions:
    """All open legacy sessions of this front end."""

    def __init__(self) -> None:
        self._sessions: dict[str, OrderedDict[str, _Turn]] = {}
        self._capacity: dict[str, int] = {}

    def __contains__(self, session_id: str) -> bool:
        return session_id in self._sessions

    def open(self, session_id: str, capacity_tokens: int | None) -> None:
        """Raises InvalidRequest if it is open, or if too many are."""
        if session_id in self._sessions:
            raise InvalidRequest("this session is open already; close it first", "session_id")
        if len(self._sessions) >= SESSIONS_MAX:
            raise InvalidRequest(
                f"{SESSIONS_MAX} legacy sessions are open; close one, or send session_id instead of"
                " session_params, which needs no open session",
                param="session_id", status=429,
            )  # fmt: skip
        self._sessions[session_id] = OrderedDict()
        self._capacity[session_id] = capacity_tokens or CAPACITY_TOKENS

    def close(self, session_id: str) -> bool:
        """Forget it; False if it was not open."""
        self._capacity.pop(session_id, None)
        return self._sessions.pop(session_id, None) is not None

    def prompt(self, params: SessionParams, tokens: list[int]) -> list[int]:
        """The whole prompt of a request that adds `tokens`. Raises InvalidRequest."""
        turns = self._turns(params.id)
        whole = self._base(turns, params) + tokens
        capacity = self._capacity[params.id]
        if len(whole) > capacity:
            raise InvalidRequest(
                f"the session holds {capacity} tokens and this request would make {len(whole)};"
                " open it with a larger capacity_of_str_len",
                param="session_params",
            )
        return whole

    def _turns(self, session_id: str) -> OrderedDict[str, _Turn]:
        turns = self._sessions.get(session_id)
        if turns is None:
            raise InvalidRequest(
                "session_params.id names no open session; POST /open_session first, or send"
                " session_id, which needs none",
                param="session_params.id",
            )
        return turns

    def _base(self, turns: OrderedDict[str, _Turn], params: SessionParams) -> list[int]:
        if params.rid is None:
            if params.replace:
                turns.clear()
            return []
        turn = turns.get(params.rid)
        if turn is None:
            raise InvalidRequest(
                "session_params.rid names no finished request of this session",
                param="session_params.rid",
            )
        if params.replace:
            _drop_children(turns, params.rid)
        base = turn.prompt if params.drop_previous_output else turn.prompt + turn.output
        return base[: params.offset] if params.offset else list(base)

    def finished(self, params: SessionParams, rid: str, prompt: list[int], out: list[int]) -> None:
        """A request of the session came to its end; nothing happens if it was closed meanwhile."""
        turns = self._sessions.get(params.id)
        if turns is None:
            return
        turns[rid] = _Turn(prompt, out, params.rid)
        turns.move_to_end(rid)
        while len(turns) > REQUESTS_MAX:
            turns.popitem(last=False)


def _drop_children(turns: OrderedDict[str, _Turn], rid: str) -> None:
    """Forget every turn that came after `rid`, however far."""
    gone = {rid}
    grew = True
    while grew:
        more = {name for name, turn in turns.items() if turn.parent in gone} - gone
        grew = bool(more)
        gone |= more
    for name in gone - {rid}:
        turns.pop(name, None)
