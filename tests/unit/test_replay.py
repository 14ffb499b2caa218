"""The replay: its accounting against an independent cache, what it measures, its page."""

from __future__ import annotations

import json
import random
import re
from collections import OrderedDict
from pathlib import Path

import pytest

from connector.ids import BlockHash, Namespace, NodeId
from connector.indexmsg import Victim
from store_worker.cli.main import main
from store_worker.replay.engine import Replay, run
from store_worker.replay.nodes import Nodes, skew
from store_worker.replay.report import Setup, loss, spread
from store_worker.replay.trace import Line, Request, build, read

TRACE = Path(__file__).parents[2] / ".." / "shared" / "traces" / "conversation_trace.jsonl"
LRU_RATE, LRU_WRITTEN = 0.0702, 257_087  # of exact block LRU with 3,000 blocks on that trace
TOKENS = 512


def chats(seed: int, conversations: int = 120, shared: int = 1) -> list[Request]:
    """Conversations below one shared beginning; some end after a turn, some go on and on."""
    chance = random.Random(seed)
    fresh = iter(range(1, 1 << 30))
    lines: list[Line] = []
    for _ in range(conversations):
        at = chance.uniform(0, 1_800_000)
        ids = [-1 - i for i in range(shared)] + [next(fresh) for _ in range(chance.randint(1, 6))]
        goes_on = 0.9 if chance.random() < 0.4 else 0.1
        while True:
            length = len(ids) * TOKENS + chance.randrange(TOKENS)
            lines.append(Line(timestamp=at, input_length=length, hash_ids=list(ids)))
            if chance.random() > goes_on:
                break
            at += chance.lognormvariate(0, 0.7) * 40_000
            ids += [next(fresh) for _ in range(chance.choice((0, 1, 1, 2)))]
    return build(sorted(lines, key=lambda line: line.timestamp), TOKENS)


def block_lru(requests: list[Request], capacity: int) -> tuple[int, int]:
    """(hits, writes) of a cache of blocks that evicts the least recently used, of one request the
    deepest first. Written without the product's help."""
    order: OrderedDict[BlockHash, None] = OrderedDict()
    hits = writes = 0
    for request in requests:
        chain = request.hashes
        known = next((i for i, block in enumerate(chain) if block not in order), len(chain))
        hits += known
        for block in reversed(chain[:known]):
            order.move_to_end(block)
        new = list(chain[known:])
        while len(order) + len(new) > capacity and len(order) > known:
            order.popitem(last=False)
        new = new[: capacity - len(order)]
        writes += len(new)
        for block in reversed(new):
            order[block] = None
        for block in reversed(chain[:known]):
            order.move_to_end(block)
    return hits, writes


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("capacity", [100, 200, 100_000])
def test_lru_is_exactly_block_lru(seed: int, capacity: int) -> None:
    requests = chats(seed)
    assert max(len(request.hashes) for request in requests) < 100, "one always fits whole"
    result = run(requests, Setup(capacity_blocks=capacity, policy="lru"))
    assert (result.blocks_hit_usable, result.blocks_written) == block_lru(requests, capacity)
    assert result.blocks_declined == 0
    assert result.evicted == result.blocks_written - sum(result.stored_per_node)


@pytest.mark.parametrize("policy", ["lru", "return"])
@pytest.mark.parametrize("nodes", [1, 3])
@pytest.mark.parametrize("placement", ["session", "block"])
def test_every_run_adds_up(policy: str, nodes: int, placement: str) -> None:
    requests = chats(7)
    setup = Setup(capacity_blocks=90, nodes=nodes, placement=placement, policy=policy)
    replay = Replay(setup)
    for request in requests:
        replay.advance(request.at_ms)
        replay.turn(request)
        replay.walk()
        for held in replay.nodes.held.values():
            assert len(held) <= 90 // nodes
    assert replay.index.check_integrity() == []
    result = replay.result(requests, 1.0)
    assert result.blocks_behind_hole == 0
    assert result.blocks_asked == sum(len(r.hashes) for r in requests)
    assert (
        result.blocks_hit_usable + result.blocks_written + result.blocks_declined
        == result.blocks_asked
    )
    assert sum(result.read_per_node) == result.blocks_hit_usable > 0
    assert 0 < result.usable_hit_rate < result.reusable_share < 1
    assert 1 <= result.nodes_per_load.mean <= nodes
    assert result.hit_share_lost_on_node_loss.mean <= result.hit_share_lost_on_node_loss.worst <= 1
    assert {n.node: n.stored + n.copies for n in replay.index.nodes()} == {
        name: len(held) for name, held in replay.nodes.held.items()
    }


