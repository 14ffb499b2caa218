"""Tests against real vLLM: run by `make test-vllm` in an environment of their own."""
