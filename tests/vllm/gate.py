"""A way to a server that can be shut for one connection only.

`Gate` stands at the path that engines are given: what connects while it is shut gets through once
it is opened, what connects while it stands open goes to the server at once.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from pathlib import Path

CHUNK = 1 << 16


class Gate:
    """A symbolic link at `path`, to the server's own socket or to a listener that waits.

    Thread: the test's. The waiting connections are carried by threads of this class, which end
    with their connections.
    """

    def __init__(self, server: Path) -> None:
        self.path = server.parent / "g"
        self._server = server
        self._hold = server.parent / "h"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self._hold))
        self._listener.listen(16)
        self._open = threading.Event()
        self.waiting = 0
        self._point_to(server)
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        return f"unix://{self.path}"

    def shut(self) -> None:
        """From now on connections wait."""
        self._point_to(self._hold)

    def pass_by(self) -> None:
        """New connections go to the server again; those that wait go on waiting."""
        self._point_to(self._server)

    def open(self) -> None:
        """Let those that wait through."""
        self.pass_by()
        self._open.set()

    def close(self) -> None:
        """Drop the listener; may be called twice."""
        self._open.set()
        self._listener.close()

    def _point_to(self, target: Path) -> None:
        fresh = self.path.with_suffix(".new")
        fresh.symlink_to(target)
        os.replace(fresh, self.path)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                inner, _ = self._listener.accept()
                self.waiting += 1
                threading.Thread(target=self._carry, args=(inner,), daemon=True).start()

    def _carry(self, inner: socket.socket) -> None:
        self._open.wait()
        with contextlib.suppress(OSError):
            outer = socket.socket(socket.AF_UNIX)
            outer.connect(str(self._server))
            threading.Thread(target=pump, args=(outer, inner), daemon=True).start()
            pump(inner, outer)


def pump(source: socket.socket, target: socket.socket) -> None:
    """Carry bytes one way until the source ends."""
    with contextlib.suppress(OSError):
        while data := source.recv(CHUNK):
            target.sendall(data)
    for end in (source, target):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
