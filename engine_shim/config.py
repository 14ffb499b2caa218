"""Configuration of one engine: frozen structs, checked once. Imports neither torch nor zmq."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from connector.errors import ConfigError

DEFAULT_CONNECTOR_FACTORY = "engine_shim.wiring:build_connector"


class ModelConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A small Llama-like model with random weights drawn from `seed` (same seed, same model).

    Equal seeds and shapes give equal weights whatever tp_size, device and batch.
    """

    num_layers: int = 4
    hidden_size: int = 256
    num_heads: int = 8
    num_kv_heads: int = 4
    head_dim: int = 64
    intermediate_size: int = 512
    vocab_size: int = 264
    rope_theta: float = 10000.0
    seed: int = 0
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"

    @property
    def name(self) -> str:
        """Names the weights; part of the connector's namespace."""
        return (
            f"shim-llama-l{self.num_layers}-h{self.hidden_size}-q{self.num_heads}"
            f"-kv{self.num_kv_heads}x{self.head_dim}-m{self.intermediate_size}"
            f"-v{self.vocab_size}-s{self.seed}"
        )


class EngineConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One engine.

    num_blocks: pages of the KV cache on each rank. max_num_batched_tokens: token budget of a step
    (longer prompts are computed in several). max_num_seqs: requests running at once.
    async_scheduling: plan each step before the tokens of the one before it are known.
    cpu_threads: torch's threads in the engine process; 0 leaves torch's choice.
    kv_transfer_config: as vLLM's flag; None runs without a connector.
    connector_factory: "module:function", see `connector_port.ConnectorFactory`; called only if
    kv_transfer_config is set.
    """

    model: ModelConfig = ModelConfig()
    block_size: int = 16
    num_blocks: int = 2048
    max_model_len: int = 8192
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    max_num_queued: int = 4096
    tp_size: int = 1
    device: str = "cpu"
    enable_prefix_caching: bool = True
    enable_session_cache: bool = False
    async_scheduling: bool = False
    cpu_threads: int = 1
    seed: int = 0
    kv_transfer_config: dict[str, Any] | None = None
    connector_factory: str = DEFAULT_CONNECTOR_FACTORY

    def check(self) -> EngineConfig:
        """Itself, if it can work. Raises ConfigError."""
        for key in (
            "block_size", "num_blocks", "max_model_len", "max_num_seqs",
            "max_num_batched_tokens", "max_num_queued", "tp_size",
        ):  # fmt: skip
            if getattr(self, key) < 1:
                raise ConfigError(key, getattr(self, key), "at least 1")
        if self.cpu_threads < 0:
            raise ConfigError("cpu_threads", self.cpu_threads, "0 or more")
        capacity = self.num_blocks * self.block_size
        if self.max_model_len > capacity:
            raise ConfigError(
                "max_model_len",
                self.max_model_len,
                f"at most num_blocks * block_size = {capacity}",
                "a request must fit into the cache alone; raise num_blocks or lower max_model_len",
            )
        if self.device != "cpu" and self.device.partition(":")[0] != "cuda":
            raise ConfigError("device", self.device, '"cpu", "cuda" or "cuda:N"')
        self._check_model()
        return self

    def _check_model(self) -> None:
        model = self.model
        for key in ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim"):
            if getattr(model, key) < 1:
                raise ConfigError(f"model.{key}", getattr(model, key), "at least 1")
        if model.head_dim % 2:
            raise ConfigError("model.head_dim", model.head_dim, "an even number")
        if model.num_heads % model.num_kv_heads:
            raise ConfigError("model.num_heads", model.num_heads, "a multiple of num_kv_heads")
        if model.vocab_size < 260:
            raise ConfigError("model.vocab_size", model.vocab_size, "at least 260: bytes, specials")
        for key in ("num_kv_heads", "intermediate_size"):
            value = getattr(model, key)
            if value % self.tp_size:
                raise ConfigError(
                    "tp_size", self.tp_size, f"a divisor of model.{key} = {value}"
                )


def load_config(raw: bytes | str) -> EngineConfig:
    """From JSON. Raises ConfigError."""
    try:
        return msgspec.json.decode(raw, type=EngineConfig).check()
    except msgspec.MsgspecError as error:
        raise ConfigError("engine config", "(JSON)", f"valid fields ({error})") from error
