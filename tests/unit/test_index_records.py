"""The reference's parts: the sorted set, uses and leases of a run, and that the check can fail."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from math import inf

import pytest

from connector.clock import ManualClock
from connector.ids import NodeId
from store_worker.index import MemoryIndex, limits
from store_worker.index.integrity import check
from store_worker.index.records import Copy, Dying, Mark, Run, State, Zset
from store_worker.index.tree import Op, add_lease, add_mark, leased_to, mark_at
from tests.index_kit import BLOCK, INC, A, B, Driver, chain, key


def run_of(blocks: int) -> Run:
    hashes = [bytes([i]) * 8 for i in range(blocks)]
    return Run(1, b"n", b"", 0, blocks, 1, 1, 1, 10, hashes)


def test_zset_is_ordered_by_score_then_member() -> None:
    random_, plain, zset = random.Random(1), {}, Zset()
    for _ in range(3000):
        member, score = random_.randrange(40), random_.randrange(20)
        if random_.random() < 0.3:
            assert zset.discard(member) == (plain.pop(member, None) is not None)
        else:
            plain[member] = score
            zset.add(member, score)
        order = sorted(plain, key=lambda m: (plain[m], m))
        assert list(zset) == order and len(zset) == len(plain)
        low, high = sorted((random_.randrange(20), random_.randrange(20)))
        inside = [m for m in order if low <= plain[m] <= high]
        assert zset.between(low, high) == inside and zset.count(low, high) == len(inside)
        assert zset.upto(high, 3) == [m for m in order if plain[m] <= high][:3]
        assert zset.first() == ((plain[order[0]], order[0]) if order else None)
        assert zset.second(True) == ((plain[order[-2]], order[-2]) if len(order) > 1 else None)
    assert zset.between(-inf, inf) == list(zset) and zset.score("no such") is None


def test_uses_give_exact_recency_from_the_tail() -> None:
    """Against the plain rule: a block was last used when it, or anything below it, was."""
    random_ = random.Random(2)
    for _ in range(300):
        run, plain = run_of(12), [0] * 13
        for at_ms in range(1, 15):
            depth = random_.randint(1, 12)
            when = at_ms if random_.random() < 0.8 else random_.randint(0, at_ms)
            add_mark(run, Mark(depth, when, depth))
            plain[depth] = max(plain[depth], when)
            for block in range(1, 13):
                mark = mark_at(run, block)
                assert mark is not None
                if any(plain[block:]):
                    assert mark.at_ms == max(plain[block:])
            assert run.marks == sorted(run.marks)
            assert all(a.at_ms > b.at_ms for a, b in zip(run.marks, run.marks[1:], strict=False))


def test_leases_protect_to_the_deepest_that_still_runs() -> None:
    random_ = random.Random(3)
    for _ in range(200):
        run, given = run_of(12), []
        op = Op(State(b"", b""), 0)
        for now in range(0, 100, 10):
            op.now = now
            depth, until = random_.randint(1, 12), now + random_.randint(1, 60)
            given.append((depth, until))
            add_lease(op, run, depth, until)
            assert leased_to(op, run) == max((d for d, u in given if u > now), default=0)


def sound_index() -> MemoryIndex:
    """One with everything in it: branches, copies, grants, dying blocks, sessions."""
    index = MemoryIndex(ManualClock(wall_ms=1))
    d = Driver(index, nodes=(A, B))
    for node in (A, B):
        index.register_node(node, INC, 200 * BLOCK, d.now)
    stem, copies = chain("stem", 5), []
    for i in range(9):
        c = chain(f"{i}", 3, stem)
        answer = d.at(1).ask(c, 5 if i else 0, key(f"s{i}"), nodes=(A,))
        done = d.settle(answer, len(c) - (5 if i else 0), key(f"s{i}"))  # type: ignore[arg-type]
        copies += done.copy
    assert copies
    index.copied(copies, d.now)
    d.ask(chain("later", 4, chain("0", 3, stem)), 8)
    index.close(key("s3"), d.now)
    index.acquire(d.namespace, [(chain("1", 3, stem)[-1], 8)], 60.0, key("s1"), d.now)
    assert index.check_integrity() == []
    return index


def leaf(s: State) -> Run:
    return next(r for r in s.runs.values() if r.where is not None and r.where[0] >= 0)


def branched(s: State) -> Run:
    return next(r for r in s.runs.values() if r.children and r.copies)


def _forget_entry(s: State) -> None:
    del s.entries[leaf(s).ns][leaf(s).hashes[0]]


def _orphan(s: State) -> None:
    run = branched(s)
    for block in run.hashes:
        del s.entries[run.ns][block]


def _second_list(s: State) -> None:
    run = leaf(s)
    s.place(run.node, run.epoch).lists.setdefault((3, 0), Zset()).add(run.id, 5)


def _no_list(s: State) -> None:
    run = leaf(s)
    assert run.where is not None
    s.place(run.node, run.epoch).lists[run.where].discard(run.id)


def _stored(s: State) -> None:
    s.by_idx[0].stored += 1


def _granted(s: State) -> None:
    s.by_idx[0].granted -= 1


def _copies(s: State) -> None:
    branched(s).copies.append(Copy(2, 1, 1))


def _copied(s: State) -> None:
    s.place(2, 1).copied = Zset()


def _capacity(s: State) -> None:
    s.by_idx[0].capacity = 5


def _dying_listed(s: State) -> None:
    run = leaf(s)
    node = s.node_at(run.node)
    node.dying_blocks[run.ns, run.hashes[0]] = Dying(0, 1)
    node.dying_order.add((run.ns, run.hashes[0]), 5)


def _dying_order(s: State) -> None:
    node = next(n for n in s.by_idx if n.dying_blocks)
    node.dying_order.discard(next(iter(node.dying_order)))


def _promised(s: State) -> None:
    next(n for n in s.by_idx if n.promised).promised.clear()


def _hold(s: State) -> None:
    record = next(r for r in s.sessions.values() if r.holds)
    s.runs[next(iter(record.holds))].holders = Zset()


def _holder(s: State) -> None:
    leaf(s).holders.add(b"nobody", leaf(s).stop)


def _idle(s: State) -> None:
    s.idle.discard(next(iter(s.idle)))


def _grant(s: State) -> None:
    grant = next(g for g in s.grants.values() if g.reply is None)
    run_id, _ = s.entries[grant.ns][grant.parent]
    s.runs[run_id].children.discard(-grant.id)


def _ended_grant(s: State) -> None:
    leaf(s).children.add(-999, leaf(s).start + 1)


def _uses(s: State) -> None:
    leaf(s).marks = [Mark(leaf(s).stop - 1, 1, 0)]


def _tenant(s: State) -> None:
    next(iter(s.tenants.values())).sessions += 1


DAMAGE: tuple[tuple[Callable[[State], None], str], ...] = (
    (_forget_entry, "blocks in runs"),
    (_orphan, "I1"),
    (_second_list, "I9b"),
    (_no_list, "I9b"),
    (_stored, "I5"),
    (_granted, "I5"),
    (_copies, "I5"),
    (_copied, "does not know"),
    (_capacity, "I5"),
    (_dying_listed, "listed there and dying"),
    (_dying_order, "order differ"),
    (_promised, "promised"),
    (_hold, "does not know it"),
    (_holder, "does not know it"),
    (_idle, "idle"),
    (_grant, "is not known to run"),
    (_ended_grant, "which has ended"),
    (_uses, "has no use"),
    (_tenant, "tenant"),
)


@pytest.mark.parametrize(("damage", "word"), DAMAGE)
def test_the_check_finds(damage: Callable[[State], None], word: str) -> None:
    state = copy.deepcopy(sound_index().state)
    damage(state)
    assert any(word in line for line in check(state)), check(state)


def test_limits_fit_what_scripts_can_say() -> None:
    """Scripts write numbers with 14 digits, and levels with one."""
    assert limits.NEVER_MS < 10**14
    low, high = limits.PRIORITY_MIN, limits.PRIORITY_MAX
    assert limits.LEVEL_NORMAL + low > limits.LEVEL_FREE
    assert limits.LEVEL_NORMAL + high < limits.LEVEL_PINNED < 10


def test_views_share_one_index() -> None:
    index = sound_index()
    other = index.view(index._options)
    assert other.nodes() == index.nodes() and other.state is index.state
    assert isinstance(other.nodes()[0].node, str) and NodeId("a:1") == other.nodes()[0].node
