"""Conversations between shim engines whose blocks lie on a real Mooncake."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from connector.ids import NodeId
from connector.meta import BlockOutcome
from engine_shim.api import RequestOptions
from engine_shim.protocol import SamplingParams
from engine_shim.validation import build_message
from store_worker.backends.base import PutItem
from store_worker.backends.mooncake_bulk import text_key
from store_worker.backends.mooncake_library import open_library
from store_worker.backends.mooncake_url import parse_mooncake_url
from store_worker.keys import parse_object_key
from tests.integration.conversation_kit import Fleet, Talk
from tests.mooncake.cluster import MooncakeCluster
from tests.servers import Server
from tests.waiting import eventually


@pytest.fixture
def index() -> Iterator[Server]:
    with Server() as server:
        yield server


def store_of(cluster: MooncakeCluster, index: Server) -> dict[str, str]:
    return {"index": index.url, "data": cluster.url}


def objects(cluster: MooncakeCluster) -> dict[str, list[str]]:
    """Every object and the segments that hold it, as the master says. Renews their leases."""
    found: dict[str, list[str]] = {}
    for name in {node for node, _ in cluster.objects()}:
        keys = [key for node, key in cluster.objects() if node == name]
        node = cluster.node(NodeId(name))
        for key, segments in node.where(keys, cluster.soon()).items():
            found[text_key(key, name)] = segments
        node.close()
    return found


@pytest.mark.parametrize("kind", ["model", "pattern"])
def test_turns_alternate_and_lie_at_home(
    own_cluster: MooncakeCluster, index: Server, kind: str
) -> None:
    with Fleet(store_of(own_cluster, index), kind == "pattern") as fleet:
        engines = [fleet.engine(), fleet.engine()]
        block = fleet.engine_config().block_size
        homes: Counter[str] = Counter()
        for number in range(4):
            before = set(objects(own_cluster))
            talk = Talk(fleet, f"s{number}", 5 * block + 3)
            for turn in range(3):
                answer = talk.turn(engines[turn % 2])
                if turn:
                    assert answer.loaded > 0
            new = {k: v for k, v in objects(own_cluster).items() if k not in before}
            assert len(new) >= 5
            # All of a conversation on one segment.
            [home] = {tuple(segments) for segments in new.values()}
            homes[home[0]] += 1
        assert set(homes) <= set(own_cluster.names)


def test_a_lost_owner_costs_its_sessions_only_a_recompute(
    own_cluster: MooncakeCluster, index: Server
) -> None:
    deadlines = {"load_deadline_s": 3.0, "save_deadline_s": 3.0, "object_ttl_s": 60.0}
    with Fleet(store_of(own_cluster, index), **deadlines) as fleet:
        engines = [fleet.engine(), fleet.engine()]
        talks = [Talk(fleet, f"s{number}", 23) for number in range(6)]
        for talk in talks:
            talk.turn(engines[0])
        own_cluster.owners[0].kill()
        # `turn` compares the text with that of an engine without a store, and has a deadline.
        loaded = [talk.turn(engines[1], must_hit=False).loaded for talk in talks]
        assert any(loaded), "sessions at home on the other segment still load"
        assert not all(loaded), "somebody was at home on the lost one"
        # Once the index knows, new blocks go elsewhere, and the next turns find all of them.
        is_up = f"gauge:node_up{{node={own_cluster.names[0]}}}"
        eventually(lambda: engines[0].counters().get(is_up) == 0, 20.0, "the node to be down")
        for talk in talks:
            talk.turn(engines[0], must_hit=False)
        after = [talk.turn(engines[1], must_hit=False).cached for talk in talks]
        assert all(after)
        assert {home for homes in objects(own_cluster).values() for home in homes} == {
            own_cluster.names[1]
        }


def test_what_mooncake_evicted_is_recomputed(own_cluster: MooncakeCluster, index: Server) -> None:
    with Fleet(store_of(own_cluster, index)) as fleet:
        engines = [fleet.engine(), fleet.engine()]
        talk = Talk(fleet, "s", 41)
        talk.turn(engines[0])
        # Behind everybody's back, as its own eviction does.
        bare = open_library(parse_mooncake_url(own_cluster.url))
        keys = list(objects(own_cluster))
        assert keys and not any(bare.batch_remove(keys, True))
        assert talk.turn(engines[1], must_hit=False).loaded == 0
        # What was recomputed is stored again, once the index is done with what was lost.
        talk.turn(engines[0], must_hit=False)
        talk.turn(engines[1])


def pin_hint(talk: Talk) -> dict[str, Any]:
    action = {
        "action_id": "a", "action_type": "pin", "action_version": "1", "payload": {"ttl_s": 600},
    }  # fmt: skip
    return {"kv_hints": {"protocol_version": "1", "message_id": talk.seed, "actions": [action]}}


def flood_until_gone(cluster: MooncakeCluster, keys: list[bytes]) -> None:
    """Write objects of 1 MiB that nobody reads again, until these are evicted."""
    node, numbers = cluster.node(), itertools.count()
    page = memoryview(random.Random(1).randbytes(1 << 20))

    def gone() -> bool:
        items = [PutItem(b"flood%d" % next(numbers), [page[:112], page]) for _ in range(6)]
        assert node.put(items, 60_000, cluster.soon()) == [BlockOutcome.OK] * 6
        return not {key for _, key in cluster.objects()} & set(keys)

    eventually(gone, 60.0, "the eviction", again_s=0.02)
    node.close()


def test_a_pinned_conversation_outlives_the_flood(index: Server) -> None:
    """By the hint: what was stored before it, and the turn after it."""
    with MooncakeCluster((64 << 20,)) as cluster, Fleet(store_of(cluster, index)) as fleet:
        shim = fleet.engine()
        pinned, plain = Talk(fleet, "pinned", 23), Talk(fleet, "plain", 23)
        for talk in (plain, pinned):
            talk.turn(shim)
        options = RequestOptions(session_id="pinned", kv_transfer_params=pin_hint(pinned))
        params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
        shim.add(build_message(pinned.history, params, options, "hint", 0.0))
        shim.run_all()
        assert shim.counters()["hints_pin{outcome=accepted}"] == 1
        for talk in (plain, pinned):
            talk.turn(shim)
        eventually(lambda: fleet.index().stats()["grants"] == 0, 10.0, "all commits")
        keys = {hash: key for _, key in cluster.objects() if (hash := parse_object_key(key).hash)}
        chains = [[keys[h] for h in fleet.chain(t.history) if h in keys] for t in (plain, pinned)]
        assert len(chains[0]) > 5 and len(chains[1]) > 5
        flood_until_gone(cluster, chains[0])
        assert set(chains[1]) <= {key for _, key in cluster.objects()}
