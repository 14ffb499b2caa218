"""What the calls to Mooncake's library do: each function is the work of one `Call`.

An object is named by its text key and described by a `Shape`: where its bytes lie in memory. All
functions return one number per object, see `mooncake_codes`. Thread: a call thread.

A put is a session: room is reserved, the bytes are sent, and only then is the object made readable.
So a put that nobody waits for any more is revoked, and bytes that were read from a cache page after
its deadline are never seen by anyone.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from store_worker.backends.mooncake_calls import Asked
from store_worker.backends.mooncake_codes import Meaning, MooncakeCode, meaning
from store_worker.backends.mooncake_library import Library

LOOK_AGAIN_S = 0.01
ROOM_WAIT_S = 0.5
"""A put without room waits this long for the master's eviction, which takes some 10 ms."""

WRITER_WAIT_S = 1.0
"""How long a put or a get waits for somebody else who is writing the same object."""

EXPIRED_WAIT_S = 0.5
"""A read that took longer than the lease is done again for so long."""

WRONG_SIZE = -1_000_000
"""Not one of the library's codes: the object has another length than was asked for."""

DIFFERENT = -1_000_001
"""Not one of the library's codes: there is an object under this key with other bytes."""


class Shape(NamedTuple):
    """An object's bytes in memory, in order: addresses and lengths of its slices.

    head: the first `head_bytes` bytes again, in memory that may be overwritten once the object is
    known to exist. They tell two objects of one size apart.
    """

    ptrs: list[int]
    sizes: list[int]
    total: int
    head: int = 0
    head_bytes: int = 0

    @property
    def offsets(self) -> list[int]:
        """Where each slice lies within the object."""
        found, at = [], 0
        for size in self.sizes:
            found.append(at)
            at += size
        return found


def settle(
    codes: list[int], what: Meaning, limit_s: float, asked: Asked,
    again: Callable[[list[int]], list[int]],
) -> None:
    """Ask again for the objects whose code means `what`, until none does or the time is over."""
    waited_s, pause_s = 0.0, LOOK_AGAIN_S
    while True:
        open_ = [i for i, code in enumerate(codes) if meaning(code) is what]
        if not open_ or waited_s >= min(limit_s, asked.left_s()) or asked.pause(pause_s):
            return
        waited_s += pause_s
        pause_s *= 2
        for index, code in zip(open_, again(open_), strict=True):
            codes[index] = code


def put_objects(
    library: Library, asked: Asked, keys: Sequence[str], shapes: Sequence[Shape],
    config: Callable[[Sequence[int]], Any],
) -> list[int]:
    """Write objects. config: how those with these indices are to be placed.

    An object that is there already, with the same length and head, is done; with others it is
    DIFFERENT. One that somebody else is writing is waited for.
    """

    def start(some: Sequence[int]) -> list[int]:
        names = [keys[i] for i in some]
        return library.batch_put_session_start(
            names, [shapes[i].total for i in some], config(some)
        )

    everything = list(range(len(keys)))
    codes = start(everything)
    settle(codes, Meaning.FULL, ROOM_WAIT_S, asked, start)
    ready = [i for i in everything if meaning(codes[i]) is Meaning.DONE]
    if ready:
        for index, code in zip(ready, _send(library, asked, keys, shapes, ready), strict=True):
            codes[index] = code
    # Refused: perhaps because another thread of this process is writing the same object.
    there = [i for i in everything if meaning(codes[i]) in (Meaning.EXISTS, Meaning.REFUSED)]
    if there:
        names, held = [keys[i] for i in there], [shapes[i] for i in there]
        for index, code in zip(there, compare(library, asked, names, held), strict=True):
            codes[index] = code
    return codes


def _send(
    library: Library, asked: Asked, keys: Sequence[str], shapes: Sequence[Shape],
    ready: Sequence[int],
) -> list[int]:
    """The bytes of objects whose room is reserved; each session is ended or revoked."""
    names = [keys[i] for i in ready]
    good: list[str] = []
    codes = [int(MooncakeCode.INTERNAL_ERROR)] * len(ready)
    try:
        moved = library.batch_put_from_multi_buffer_ranges(
            names,
            [shapes[i].ptrs for i in ready],
            [shapes[i].sizes for i in ready],
            [shapes[i].offsets for i in ready],
        )
        # The caller has left: what was read since may be another block's content by now.
        if asked.abandoned:
            return codes
        whole = [n == shapes[i].total for n, i in zip(moved, ready, strict=True)]
        codes = [
            n if n < 0 else int(MooncakeCode.OK if ok else MooncakeCode.TRANSFER_FAIL)
            for n, ok in zip(moved, whole, strict=True)
        ]
        good = [name for name, ok in zip(names, whole, strict=True) if ok]
        ended = dict(zip(good, library.batch_put_session_end(good) if good else (), strict=True))
        good = [name for name, code in ended.items() if code >= 0]
        return [ended.get(name, code) for name, code in zip(names, codes, strict=True)]
    finally:
        bad = sorted(set(names) - set(good))
        if bad:
            library.batch_put_session_revoke(bad)


