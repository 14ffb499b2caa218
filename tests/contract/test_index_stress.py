"""Two hundred threads in several processes on one index, some killed at any point.

Afterwards the index is sound, nothing is promised or dying any more, and the objects on the nodes
are the listed blocks: no byte is lost for ever.
"""

from __future__ import annotations

import random
import subprocess
import sys

import pytest

from connector.ids import NodeId
from store_worker.index.redis import RedisIndex
from store_worker.index.snapshot import read_state
from tests.index_stress import BLOCK, GRANT_S, NODE_BLOCKS, NODES, Worker, object_name
from tests.servers import Server
from tests.waiting import eventually

PROCESSES, THREADS, STEPS = 5, 40, 40
SEED = 7


def start(url: str, number: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.index_stress", url, f"{SEED}.{number}"]
    command += [str(THREADS), str(STEPS)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@pytest.mark.slow
def test_integrity_holds_and_no_byte_is_lost() -> None:
    random_ = random.Random(SEED)
    with Server(tcp=True) as server, server.client() as client:
        index = RedisIndex(server.url)
        index.identity()
        for node in NODES:
            index.register_node(node, b"inc", NODE_BLOCKS * BLOCK)
        running = [start(server.url, n) for n in range(PROCESSES)]
        for process in running:
            assert process.stdout is not None and process.stdout.readline() == b"started\n"
        for process in running[:2]:
            # Killed in the middle: after some, but not all, of its commits.
            before = index.stats().get("commit_ok", 0)
            more = random_.randint(20, 40)
            eventually(lambda b=before, m=more: index.stats().get("commit_ok", 0) >= b + m, 60.0)
            process.kill()
        for process in running:
            _, errors = process.communicate(timeout=100)
            assert process in running[:2] or process.returncode == 0, errors.decode()
        assert index.stats()["commit_ok"] > 150, index.stats()
        assert index.check_integrity() == []
        settle(Worker(server.url, "last"))
        assert index.check_integrity() == []
        state = read_state(client)
        for node in index.nodes():
            listed = {
                object_name(node.node, block)
                for blocks in state.entries.values()
                for block, (run, depth) in blocks.items()
                if on_node(state.runs[run], depth, state.nodes[node.node].idx)
            }
            there = set(client.scan_iter(match=b"obj:%s:*" % node.node.encode(), count=1000))
            # Written after its grant had expired, and never committed: gone in ten minutes.
            late = {name for name in there - listed if client.pttl(name) > 0}
            assert there - listed - late == set(), "orphans"
            assert listed - there == set(), "listed, but not there"


def on_node(run: object, depth: int, idx: int) -> bool:
    return run.node == idx or any(c.node == idx and c.upto >= depth for c in run.copies)  # type: ignore[attr-defined]


def settle(worker: Worker) -> None:
    """Housekeeping until what the killed ones left has expired and is deleted; room for copies
    that they did not make comes back later."""

    def quiet() -> bool:
        for node in NODES:
            worker.delete(worker.index.dying(NodeId(node)))
        copies = sum(size for size, _, _ in read_state(worker.client).copying.values())
        nodes = worker.index.nodes()
        return sum(n.granted for n in nodes) == copies and not any(n.dying for n in nodes)

    eventually(quiet, 4 * GRANT_S + 30, "grants to expire and victims to be deleted", 0.2)


def test_the_stress_worker_notices_a_failure() -> None:
    """Its exit code is what the test above relies on."""
    with Server(tcp=True) as server:
        command = [sys.executable, "-m", "tests.index_stress", server.url, "1", "2", "3"]
        with server.client() as client:
            client.set("{skv}:m", "not a hash")
        done = subprocess.run(command, capture_output=True, timeout=60, check=False)
        assert done.returncode == 1 and b"WRONGTYPE" in done.stderr
