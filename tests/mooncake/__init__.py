"""Tests over a real Mooncake: a master and owners of segments, as processes of their own."""
