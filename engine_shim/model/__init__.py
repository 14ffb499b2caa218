"""A small Llama-like transformer over a paged KV cache."""
