"""A process that lends memory to a Mooncake cluster: `python -m tests.mooncake.owner`.

Says `UP NAME` when its segment is mounted, and leaves in good order when its input ends.
"""

from __future__ import annotations

import argparse
import sys


def main() -> int:
    parser = argparse.ArgumentParser()
    for name in ("host", "metadata", "master"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--bytes", type=int, required=True)
    args = parser.parse_args()

    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    code = store.setup(args.host, args.metadata, args.bytes, 1 << 20, "tcp", "", args.master)
    if code != 0:
        print(f"FAILED {code}", flush=True)
        return 1
    print(f"UP {store.get_hostname()}", flush=True)
    sys.stdin.read()
    store.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
