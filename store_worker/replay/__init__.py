"""Replay of a request trace against the product's own index, placement and policy.

Virtual time, one thread, no bytes: what a store of a given size would have hit, written and
evicted. `trace` reads, `engine` drives, `nodes` is what lies where, `report` is what comes out,
`page` draws it.
"""
