"""Two vLLM servers on an index and two Redis data nodes, each a process of its own; one node is
killed in mid-run. A server without a connector says what is right.

One story: conversations that have had two turns (`talks`), the loss of a node while some of them go
on (`loss`), what each of them has afterwards. Every turn is for the server that did not have the
one before: what a hit needs was computed by the other one, so that it comes from the store.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from connector.ids import NodeId
from store_worker.backends.factory import node_id
from tests.servers import Server
from tests.vllm.dialogs import (
    Dialog,
    Reference,
    Reply,
    SharedStore,
    StoreView,
    assert_cached,
    chat,
    client_of,
    follow,
)
from tests.vllm.servers import ROOT, TOKENS_PER_BLOCK, Spec, running, transfer_config
from tests.waiting import eventually

pytestmark = pytest.mark.timeout(400)
# What is tested is what happens, not how fast: the machine may be busy.
PATIENT = {
    "lookup_deadline_s": 20.0, "index_timeout_s": 20.0, "load_deadline_s": 20.0,
    "cost_model": False,
}  # fmt: skip
TURNS, WORDS = 5, 30
HELD_BEFORE = 2
TALKS_PER_HOME = 3
TALKS_MAX = 24
VERIFY_DEADLINE_S = 60.0


@dataclass(kw_only=True)
class Rig(SharedStore):
    """The two servers, a client of each, the index and the data nodes by their names."""

    index: Server
    nodes: dict[NodeId, Server]
    settle_s: float = 30

    def objects(self, name: NodeId) -> set[bytes]:
        """Keys of the objects that lie on a node, as the node itself lists them."""
        with self.nodes[name].client() as client:
            return set(client.scan_iter(match="skvo:*", count=1000))

    def loading(self) -> int:
        """How many requests wait for a load that is under way."""
        lines = [x for s in self.servers for x in s.metric_lines(',stage="in_progress"}')]
        return round(sum(float(x.rpartition(" ")[2]) for x in lines))

    def verify(self, *data: NodeId) -> tuple[int, dict[str, Any]]:
        """Exit code and report of `session-kv verify`, of a store with these data nodes."""
        store = {"index": self.index.tcp_url, "data": [self.nodes[n].tcp_url for n in data]}
        done = subprocess.run(
            [sys.executable, "-m", "store_worker.cli.main", "verify", "--json",
             "--store", json.dumps(store)],
            capture_output=True, text=True, timeout=VERIFY_DEADLINE_S, check=False, cwd=ROOT,
        )  # fmt: skip
        assert done.stdout, done.stderr
        return done.returncode, json.loads(done.stdout)


@dataclass
class Talk:
    """A conversation under way. objects: the keys that its turns so far have put into the store."""

    rig: Rig
    session: str
    dialog: Dialog
    replies: list[Reply] = field(default_factory=list)
    home: NodeId | None = None
    objects: frozenset[bytes] = frozenset()

    def say(self, number: int, server: int) -> Reply:
        """One turn on a server, whose text must be the reference's."""
        turn = self.dialog.turns[number]
        client = self.rig.clients[server % 2]
        reply = chat(client, turn.messages, self.session, tokens=len(turn.reply.text))
        assert reply.text == turn.reply.text, f"turn {number + 1} of {self.session}"
        return reply

    def next(self) -> Reply:
        """The next turn, on the server that did not have the last one."""
        number = len(self.replies)
        self.replies.append(self.say(number, number))
        return self.replies[-1]

    def again(self) -> Reply:
        """The last turn once more, on the server that has not had it and with nothing cached."""
        self.rig.reset_local()
        return self.say(len(self.replies) - 1, len(self.replies))

    def wait_saved(self) -> None:
        """Until all that the next turn needs is committed."""
        blocks = self.dialog.need(len(self.replies)) // TOKENS_PER_BLOCK
        self.rig.view.wait_for(self.session, blocks)

    def need(self) -> int:
        """Tokens that the last turn must have had from a cache."""
        return self.dialog.need(len(self.replies) - 1)

    def assert_hit(self) -> None:
        cached = self.replies[-1].cached_tokens
        what = f"turn {len(self.replies)} of {self.session}, {self.rig.troubles()}"
        assert cached >= self.need() > 0, what


