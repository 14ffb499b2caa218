"""Runs pytest again and again in processes of its own, without paying for its imports each time.

Started as a program (never imported, so that nothing of the project is in its memory) it imports
what the tests need from elsewhere, then reads one request per line, a JSON object `{"folder",
"args", "env", "output", "timeout_s"}`, and forks: the child runs pytest in `folder`, whose packages
come first, and writes what it prints to `output`. The answer is a line with pytest's exit code.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys

# Imported once, for every child: the larger part of a short test's time.
WARM = ("torch", "numpy", "msgspec", "redis", "hiredis", "xxhash", "hypothesis", "pytest_timeout",
        "xdist.plugin", "anyio.pytest_plugin", "_hypothesis_pytestplugin")  # fmt: skip
KILLED = 99


def child(request: dict[str, object]) -> int:
    """In the new process: never returns to the loop."""
    output = os.open(str(request["output"]), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    folder, env, args = str(request["folder"]), request["env"], request["args"]
    assert isinstance(env, dict) and isinstance(args, list)
    os.chdir(folder)
    os.environ.update(env)
    sys.path[0] = folder
    import pytest

    return int(pytest.main(args))


def wait(pid: int, timeout_s: float) -> int:
    """The child's exit code; one that does not end in time is killed."""
    handle = os.pidfd_open(pid)
    ready, _, _ = select.select([handle], [], [], timeout_s)
    if not ready:
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    os.close(handle)
    return os.waitstatus_to_exitcode(status) if ready else KILLED


def main() -> None:
    for name in WARM:
        try:
            __import__(name)
        except ImportError:
            continue  # then the child does without it, or says what it misses
    import pytest  # noqa: F401

    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            try:
                code = child(request)
                sys.stdout.flush()
            except BaseException:
                code = KILLED
            os._exit(code)
        print(wait(pid, float(request["timeout_s"])), flush=True)


if __name__ == "__main__":
    main()
