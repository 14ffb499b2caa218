"""Owns the embedded servers: run as a program by `embedded.py`, standard library only.

    python -I -S embedded_supervisor.py DIRECTORY

Starts the servers that DIRECTORY/settings.json names, starts one again if it dies, and ends them
when it can take DIRECTORY/users exclusively: then no user is left. Holds that lock until they are
gone. The servers ask the kernel to be killed when this process dies.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

TICK_S = 0.2
STOP_DEADLINE_S = 5.0
# A server that dies at once, again and again (a full disk, say), is not started in a tight loop.
TICKS_BETWEEN_STARTS = 5
PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None, use_errno=True)
SIGNALS = frozenset({signal.SIGCHLD, signal.SIGTERM, signal.SIGINT})


def die_with_parent() -> None:
    """Runs in the child between fork and exec; Linux only. The server must hear its signals."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def start(binary: str, directory: Path, name: str, memory_bytes: int) -> subprocess.Popen[bytes]:
    """One server on a unix socket, limited, without eviction and without persistence."""
    socket_path = directory / name
    command = [binary, "--port", "0", "--unixsocket", str(socket_path), "--unixsocketperm", "700"]
    command += ["--maxmemory", str(memory_bytes), "--maxmemory-policy", "noeviction"]
    command += ["--save", "", "--appendonly", "no", "--daemonize", "no", "--dir", str(directory)]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=die_with_parent)


def supervise(directory: Path) -> None:
    """Until no user is left, or SIGTERM."""
    settings = json.loads((directory / "settings.json").read_text())
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    users_fd = os.open(directory / "users", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    running: dict[str, subprocess.Popen[bytes]] = {}
    wait_ticks = dict.fromkeys(settings["servers"], 0)
    try:
        while not nobody_left(users_fd):
            for name, memory_bytes in settings["servers"].items():
                wait_ticks[name] -= 1
                dead = name not in running or running[name].poll() is not None
                if dead and wait_ticks[name] <= 0:
                    running[name] = start(settings["binary"], directory, name, memory_bytes)
                    wait_ticks[name] = TICKS_BETWEEN_STARTS
            came = signal.sigtimedwait(SIGNALS, TICK_S)
            if came and came.si_signo != signal.SIGCHLD:
                break
    finally:
        stop(list(running.values()))
        for name in settings["servers"]:
            (directory / name).unlink(missing_ok=True)


def nobody_left(users_fd: int) -> bool:
    """Takes the lock if so; it goes with this process."""
    try:
        fcntl.flock(users_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def stop(servers: list[subprocess.Popen[bytes]]) -> None:
    for server in servers:
        server.terminate()
    for server in servers:
        try:
            server.wait(STOP_DEADLINE_S)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def main() -> None:
    """Fork away from whoever started us, who waits for this process and must get no zombie."""
    if os.fork() == 0:
        supervise(Path(sys.argv[1]))
    os._exit(0)


if __name__ == "__main__":
    main()
