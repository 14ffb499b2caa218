"""What the vLLM adapter reads from vLLM's configs: what can be served, and the namespace.

Part of the vLLM composition root, apart from it so that it can be read and tested without vLLM: the
configs are vLLM's own objects, used by attribute. Pure functions.
"""

from __future__ import annotations

from typing import Any

from connector.config import Config
from connector.errors import UnsupportedError
from store_worker.keys import NamespaceSpec


def check_supported(vllm_config: Any, kv_cache_config: Any) -> None:
    """Refuse at start what can't be served. Raises UnsupportedError with what to do instead."""
    parallel = vllm_config.parallel_config
    if len(kv_cache_config.kv_cache_groups) != 1:
        raise UnsupportedError(
            f"SessionKVConnector serves models with one KV cache group, this one has "
            f"{len(kv_cache_config.kv_cache_groups)}; start vLLM with "
            "--disable-hybrid-kv-cache-manager, or without the connector"
        )
    for name, size in (
        ("pipeline_parallel_size", parallel.pipeline_parallel_size),
        ("decode_context_parallel_size", getattr(parallel, "decode_context_parallel_size", 1)),
        ("prefill_context_parallel_size", getattr(parallel, "prefill_context_parallel_size", 1)),
    ):
        if size > 1:
            raise UnsupportedError(
                f"SessionKVConnector does not serve {name} = {size}; set it to 1 and use tensor "
                "parallelism instead"
            )
    role = vllm_config.kv_transfer_config.kv_role
    if role != "kv_both":
        raise UnsupportedError(
            f'SessionKVConnector needs kv_role "kv_both", not {role!r}: every engine loads and '
            'saves; for prefill/decode set "pd_role" in kv_connector_extra_config'
        )


def namespace_spec(
    config: Config, vllm_config: Any, kv_cache_config: Any, device: str, hash_seed: str
) -> NamespaceSpec:
    """Everything that decides whether two engines may share blocks, for epoch ''.

    device: the platform's device type. hash_seed: what the block hashes start from."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    group = kv_cache_config.kv_cache_groups[0]
    spec = group.kv_cache_spec
    return NamespaceSpec(
        model=model.model,
        revision="/".join(filter(None, (model.revision, config.model_revision))),
        quantization=str(model.quantization or ""),
        kv_dtype=f"{cache.cache_dtype}/{getattr(spec, 'dtype', '')}",
        tokens_per_block=spec.block_size,
        layers=len(group.layer_names),
        kv_heads=model.get_total_num_kv_heads(),
        head_size=model.get_head_size(),
        layout=f"vllm/{device}/{kv_cache_config.kv_cache_layout}/{type(spec).__name__}",
        payload_bytes=payload_bytes(kv_cache_config),
        hash_algorithm=cache.prefix_caching_hash_algo,
        hash_seed=hash_seed,
        tenant=config.tenant,
        tp_size=vllm_config.parallel_config.tensor_parallel_size,
    )


def payload_bytes(kv_cache_config: Any) -> int:
    """Bytes of one block on one rank, over all layers."""
    group = kv_cache_config.kv_cache_groups[0]
    return int(group.kv_cache_spec.page_size_bytes) * len(group.layer_names)
