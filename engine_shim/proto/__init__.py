"""The gRPC service: `shim.proto` and the code generated from it.

Generated files are committed, so that running needs no generator. `make proto` rewrites them.
"""
