"""What the data nodes hold in a replay, kept apart from the index that says what they should."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from connector.ids import BlockHash, NodeId
from connector.indexmsg import Victim


class Nodes:
    """The blocks of every node. Nothing here looks into the index."""

    def __init__(self, names: Sequence[NodeId]) -> None:
        self.names = tuple(names)
        self.held: dict[NodeId, set[BlockHash]] = {name: set() for name in names}
        self.read: dict[NodeId, int] = dict.fromkeys(names, 0)

    def put(self, node: NodeId, blocks: Iterable[BlockHash]) -> None:
        """These blocks were written."""
        self.held[node].update(blocks)

    def delete(self, victims: Iterable[Victim]) -> None:
        """Objects that the index named as victims."""
        for victim in victims:
            self.held[victim.node].discard(victim.hash)

    def wipe(self, node: NodeId) -> None:
        """The node has lost its data."""
        self.held[node].clear()

    def with_block(self, block: BlockHash) -> NodeId | None:
        """A node that holds it, the first by number; None if there is none."""
        for node, held in self.held.items():
            if block in held:
                return node
        return None

    def holders(self, chain: Iterable[BlockHash]) -> list[NodeId]:
        """A node for each block that could be loaded, up to the first that none holds."""
        found: list[NodeId] = []
        for block in chain:
            node = self.with_block(block)
            if node is None:
                break
            found.append(node)
        return found

    def prefixes(self, chain: Sequence[BlockHash], without: Iterable[NodeId]) -> dict[NodeId, int]:
        """For each of the nodes `without`: how much of the chain could be loaded, if that one had
        no data."""
        left = dict.fromkeys(without, len(chain))
        ends: dict[NodeId, int] = {}
        for depth, block in enumerate(chain):
            if not left:
                break
            at = [node for node, held in self.held.items() if block in held]
            if not at:
                return ends | dict.fromkeys(left, depth)
            if len(at) == 1 and left.pop(at[0], None) is not None:
                ends[at[0]] = depth
        return ends | left

    def behind_hole(self, parents: dict[BlockHash, BlockHash]) -> int:
        """Blocks that are held although a block before them is not: never usable."""
        there = set().union(*self.held.values())
        whole: dict[BlockHash, bool] = {BlockHash(b""): True}
        for block in there:
            way: list[BlockHash] = []
            at = block
            while at not in whole and at in there:
                way.append(at)
                at = parents[at]
            good = whole.get(at, False)
            whole.update(dict.fromkeys(way, good))
        return sum(1 for held in self.held.values() for block in held if not whole[block])


def skew(loads: Iterable[int]) -> float:
    """The largest over the mean; 1 if there is nothing."""
    values = list(loads)
    total = sum(values)
    return max(values) * len(values) / total if total else 1.0
