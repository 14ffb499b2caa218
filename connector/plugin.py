"""Entry point `vllm.general_plugins`: makes `SessionKVConnector` known by name in every process
of vLLM, so that no module path is needed in `--kv-transfer-config`."""

from __future__ import annotations

NAME = "SessionKVConnector"
MODULE = "connector.vllm_adapter"


def register() -> None:
    """Register the class with vLLM's factory; a second call changes nothing.

    Called by vLLM in the API server, the engine core and every worker.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    try:
        KVConnectorFactory.register_connector(NAME, MODULE, NAME)
    except ValueError:
        return  # it is there already, by this plugin or by an import of the module