def test_the_same_run_twice_is_the_same() -> None:
    requests = chats(3)
    setup = Setup(capacity_blocks=60, end_hints=0.5)
    first, second = run(requests, setup), run(requests, setup)
    assert first.blocks_hit_usable == second.blocks_hit_usable
    assert first.closed_blocks == second.closed_blocks > 0
    assert first.evicted == second.evicted


def test_return_beats_lru_where_conversations_differ() -> None:
    """Not tuned to: other sizes, other gaps, other shares than any public trace."""
    for seed in range(2):
        requests = chats(seed, conversations=300)
        rates = {
            policy: run(requests, Setup(capacity_blocks=60, policy=policy)).usable_hit_rate
            for policy in ("lru", "return")
        }
        assert rates["return"] > 1.1 * rates["lru"], (seed, rates)


def test_end_hints_free_what_would_wait_in_vain() -> None:
    requests = chats(5, conversations=150)
    hinted = run(requests, Setup(capacity_blocks=40, end_hints=1.0))
    silent = run(requests, Setup(capacity_blocks=40))
    assert hinted.usable_hit_rate > silent.usable_hit_rate
    assert hinted.blocks_written < silent.blocks_written + silent.blocks_declined
    assert sum(hinted.stored_per_node) <= 1, "all are closed: at most the shared block is left"


def test_one_home_per_session_loses_less_with_a_node_than_hashing_per_block() -> None:
    requests = chats(11, conversations=120)
    by_session, by_block = (
        run(requests, Setup(capacity_blocks=4_000, nodes=4, placement=placement))
        for placement in ("session", "block")
    )
    assert by_session.copies_made > 0
    assert by_session.nodes_per_load.mean < 1.2 < by_block.nodes_per_load.mean
    lost, lost_by_block = (r.hit_share_lost_on_node_loss for r in (by_session, by_block))
    assert lost.mean < 0.3 < lost_by_block.mean


def test_a_node_that_loses_its_data_costs_its_share_and_no_more() -> None:
    requests = chats(13, conversations=200)
    setup = Setup(capacity_blocks=2_000, nodes=4)
    whole = run(requests, setup)
    replay = Replay(Setup(capacity_blocks=2_000, nodes=4, lose=(1, 900.0)))
    emptied = 0
    for request in requests:
        before = len(replay.nodes.held[NodeId("node1")])
        replay.advance(request.at_ms)
        if before and not replay.nodes.held[NodeId("node1")]:
            emptied += 1
        replay.turn(request)
    replay.walk()
    assert emptied == 1
    result = replay.result(requests, 1.0)
    assert 0.7 * whole.blocks_hit_usable < result.blocks_hit_usable < whole.blocks_hit_usable
    assert replay.index.check_integrity() == []


# -- the parts -----------------------------------------------------------------------------------

A, B = NodeId("a"), NodeId("b")


def blocks(text: str) -> list[BlockHash]:
    return [BlockHash(char.encode()) for char in text]


def test_a_walk_finds_what_lies_behind_a_hole() -> None:
    parents = dict(zip(blocks("abcdxy"), [BlockHash(b""), *blocks("abcax")], strict=True))
    nodes = Nodes([A, B])
    nodes.put(A, blocks("abx"))
    nodes.put(B, blocks("cdy"))
    assert nodes.behind_hole(parents) == 0, "the chain may lie on several nodes"
    nodes.delete([Victim(Namespace(b"n"), BlockHash(b"b"), A)])
    assert nodes.behind_hole(parents) == 2, "c and d"
    nodes.put(A, blocks("d"))
    assert nodes.behind_hole(parents) == 3, "each copy of d"
    nodes.wipe(A)
    assert nodes.behind_hole(parents) == 3, "c, d, y"


def test_a_prefix_without_a_node() -> None:
    nodes = Nodes([A, B])
    nodes.put(A, blocks("abc"))
    nodes.put(B, blocks("ad"))
    chain = blocks("abcd")
    assert nodes.holders(chain) == [A, A, A, B]
    assert nodes.prefixes(chain, [A, B]) == {A: 1, B: 3}
    assert nodes.prefixes(chain, [B]) == {B: 3}
    assert nodes.prefixes(chain[:1], [A, B]) == {A: 1, B: 1}, "each has the other's copy"
    assert nodes.prefixes(chain, []) == {}


def test_a_chain_that_nobody_has_whole() -> None:
    nodes = Nodes([A, B])
    nodes.put(A, blocks("ab"))
    nodes.put(B, blocks("abd"))
    chain = blocks("abcd")
    assert nodes.holders(chain) == [A, A]
    assert nodes.prefixes(chain, [A, B]) == {A: 2, B: 2}


