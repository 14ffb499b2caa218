"""Sessions in the engine's own prefix cache.

A turn that ends tags the deepest cached block of its chain, its *leaf*, with its session; blocks
on the way to a tagged leaf are reused last. Closing takes a session's tags off and frees, from
each leaf upward, what no other session, running request or child needs.

Each life of a session id has a generation of its own. A turn keeps the generation it began with:
if the session was closed meanwhile, the turn tags nothing when it ends, and its blocks go with
the rest. A closed generation is not remembered, so nothing here grows with closed sessions.

Owned by the scheduler thread.
"""

from __future__ import annotations

from engine_shim.api import CloseResult
from engine_shim.block_pool import BlockPool, PrefixNode

LEAVES_MAX = 64
"""Leaves of one session (regenerations and edits branch); beyond, the oldest loses its tag."""

SessionName = tuple[str | None, str]
"""(cache salt, session id): one tenant can't name another's session."""


class Session:
    """One generation of a session. `leaves` is in order of tagging, a dict used as a set."""

    __slots__ = ("closed", "generation", "leaves", "name", "running")

    def __init__(self, name: SessionName, generation: int) -> None:
        self.name = name
        self.generation = generation
        self.running = 0
        self.closed = False
        self.leaves: dict[PrefixNode, None] = {}


class SessionCache:
    """See the module. Disabled, it tags nothing and knows no session."""

    def __init__(self, pool: BlockPool, enabled: bool) -> None:
        self._pool = pool
        self.enabled = enabled
        self._open: dict[SessionName, Session] = {}
        self._sessions_at: dict[PrefixNode, dict[Session, None]] = {}
        self._generations = 0
        pool.set_listener(self)

    @property
    def num_sessions(self) -> int:
        """Open sessions: with a tag or a running turn."""
        return len(self._open)

    def session(self, session_id: str, cache_salt: str | None) -> Session | None:
        """The open generation of a session."""
        return self._open.get((cache_salt, session_id))

    def begin(self, session_id: str | None, cache_salt: str | None) -> Session | None:
        """A turn begins; None if it has no session here. Answer with one `end`."""
        if not self.enabled or not session_id:
            return None
        name = (cache_salt, session_id)
        session = self._open.get(name)
        if session is None:
            self._generations += 1
            session = self._open[name] = Session(name, self._generations)
        session.running += 1
        return session

    def end(self, session: Session, leaf_hash: bytes | None, tag: bool) -> None:
        """A turn ends, its blocks already given back.

        leaf_hash: the deepest block it cached. tag: False for a turn that was aborted.
        """
        session.running -= 1
        leaf = self._pool.node(leaf_hash) if leaf_hash else None
        if session.closed:
            self._end_closed(session, leaf)
            return
        if tag and leaf is not None:
            self._add_leaf(session, leaf)
        self._forget_if_empty(session)

    def close(self, session_id: str, cache_salt: str | None) -> CloseResult:
        """End the session's generation now; see CloseResult for when its blocks go."""
        session = self._open.pop((cache_salt, session_id), None)
        if session is None:
            return CloseResult(existed=False)
        session.closed = True
        if session.running:
            return CloseResult(existed=True, pending=True)
        return CloseResult(existed=True, freed_tokens=self._release(session))

    def _end_closed(self, session: Session, leaf: PrefixNode | None) -> None:
        """What a late turn cached goes now if nobody needs it, the tags with the last turn."""
        if leaf is not None and not session.running:
            # As a leaf of the session for a moment: then its chain goes with the others.
            self._add_leaf(session, leaf)
        elif leaf is not None:
            self._pool.release_upward(leaf)
        if not session.running:
            self._release(session)

    def _release(self, session: Session) -> int:
        leaves = list(session.leaves)
        for leaf in leaves:
            self._remove_leaf(session, leaf)
        # Deepest first: a leaf below another one is its child until it is gone.
        leaves.sort(key=lambda leaf: -leaf.depth)
        return sum(self._pool.release_upward(leaf) for leaf in leaves) * self._pool.block_size

    def _add_leaf(self, session: Session, leaf: PrefixNode) -> None:
        self._tag_leaf(session, leaf)
        # The next turn extends the last one: one tag is enough for both.
        above = leaf.parent
        while above is not None:
            if above in session.leaves:
                self._remove_leaf(session, above)
            above = above.parent
        while len(session.leaves) > LEAVES_MAX:
            self._remove_leaf(session, next(iter(session.leaves)))

    def _tag_leaf(self, session: Session, leaf: PrefixNode) -> None:
        if leaf in session.leaves:
            return
        self._pool.tag(leaf)
        session.leaves[leaf] = None
        self._sessions_at.setdefault(leaf, {})[session] = None

    def _remove_leaf(self, session: Session, leaf: PrefixNode) -> None:
        del session.leaves[leaf]
        there = self._sessions_at[leaf]
        del there[session]
        if not there:
            del self._sessions_at[leaf]
        self._pool.untag(leaf)

    def _forget_if_empty(self, session: Session) -> None:
        if not session.running and not session.leaves and not session.closed:
            del self._open[session.name]

    def node_dropped(self, node: PrefixNode) -> None:
        """The pool reuses a leaf: the session goes on with what is left of its chain."""
        for session in list(self._sessions_at.get(node, ())):
            # The new tag first: the chain stays held, and so keeps its place in the queue.
            if node.parent is not None:
                self._tag_leaf(session, node.parent)
            self._remove_leaf(session, node)
            self._forget_if_empty(session)

    def check_integrity(self) -> list[str]:
        """All violations of what the module promises; empty if none."""
        found = []
        for session in {*self._open.values(), *_flatten(self._sessions_at)}:
            name = f"session generation {session.generation}"
            if session.closed and (self._open.get(session.name) is session):
                found.append(f"{name}: closed and open")
            if session.closed and not session.running and session.leaves:
                found.append(f"{name}: closed, at rest, and still has tags")
            if not session.closed and not session.running and not session.leaves:
                found.append(f"{name}: open for nothing")
            for leaf in session.leaves:
                if self._pool.node(leaf.block_hash) is not leaf:
                    found.append(f"{name}: its leaf is not cached")
                if session not in self._sessions_at.get(leaf, {}):
                    found.append(f"{name}: its leaf does not know it")
        for node, sessions in self._sessions_at.items():
            if node.tags != len(sessions):
                found.append(f"node {node.block_hash[:4].hex()}: {node.tags} tags")
        return found


def _flatten(sessions_at: dict[PrefixNode, dict[Session, None]]) -> set[Session]:
    return {session for sessions in sessions_at.values() for session in sessions}
