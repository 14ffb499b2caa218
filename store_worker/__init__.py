"""store_worker package."""