def test_numbers() -> None:
    assert skew([]) == skew([0, 0]) == 1.0
    assert skew([3, 1]) == 1.5
    assert spread({}) == spread({1: 0})
    quantiles = spread({1: 98, 2: 1, 5: 1})
    assert (quantiles.p50, quantiles.p99, quantiles.mean) == (1, 2, 1.05)
    assert (loss([1, 3], 10).mean, loss([1, 3], 10).worst) == (0.2, 0.3)
    assert loss([0], 0).worst == 0.0


# -- the public trace ----------------------------------------------------------------------------


@pytest.mark.slow
def test_the_goal_on_the_public_trace() -> None:
    if not TRACE.exists():
        pytest.skip("the public conversation trace is not beside this checkout (shared/traces)")
    result = run(read(TRACE, TOKENS), Setup(capacity_blocks=3_000))
    assert result.requests == 12_031
    assert result.usable_hit_rate >= 1.95 * LRU_RATE
    assert result.blocks_behind_hole == 0
    assert result.blocks_written <= 0.35 * LRU_WRITTEN


# -- the command ---------------------------------------------------------------------------------

FIELDS = {
    "requests", "blocks_asked", "blocks_hit_usable", "usable_hit_rate", "blocks_behind_hole",
    "blocks_written", "blocks_declined", "evicted", "nodes_per_load", "stored_skew", "read_skew",
    "hit_share_lost_on_node_loss", "lookups",
}  # fmt: skip


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "small.jsonl"
    rows = [
        {"timestamp": i * 9_000, "input_length": 512 * n, "hash_ids": [0, *range(k, k + n - 1)]}
        for i, (k, n) in enumerate([(100, 3), (200, 5), (100, 4), (300, 2), (100, 6), (200, 6)])
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_one_run_as_json(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--capacity-blocks", "8", "--nodes", "2", "--json", "--lose-node", "1@20"]
    assert main(["replay", str(trace), *arguments]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found.keys() >= FIELDS
    assert found["nodes_per_load"].keys() == {"mean", "p50", "p99"}
    assert found["hit_share_lost_on_node_loss"].keys() == {"mean", "worst"}
    assert found["lookups"].keys() >= {"exact_by_tip", "comparisons_mean"}
    assert (found["requests"], found["blocks_asked"], found["policy"]) == (6, 26, "return")
    assert found["lose"] == [1, 20.0]


def test_a_run_and_a_grid_for_people(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(trace), "--capacity-blocks", "8"]) == 0
    assert "usable_hit_rate" in capsys.readouterr().out
    assert main(["replay", str(trace), "--compare", "--capacity-blocks", "4,8"]) == 0
    out = capsys.readouterr().out
    assert len(re.findall(r"\breturn\b", out)) == len(re.findall(r"\blru\b", out)) == 2


def test_a_grid_as_json_and_as_a_page(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    page = tmp_path / "page.html"
    arguments = ["--compare", "--capacity-blocks", "4,8", "--policy", "return,lru", "--nodes", "2"]
    assert main(["replay", str(trace), *arguments, "--json", "--html", str(page)]) == 0
    found = json.loads(capsys.readouterr().out)
    asked = [(r["policy"], r["capacity_blocks"]) for r in found["runs"]]
    assert asked == [("return", 4), ("return", 8), ("lru", 4), ("lru", 8)]
    text = page.read_text()
    assert text.count("<svg") == text.count("</svg>") == 3
    for title in ("Hit rate against capacity", "Nodes per load", "Load per node", "All numbers"):
        assert title in text
    loaded = re.findall(r"<script|<link|<img|@import|\bsrc=|url\((?!#)|href=\"(?!#)", text)
    assert loaded == [], "nothing comes from elsewhere"
    ids = re.findall(r'<clipPath id="([^"]+)"', text)
    assert len(ids) == len(set(ids)), "plots don't share ids"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policy", "nonsense"], "policy"),
        (["--policy", "return,lru"], "--compare"),
        (["--capacity-blocks", "4,8"], "--compare"),
        (["--capacity-blocks", "3", "--nodes", "4"], "nodes"),
        (["--nodes", "2", "--lose-node", "2@5"], "lose-node"),
    ],
)
def test_options_that_make_no_sense_end_with_one_line(
    trace: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["replay", str(trace), *arguments]) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert printed.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [["--nodes", "0"], ["--end-hints", "2"], ["--lose-node", "1"], ["--lose-node", "x@3"],
     ["--capacity-blocks", "a"], ["--placement", "random"]],
)  # fmt: skip
def test_options_that_do_not_parse(trace: Path, arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["replay", str(trace), *arguments])
    assert stopped.value.code == 2
