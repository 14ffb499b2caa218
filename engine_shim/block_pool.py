"""The engine's KV blocks: reference counts, the prefix cache, and the order of reuse.

The prefix cache is a tree of `PrefixNode`s, one per cached block hash; equal blocks computed at
the same time share a node. A node's parent is cached as long as the node is. A node is *held*
while it, or a node below it, has a session's tag (`session_cache.py` sets them).

A block with no reference is in exactly one of three queues, each in order of last use, and new
blocks are taken from the first that is not empty: `plain` (no cached content), `cold` (cached),
`held` (cached, on a session's chain).

Owned by the scheduler thread.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from engine_shim.hashing import ROOT


class PrefixNode:
    """One cached block hash. `held` counts own tags plus children that are held."""

    __slots__ = ("block_hash", "block_ids", "children", "depth", "held", "parent", "tags")

    def __init__(self, block_hash: bytes, parent: PrefixNode | None) -> None:
        self.block_hash = block_hash
        self.parent = parent
        self.depth: int = 1 if parent is None else parent.depth + 1
        self.block_ids: list[int] = []
        self.children: dict[bytes, PrefixNode] = {}
        self.tags = 0
        self.held = 0


class DropListener(Protocol):
    """Told of a tagged node that leaves the cache, before its tags are taken off."""

    def node_dropped(self, node: PrefixNode) -> None:
        """Must take off (`untag`) every tag it set on `node`; may set some on its parent."""


class BlockPool:
    """See the module."""

    def __init__(self, num_blocks: int, block_size: int, caching: bool = True) -> None:
        self._num_blocks = num_blocks
        self.block_size = block_size
        self.caching = caching
        self._refs = [0] * num_blocks
        self._node_of: list[PrefixNode | None] = [None] * num_blocks
        self._plain: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._cold: OrderedDict[int, None] = OrderedDict()
        self._held: OrderedDict[int, None] = OrderedDict()
        self._index: dict[bytes, PrefixNode] = {}
        self._listener: DropListener | None = None
        self.num_evicted = 0

    def set_listener(self, listener: DropListener) -> None:
        """Who set the tags."""
        self._listener = listener

    # ---- references ---------------------------------------------------------------------------

    @property
    def num_blocks(self) -> int:
        """All blocks."""
        return self._num_blocks

    @property
    def num_free(self) -> int:
        """Blocks without a reference, cached ones included."""
        return len(self._plain) + len(self._cold) + len(self._held)

    @property
    def num_cached(self) -> int:
        """Nodes in the prefix cache."""
        return len(self._index)

    def refs(self, block_id: int) -> int:
        """References on a block."""
        return self._refs[block_id]

    def touch(self, block_ids: Sequence[int]) -> None:
        """Take one reference on each."""
        for block_id in block_ids:
            if self._refs[block_id] == 0:
                del self._queue_of(block_id)[block_id]
            self._refs[block_id] += 1

    def free(self, block_ids: Iterable[int]) -> None:
        """Give back one reference on each, in the order given: the first is reused first."""
        for block_id in block_ids:
            assert self._refs[block_id] > 0, f"block {block_id} freed twice"
            self._refs[block_id] -= 1
            if self._refs[block_id] == 0:
                self._queue_of(block_id)[block_id] = None

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks with one reference each, their content forgotten; None if too few."""
        if count > self.num_free:
            return None
        taken = []
        for _ in range(count):
            block_id = next(iter(self._plain or self._cold or self._held))
            self.touch((block_id,))
            self._forget(block_id)
            taken.append(block_id)
        return taken

    def _queue_of(self, block_id: int) -> OrderedDict[int, None]:
        node = self._node_of[block_id]
        if node is None:
            return self._plain
        return self._held if node.held else self._cold

    # ---- prefix cache -------------------------------------------------------------------------

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """Blocks of the longest cached prefix of a chain. Takes no reference."""
        found = []
        for block_hash in hashes:
            node = self._index.get(block_hash)
            if node is None:
                break
            found.append(node.block_ids[0])
        return found

    def node(self, block_hash: bytes) -> PrefixNode | None:
        """The cached node of a hash."""
        return self._index.get(block_hash)

    def register(self, parent_hash: bytes, block_hash: bytes, block_id: int) -> bool:
        """Cache a referenced block whose KV is complete. False if its parent is not cached."""
        if not self.caching:
            return False
        assert self._refs[block_id] > 0, f"block {block_id} is free and can't be registered"
        node = self._index.get(block_hash)
        if node is None:
            parent = self._index.get(parent_hash)
            if parent is None and parent_hash != ROOT:
                return False
            node = PrefixNode(block_hash, parent)
            self._index[block_hash] = node
            if parent is not None:
                parent.children[block_hash] = node
        if block_id not in node.block_ids:
            assert self._node_of[block_id] is None, f"block {block_id} has another hash"
            node.block_ids.append(block_id)
            self._node_of[block_id] = node
        return True

    def reset_prefix_cache(self) -> bool:
        """Forget all cached content; False, with nothing changed, while a block has a reference."""
        if self.num_free != self._num_blocks:
            return False
        for node in [node for node in self._index.values() if node.parent is None]:
            self._drop_subtree(node)
        return True

    def _forget(self, block_id: int) -> None:
        """Take the content off a block that is being reused."""
        node = self._node_of[block_id]
        if node is None:
            return
        self._node_of[block_id] = None
        node.block_ids.remove(block_id)
        self.num_evicted += 1
        if not node.block_ids:
            self._drop_subtree(node)

    def _drop_subtree(self, top: PrefixNode) -> None:
        """Uncache a node and all below it, leaves first; blocks in use stay with their users."""
        order = [top]
        for node in order:
            order.extend(node.children.values())
        for node in reversed(order):
            self._drop(node)

    def _drop(self, node: PrefixNode) -> None:
        assert not node.children, "a node with children was dropped"
        if node.tags and self._listener is not None:
            self._listener.node_dropped(node)
        assert node.tags == 0 and node.held == 0, "a dropped node kept a tag"
        for block_id in node.block_ids:
            if self._refs[block_id] == 0:
                del self._queue_of(block_id)[block_id]
                self._plain[block_id] = None
            self._node_of[block_id] = None
        if node.parent is not None:
            del node.parent.children[node.block_hash]
        del self._index[node.block_hash]

    # ---- tags ---------------------------------------------------------------------------------

    def tag(self, node: PrefixNode) -> None:
        """Put one more session tag on a cached node; it and all above it are held."""
        node.tags += 1
        self._hold(node)

    def untag(self, node: PrefixNode) -> None:
        """Take one tag off."""
        assert node.tags > 0, "untagged twice"
        node.tags -= 1
        self._unhold(node)

    def _hold(self, node: PrefixNode | None) -> None:
        while node is not None:
            node.held += 1
            if node.held > 1:
                return
            self._move(node, self._cold, self._held)
            node = node.parent

    def _unhold(self, node: PrefixNode | None) -> None:
        while node is not None:
            node.held -= 1
            if node.held > 0:
                return
            self._move(node, self._held, self._cold)
            node = node.parent

    def _move(
        self, node: PrefixNode, source: OrderedDict[int, None], target: OrderedDict[int, None]
    ) -> None:
        for block_id in node.block_ids:
            if self._refs[block_id] == 0:
                del source[block_id]
                target[block_id] = None

    def release_upward(self, node: PrefixNode) -> int:
        """Uncache from a leaf upward what nobody needs; how many nodes went.

        Stops at the first node that has a child, is held, or has a block with a reference.
        """
        count = 0
        current: PrefixNode | None = node if self._index.get(node.block_hash) is node else None
        while current is not None:
            used = any(self._refs[block_id] for block_id in current.block_ids)
            if used or current.held or current.children:
                break
            above = current.parent
            self._drop(current)
            count += 1
            current = above
        return count

    @property
    def num_held(self) -> int:
        """Nodes on sessions' chains. Walks the cache."""
        return sum(1 for node in self._index.values() if node.held)

    # ---- integrity ----------------------------------------------------------------------------

    def check_integrity(self) -> list[str]:
        """All violations of what the module promises; empty if none."""
        found: list[str] = []
        report = found.append
        for block_id in range(self._num_blocks):
            queues = [q for q in (self._plain, self._cold, self._held) if block_id in q]
            expected = [] if self._refs[block_id] else [self._queue_of(block_id)]
            if [id(q) for q in queues] != [id(q) for q in expected]:
                report(f"block {block_id}: {self._refs[block_id]} refs, in {len(queues)} queues")
            node = self._node_of[block_id]
            if node is not None and block_id not in node.block_ids:
                report(f"block {block_id}: its node does not list it")
        found.extend(_node_faults(self._index, lambda block_id: self._node_of[block_id]))
        return found


def _node_faults(
    index: dict[bytes, PrefixNode], node_of: Callable[[int], PrefixNode | None]
) -> Iterator[str]:
    for block_hash, node in index.items():
        name = f"node {block_hash[:4].hex()}"
        if not node.block_ids:
            yield f"{name}: no block"
        if any(node_of(block_id) is not node for block_id in node.block_ids):
            yield f"{name}: a block of it belongs elsewhere"
        parent = node.parent
        if parent is not None and index.get(parent.block_hash) is not parent:
            yield f"{name}: its parent is not cached"
        if parent is not None and parent.children.get(block_hash) is not node:
            yield f"{name}: its parent does not list it"
        if any(index.get(child.block_hash) is not child for child in node.children.values()):
            yield f"{name}: a child is not cached"
        held = node.tags + sum(1 for child in node.children.values() if child.held)
        if held != node.held:
            yield f"{name}: held {node.held}, expected {held}"
