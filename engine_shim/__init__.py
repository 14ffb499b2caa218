"""A small, real inference engine: paged KV cache, continuous batching, prefix cache.

It proves that the connector is engine-neutral and lets everything run without vLLM or a GPU.
Importing this package imports neither torch nor zmq.
"""

from __future__ import annotations

__version__ = "0.1.0"
