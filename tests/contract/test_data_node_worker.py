"""A worker with its threads on real servers that are killed, stopped, full, or not there."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from connector.clock import SystemClock
from connector.ids import NodeId
from connector.meta import JobResult, Placed
from store_worker.backends.factory import node_id
from store_worker.worker import StoreWorker
from tests.contract.data_node_kit import node_config
from tests.contract.scripted_server import ScriptedServer
from tests.servers import Server
from tests.unit.worker_kit import FAILED, MISSING, OK, TIMED_OUT, Rig, names
from tests.waiting import eventually

CLOCK = SystemClock()


class Remote(Rig):
    """A rig whose nodes are servers' URLs."""

    def __init__(self, urls: list[str], **keys: object) -> None:
        super().__init__(inline=False, clock=CLOCK)
        self.worker.close(5.0)
        self.nodes = [node_id(url) for url in urls]
        self.config = node_config(urls[0], **keys)
        by_name: dict[NodeId, str] = dict(zip(self.nodes, urls, strict=True))
        self.worker = StoreWorker(self.config, 0, self.cache, CLOCK, by_name)

    def one(self) -> JobResult:
        [result] = self.results(1)
        return result


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        yield running


def test_saved_pages_come_back(server: Server) -> None:
    rig = Remote([server.url])
    rig.stored(range(20), 5)
    rig.load(range(40, 60), 5)
    assert rig.outcomes() == [OK] * 20
    assert all(rig.holds(40 + i, 5 + i) for i in range(20))
    assert rig.worker.close(5.0)


def test_two_workers_share_a_node(server: Server) -> None:
    one, two = Remote([server.url]), Remote([server.url])
    one.stored(range(5))
    two.load(range(7, 12))
    assert two.outcomes() == [OK] * 5
    assert all(two.holds(7 + i, i) for i in range(5))
    assert one.worker.close(5.0) and two.worker.close(5.0)


def test_a_killed_server_and_its_empty_return(server: Server) -> None:
    """The worker is not restarted: it finds the server again by itself."""
    rig = Remote([server.url])
    rig.stored(range(4))
    server.kill()
    for _ in range(3):
        rig.load(range(20, 24))
        assert rig.outcomes() == [FAILED] * 4
    server.start()

    def back() -> bool:
        rig.load(range(20, 24))
        found = rig.outcomes()
        assert found in ([FAILED] * 4, [MISSING] * 4)
        return found == [MISSING] * 4

    eventually(back, 20.0, "the node to be used again")
    rig.stored(range(4))
    rig.load(range(20, 24))
    assert rig.outcomes() == [OK] * 4
    assert rig.worker.close(5.0)


def test_a_load_does_not_outlive_its_deadline_on_a_stopped_server(server: Server) -> None:
    rig = Remote([server.url], connect_timeout_s=0.3)
    rig.stored(range(4))
    rig.load(range(20, 24))
    assert rig.outcomes() == [OK] * 4
    server.pause()
    rig.load(range(20, 24), deadline_s=0.3)
    first = rig.one()
    assert names(first.outcomes) == [TIMED_OUT] * 4 and first.seconds < 5
    rig.load(range(20, 24))
    second = rig.one()
    assert names(second.outcomes) == [FAILED] * 4 and second.seconds < 4, "one connect timeout"
    rig.load(range(20, 24))
    third = rig.one()
    assert names(third.outcomes) == [FAILED] * 4 and third.seconds < 0.3, "told at once"
    server.resume()

    def back() -> bool:
        rig.load(range(20, 24))
        return rig.outcomes() == [OK] * 4

    eventually(back, 20.0, "the node to be used again")
    assert rig.worker.close(5.0)


def test_fault_50_a_node_that_never_answers_delays_nobody_else(server: Server) -> None:
    with ScriptedServer(None) as silent:
        rig = Remote([server.url, silent.url], connect_timeout_s=0.2)
        rig.stored(range(4))
        placed = [Placed(rig.nodes[0], 2), Placed(rig.nodes[1], 2)]
        rig.load(range(20, 24), placed=placed)
        assert rig.outcomes() == [OK, OK, FAILED, FAILED]
        for _ in range(20):
            rig.load(range(20, 24), placed=placed)
        results = rig.results(20)
        assert {r.outcomes for r in results} == {bytes([OK, OK, FAILED, FAILED])}
        assert silent.accepted <= 5
        assert rig.worker.close(5.0)


def test_close_breaks_a_load_that_is_stuck(server: Server) -> None:
    rig = Remote([server.url])
    rig.stored(range(4))
    rig.load(range(20, 24))
    assert rig.outcomes() == [OK] * 4
    server.pause()
    rig.load(range(20, 24), deadline_s=60.0)
    rig.save(range(4), deadline_s=60.0)
    assert rig.worker.close(2.0)
    results = rig.worker.poll().results
    assert len(results) == 2 and rig.worker.pending() == 0
    assert all(OK not in names(r.outcomes) for r in results)
    server.resume()


def test_no_server_at_all() -> None:
    with Server() as gone:
        url = gone.url
    rig = Remote([url])
    rig.save(range(3))
    assert rig.outcomes() == [FAILED] * 3
    assert rig.worker.close(5.0)


@pytest.mark.parametrize("seed", range(4))
def test_servers_that_come_and_go(seed: int) -> None:
    """Two servers, random saves and loads, one of them killed, stopped or started now and then."""
    print(f"seed {seed}")
    chance = random.Random(seed)
    with Server() as one, Server() as two:
        rig = Remote([one.url, two.url], connect_timeout_s=0.2)
        rig.fill(range(32), 0)
        jobs: dict[int, range] = {}
        state = "up"
        for step in range(60):
            first, count = chance.randint(0, 20), chance.randint(1, 12)
            half = count // 2
            placed = [Placed(rig.nodes[0], half), Placed(rig.nodes[1], count - half)]
            if chance.random() < 0.5:
                rig.save(range(first, first + count), first, placed=placed, deadline_s=0.5)
            else:
                # Each load has one page of its own half, so that no two share any.
                page = 32 + len(jobs) % 32
                near = [Placed(rig.nodes[chance.randint(0, 1)], 1)]
                job = rig.load([page], first, placed=near, deadline_s=0.5)
                jobs[job] = range(first, first + 1)
            if step % 12 == 5:
                state = chance.choice(["killed", "stopped"])
                two.kill() if state == "killed" else two.pause()
            if step % 12 == 11:
                two.start() if state == "killed" else two.resume()
            if len(jobs) == 32:
                break
        seen: list[JobResult] = []
        eventually(lambda: seen.extend(rig.worker.poll().results) or not rig.worker.pending(), 60.0)
        assert len({r.job for r in seen}) == len(seen) >= len(jobs)
        good = [r for r in seen if r.job in jobs and names(r.outcomes) == [OK]]
        assert good, "nothing was loaded at all"
        assert all(rig.holds(r.blocks[0], jobs[r.job][0]) for r in good)
        assert all(rig.holds(block, block) for block in range(32))
        assert rig.worker.close(10.0)
        if state == "stopped":
            two.resume()