@pytest.fixture(scope="module")
def rig(reference: Reference) -> Iterator[Rig]:
    with contextlib.ExitStack() as stack:
        index = stack.enter_context(Server(tcp=True))
        nodes = [stack.enter_context(Server(memory="1gb", tcp=True)) for _ in range(2)]
        store = {"index": index.tcp_url, "data": [node.tcp_url for node in nodes]}
        transfer = transfer_config(store, **PATIENT)
        servers = stack.enter_context(running(*(Spec(name, transfer) for name in "ab")))
        clients = [stack.enter_context(client_of(server)) for server in servers]
        names = {node_id(node.tcp_url): node for node in nodes}
        view = StoreView(index.tcp_url, servers)
        yield Rig(index=index, nodes=names, servers=servers, clients=clients, view=view)


def dialogs(reference: Reference) -> Iterator[Dialog]:
    """As many as are asked for; the reference makes several at once, which is faster."""
    step = 2 * TALKS_PER_HOME
    with concurrent.futures.ThreadPoolExecutor(step) as threads:
        for start in range(0, TALKS_MAX, step):
            seeds = range(9500 + start, 9500 + start + step)
            yield from threads.map(lambda seed: reference.dialog(seed, TURNS, WORDS), seeds)


@pytest.fixture(scope="module")
def talks(rig: Rig, reference: Reference) -> dict[NodeId, list[Talk]]:
    """By home: conversations that have had their first turns, all of which is committed."""
    found: dict[NodeId, list[Talk]] = {name: [] for name in rig.nodes}
    for number, dialog in enumerate(dialogs(reference)):
        before = {name: rig.objects(name) for name in rig.nodes}
        talk = Talk(rig, f"talk-{number}", dialog)
        for _ in range(HELD_BEFORE):
            talk.next()
            talk.wait_saved()
        talk.home = rig.home(talk.session)
        new = {name: rig.objects(name) - before[name] for name in rig.nodes}
        talk.objects = frozenset(new.pop(talk.home))
        elsewhere = sum(map(len, new.values()))
        assert not elsewhere, f"{elsewhere} objects of {talk.session} are not on its home"
        found[talk.home].append(talk)
        if min(map(len, found.values())) >= TALKS_PER_HOME:
            return found
    raise AssertionError(f"{TALKS_MAX} talks, at home: {[*map(len, found.values())]}")


@dataclass
class Loss:
    """A node was killed. busy: talks that went on meanwhile, quiet: one that did not, by home."""

    lost: NodeId
    kept: NodeId
    busy: dict[NodeId, list[Talk]]
    quiet: dict[NodeId, Talk]


@pytest.fixture(scope="module")
def loss(rig: Rig, talks: dict[NodeId, list[Talk]]) -> Loss:
    """Kill a node in the midst of loads; every busy talk has two more turns meanwhile."""
    lost, kept = rig.nodes
    busy = {name: theirs[1:TALKS_PER_HOME] for name, theirs in talks.items()}
    rig.reset_local()
    jobs: list[concurrent.futures.Future[None]] = []

    def go_on(talk: Talk) -> None:
        talk.next()
        if talk.home == kept:
            talk.wait_saved()
        talk.next()

    def all_under_way() -> bool:
        """Every job loads. Or is over: a node that is paused for seconds is down to the index."""
        return rig.loading() + sum(job.done() for job in jobs) >= len(jobs)

    rig.nodes[lost].pause()  # or its loads might be over before it is killed
    with concurrent.futures.ThreadPoolExecutor(2 * TALKS_PER_HOME) as threads:
        try:
            # In this order: the other node's loads wait behind those that will break.
            for name in (lost, kept):
                jobs += [threads.submit(go_on, talk) for talk in busy[name]]
                eventually(all_under_way, 60, f"loads of talks at home on {name}", 0.02)
        finally:
            rig.nodes[lost].kill()
        for job in jobs:
            job.result()
    return Loss(lost, kept, busy, {name: theirs[0] for name, theirs in talks.items()})


