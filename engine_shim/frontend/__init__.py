"""The ways into the engine: HTTP (OpenAI's, vLLM's and SGLang's forms) and gRPC.

Each entrance is one row of `entrances.ENTRANCES`. All code here runs on one asyncio loop.
"""
