"""What the numbers mean that Mooncake's library returns.

Each call gives one number per object: 0 or a size is success, a negative number is one of
`MooncakeCode`. What follows from it is its `Meaning`. Pure functions; any thread.
"""

from __future__ import annotations

import enum

from connector.meta import BlockOutcome


class MooncakeCode(enum.IntEnum):
    """The codes that a store client can meet; seen on real servers unless it says otherwise."""

    OK = 0
    INTERNAL_ERROR = -1  # also: `setup` did not reach the master
    BUFFER_OVERFLOW = -10  # not seen
    SEGMENT_NOT_FOUND = -101  # no segment is mounted at all
    CLIENT_NOT_FOUND = -103  # the master has forgotten this client (it was restarted)
    NO_AVAILABLE_HANDLE = -200  # no room; eviction has been set off
    INVALID_KEY = -400  # not seen
    WRITE_FAIL = -500  # not seen
    INVALID_PARAMS = -600  # a buffer smaller than the object; a pin that is too long; misuse
    ILLEGAL_CLIENT = -601  # not seen
    INVALID_WRITE = -700  # not seen
    INVALID_READ = -701  # not seen
    INVALID_REPLICA = -702  # no replica in memory
    REPLICA_IS_NOT_READY = -703  # somebody is writing the object
    OBJECT_NOT_FOUND = -704  # never written, removed, evicted, or its segment is gone
    OBJECT_ALREADY_EXISTS = -705  # written, or being written, by somebody else
    OBJECT_HAS_LEASE = -706  # read, or asked for, a moment ago: can't be removed yet
    LEASE_EXPIRED = -707  # the read took longer than the lease: the bytes can't be trusted
    OBJECT_HAS_REPLICATION_TASK = -708  # being copied: can't be removed yet
    REPLICA_NOT_FOUND = -710  # not seen
    REPLICA_ALREADY_EXISTS = -711  # not seen
    REPLICA_IS_GONE = -712  # not seen
    OBJECT_REPLICA_BUSY = -714  # in use: can't be removed yet (not seen)
    TRANSFER_FAIL = -800  # the segment's owner is gone or does not answer; or sizes differ
    CHECKSUM_MISMATCH = -801  # not seen
    RPC_FAIL = -900  # the master is gone
    RPC_TIMEOUT = -901  # the master does not answer
    UNAVAILABLE_IN_CURRENT_STATUS = -1010  # a master that is not (yet) the leader (not seen)


class Meaning(enum.Enum):
    """What a code says about the world."""

    DONE = "done"
    GONE = "gone"  # there is no such object (any more)
    UNFINISHED = "unfinished"  # it is being written: soon there, or discarded after 30 s
    EXISTS = "exists"  # there, or being written
    LEASED = "leased"  # in use: ask again after the lease
    EXPIRED = "expired"  # the lease ended during the read: the bytes can't be trusted
    FULL = "full"  # no room: ask again when eviction has run
    SEGMENT = "segment"  # the memory's owner can't be reached, or the sizes differ
    MASTER = "master"  # the master can't be reached, or does not know this client
    REFUSED = "refused"  # the call itself was wrong
    UNKNOWN = "unknown"  # a code that this version does not know


_MEANINGS: dict[int, Meaning] = {
    MooncakeCode.OK: Meaning.DONE,
    MooncakeCode.INTERNAL_ERROR: Meaning.MASTER,
    MooncakeCode.BUFFER_OVERFLOW: Meaning.FULL,
    MooncakeCode.SEGMENT_NOT_FOUND: Meaning.FULL,
    MooncakeCode.CLIENT_NOT_FOUND: Meaning.MASTER,
    MooncakeCode.NO_AVAILABLE_HANDLE: Meaning.FULL,
    MooncakeCode.INVALID_KEY: Meaning.REFUSED,
    MooncakeCode.WRITE_FAIL: Meaning.SEGMENT,
    MooncakeCode.INVALID_PARAMS: Meaning.REFUSED,
    MooncakeCode.ILLEGAL_CLIENT: Meaning.MASTER,
    MooncakeCode.INVALID_WRITE: Meaning.SEGMENT,
    MooncakeCode.INVALID_READ: Meaning.SEGMENT,
    MooncakeCode.INVALID_REPLICA: Meaning.GONE,
    MooncakeCode.REPLICA_IS_NOT_READY: Meaning.UNFINISHED,
    MooncakeCode.OBJECT_NOT_FOUND: Meaning.GONE,
    MooncakeCode.OBJECT_ALREADY_EXISTS: Meaning.EXISTS,
    MooncakeCode.OBJECT_HAS_LEASE: Meaning.LEASED,
    MooncakeCode.LEASE_EXPIRED: Meaning.EXPIRED,
    MooncakeCode.OBJECT_HAS_REPLICATION_TASK: Meaning.LEASED,
    MooncakeCode.REPLICA_NOT_FOUND: Meaning.GONE,
    MooncakeCode.REPLICA_ALREADY_EXISTS: Meaning.EXISTS,
    MooncakeCode.REPLICA_IS_GONE: Meaning.GONE,
    MooncakeCode.OBJECT_REPLICA_BUSY: Meaning.LEASED,
    MooncakeCode.TRANSFER_FAIL: Meaning.SEGMENT,
    MooncakeCode.CHECKSUM_MISMATCH: Meaning.SEGMENT,
    MooncakeCode.RPC_FAIL: Meaning.MASTER,
    MooncakeCode.RPC_TIMEOUT: Meaning.MASTER,
    MooncakeCode.UNAVAILABLE_IN_CURRENT_STATUS: Meaning.MASTER,
}


def meaning(code: int) -> Meaning:
    """Of a returned number; a size counts as done."""
    return Meaning.DONE if code >= 0 else _MEANINGS.get(code, Meaning.UNKNOWN)


def code_name(code: int) -> str:
    """For counters: from a small fixed set."""
    try:
        return MooncakeCode(min(code, 0)).name
    except ValueError:
        return "other"


def outcome_of(code: int) -> BlockOutcome:
    """Of a put or a get whose code is final. An unfinished object is one that is not there."""
    match meaning(code):
        case Meaning.DONE:
            return BlockOutcome.OK
        case Meaning.GONE | Meaning.UNFINISHED:
            return BlockOutcome.MISSING
        case _:
            return BlockOutcome.FAILED