def test_each_conversation_lies_on_its_home(rig: Rig, talks: dict[NodeId, list[Talk]]) -> None:
    for name, theirs in talks.items():
        for talk in theirs:
            assert talk.home == name
            assert len(talk.objects) >= talk.dialog.need(HELD_BEFORE) // TOKENS_PER_BLOCK > 1
            assert_cached(talk.dialog, talk.replies)


def test_the_other_nodes_conversations_keep_their_hits(rig: Rig, loss: Loss) -> None:
    """Every turn: those during which the node was killed, and those after it."""
    for talk in loss.busy[loss.kept]:
        assert_cached(talk.dialog, talk.replies)
    quiet = loss.quiet[loss.kept]
    rig.reset_local()
    while len(quiet.replies) < TURNS:
        quiet.wait_saved()
        quiet.next()
        quiet.assert_hit()
    assert rig.home(quiet.session) == loss.kept


def test_what_lay_on_the_lost_node_is_computed_again(rig: Rig, loss: Loss) -> None:
    """The control: without its node a conversation has no hit."""
    for talk in loss.busy[loss.lost]:
        assert talk.replies[HELD_BEFORE].cached_tokens < talk.dialog.need(HELD_BEFORE)
    rig.reset_local()
    assert loss.quiet[loss.lost].next().cached_tokens == 0


def test_conversations_of_the_lost_node_hit_again(rig: Rig, loss: Loss) -> None:
    """From the node that is left, where all their blocks lie now."""
    for talk in [*loss.busy[loss.lost], loss.quiet[loss.lost]]:
        eventually(
            lambda talk=talk: talk.again().cached_tokens >= talk.need() > 0,
            30, f"a hit of {talk.session} after the loss", again_s=0.2,
        )  # fmt: skip
        while len(talk.replies) < TURNS:
            talk.wait_saved()
            talk.next()
            talk.assert_hit()
        # A key names what is in the object, not where it lies.
        assert talk.objects <= rig.objects(loss.kept)
        assert rig.home(talk.session) == loss.kept


def test_a_new_conversation_lies_on_the_node_that_is_left(
    rig: Rig, loss: Loss, reference: Reference
) -> None:
    dialog = reference.dialog(9600, 3, WORDS)
    assert_cached(dialog, follow(rig.clients, dialog, "fresh", rig.view))
    assert rig.home("fresh") == loss.kept


def test_verify_is_clean(rig: Rig, loss: Loss) -> None:
    """Of the node that is left at once; of the whole store when the lost one is back, empty."""

    def only_lost() -> bool:
        code, report = rig.verify(loss.lost, loss.kept)
        assert (code, report["ok"], report["unreachable"]) == (1, False, [loss.lost])
        # The janitor takes expiries off a little after the commits.
        (node,) = report["nodes"]
        wrong = [node[what] for what in ("orphans", "missing", "wrong_size", "expiring")]
        return not report["index"] and not any(wrong)

    eventually(only_lost, 30, "nothing to be wrong but the node that is away")
    code, report = rig.verify(loss.kept)
    assert (code, report["ok"]) == (0, True), report
    assert report["nodes"][0]["objects"] > 100
    rig.nodes[loss.lost].start()
    eventually(lambda: rig.verify(loss.lost, loss.kept)[0] == 0, 30, "the store to be whole")


def test_nothing_failed_and_nothing_is_held(rig: Rig) -> None:
    rig.reset_local()
    for server in rig.servers:
        assert server.idle() and server.exit_code() is None
        log = server.log()
        assert "Traceback" not in log, log[log.index("Traceback") - 500 :][:3000]