def compare(
    library: Library, asked: Asked, keys: Sequence[str], shapes: Sequence[Shape]
) -> list[int]:
    """Objects that are there or being written: 0 if they are the ones meant, else DIFFERENT.
    Overwrites the shapes' heads with what is stored."""
    mine = [ctypes.string_at(shape.head, shape.head_bytes) for shape in shapes]

    def look(some: Sequence[int]) -> list[int]:
        heads = [(shapes[i].head, shapes[i].head_bytes) for i in some]
        found = library.get_into_ranges(
            [address for address, _ in heads],
            [[keys[i]] for i in some],
            [[[0]]] * len(heads),
            [[[0]]] * len(heads),
            [[[size]] for _, size in heads],
        )
        return [code for [[code]] in found]

    everything = list(range(len(keys)))
    codes = look(everything)
    settle(codes, Meaning.UNFINISHED, WRITER_WAIT_S, asked, look)
    sizes = sizes_of(library, keys)
    for index, (code, ours, shape) in enumerate(zip(codes, mine, shapes, strict=True)):
        # What is shorter than our head can't be read: the library says that it is refused.
        if keys[index] in sizes and meaning(code) in (Meaning.DONE, Meaning.REFUSED):
            stored = ctypes.string_at(shape.head, shape.head_bytes)
            same = sizes[keys[index]] == shape.total and code >= 0 and stored == ours
            codes[index] = int(MooncakeCode.OK) if same else DIFFERENT
    return codes


def replace_objects(
    library: Library, keys: Sequence[str], shapes: Sequence[Shape], config: Any
) -> list[int]:
    """Overwrite objects, or write them. Every shape is one slice."""
    return library.batch_upsert_from(
        list(keys), [shape.ptrs[0] for shape in shapes], [shape.total for shape in shapes], config
    )


def pin_object(
    library: Library, asked: Asked, key: str, shape: Shape, config: Any
) -> int:
    """Write an object again as it is, through staging memory of one slice: only then is a pin
    taken. Readers find it unfinished for a moment, and wait."""
    [got] = library.batch_get_into_multi_buffers([key], [shape.ptrs], [shape.sizes])
    if got != shape.total or asked.abandoned:
        return got if got < 0 else WRONG_SIZE
    return replace_objects(library, [key], [shape], config)[0]


def get_objects(
    library: Library, asked: Asked, keys: Sequence[str], shapes: Sequence[Shape]
) -> list[int]:
    """Read objects into memory; WRONG_SIZE for those of another length."""

    def read(some: Sequence[int]) -> list[int]:
        return library.batch_get_into_multi_buffers(
            [keys[i] for i in some], [shapes[i].ptrs for i in some], [shapes[i].sizes for i in some]
        )

    codes = read(range(len(keys)))
    settle(codes, Meaning.UNFINISHED, WRITER_WAIT_S, asked, read)
    settle(codes, Meaning.EXPIRED, EXPIRED_WAIT_S, asked, read)
    # The library says the same of a buffer that does not fit as of a peer that is gone.
    failed = [
        i for i, code in enumerate(codes) if meaning(code) in (Meaning.SEGMENT, Meaning.REFUSED)
    ]
    if failed and not asked.abandoned:
        sizes = sizes_of(library, [keys[i] for i in failed])
        for index in failed:
            if sizes.get(keys[index], shapes[index].total) != shapes[index].total:
                codes[index] = WRONG_SIZE
    return [
        code if code < 0 or code == shape.total else WRONG_SIZE
        for code, shape in zip(codes, shapes, strict=True)
    ]


def remove(library: Library, keys: Sequence[str]) -> list[int]:
    """Remove what may be removed."""
    return library.batch_remove(list(keys)) if keys else []


def exist(library: Library, keys: Sequence[str]) -> list[int]:
    """1 where there is a finished object; it is leased by that."""
    return library.batch_is_exist(list(keys))


def sizes_of(library: Library, keys: Sequence[str]) -> dict[str, int]:
    """Lengths of the objects that are there, by the master's account."""
    return {
        key: memory_of(replicas[0]).size
        for key, replicas in library.batch_get_replica_desc(list(keys)).items()
        if replicas and replicas[0].is_memory_replica()
    }


def segments_of(library: Library, keys: Sequence[str]) -> dict[str, list[str]]:
    """Which segments hold the objects that are there, by the master's account."""
    return {
        key: [memory_of(r).transport_endpoint for r in replicas if r.is_memory_replica()]
        for key, replicas in library.batch_get_replica_desc(list(keys)).items()
    }


def memory_of(replica: Any) -> Any:
    """Size, address and segment of a replica in memory."""
    return replica.get_memory_descriptor().buffer_descriptor
