"""Bounds and times of the session index; the Lua scripts get them from here too."""

from __future__ import annotations

BLOCKS_MAX = 128
"""Hashes of one call, blocks of one run."""
REMOVED_MAX = 96
"""Blocks that one call removes from the index, at most."""
RUN_COST = 16
"""What touching a run counts in the budget of blocks that one call may remove: a run takes some
80 us of the server's time, a block 7 us, and no call may take 2 ms."""
ROOM_TRIES = 16
"""How often a save asks again after its victims were deleted."""
CANDIDATES_MAX = 16
SLICES_MAX = 64
"""Slices of one `acquire`: neighbouring runs on one node are one slice."""
PATH_RUNS_MAX = 256
"""A chain in more runs than this is not extended."""
WALK_RUNS_MAX = 600
"""No walk to the root is longer: a chain grows beyond PATH_RUNS_MAX only by splits."""

HOLDS_MAX = 24
"""Leaves that one session holds; the oldest hold is dropped beyond."""
HOLDERS_MAX = 32
"""Sessions that hold one run; the shallowest is dropped beyond."""
HOLDS_SHOWN = 4
"""Of a session's newest holds, how many are looked at for people."""
BOUNDARIES_MAX = 64
NAMESPACES_MAX = 8
"""Namespaces in which one session has boundaries; the oldest are dropped beyond."""
ENGINES_MAX = 4
SESSIONS_KEPT_MAX = 100_000
"""Records of sessions that hold nothing."""
SESSION_KEPT_MS = 24 * 3600_000
TURNS_KEPT_MAX = 100_000
"""Conversations whose turns are remembered, whether or not a block of them is left."""
LOG_MAX = 20_000
"""Events of the turn log."""
ABANDONED_MAX = 1024
ABANDONED_MS = 60_000

SHARED_CHILDREN = 8
"""A block with so many children ends a shared part."""
TIMES_SHARED = 1_000_000
"""Times used of a chain that is wholly shared."""

REISSUE_MS = 5_000
DEAD_GRACE_MS = 60_000
"""How long runs wait behind lost ones before they are swept."""
DOWN_GRACE_MS = 600_000
"""How long a node's runs stay listed after it went down."""
PROMISE_MS = 5_000
"""How long a block stays that another running grant has promised to the same node."""
REPLY_KEPT_MS = 120_000
"""How long the reply to a commit is kept for a retry."""
EXPIRE_PER_CALL = 2
WAKE_PER_CALL = 8
ENDED_PER_CLOSE = 4
SWEEP_STEPS = 16
DEAD_PER_CALL = 8
FORGET_RUNS_MAX = 4

COPY_BLOCKS_PER_CALL = 16
MOVE_RUNS_PER_CALL = 8
COPY_ROOM_MS = 60_000
COPY_PERCENT = 5
"""Of a node's capacity that copies of shared parts may take."""
COPY_IDLE_MS = 600_000
"""A copy that no load used for so long is dropped first."""
UNACCOUNTED_BLOCKS_MAX = 4_000_000
"""Blocks listed on a node without a capacity; older ones are dropped beyond."""

PRIORITY_MIN, PRIORITY_MAX = -1, 3
LEVEL_FREE = 0
"""Nobody wants it any more (a closed session's leftovers): first victim."""
LEVEL_NORMAL = 2
"""Level of priority 0; a level is LEVEL_NORMAL + priority."""
LEVEL_PINNED = 6
PIN_TTL_MAX_S = 24 * 3600
GRANT_TTL_MAX_S = 600
NEVER_MS = 90_000_000_000_000
"""Scripts turn numbers into text with 14 digits."""

FORMAT = 1
"""Of the keys and records in the server: an index of another format is refused."""
