"""The demonstrations: a conversation that moves between engine processes, and what that saved.

Nothing here is trusted: a turn's text is compared with that of an engine without a connector and
without a prefix cache, and loaded tokens are counted from bytes that the workers received.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import httpx
import msgspec

from connector.clock import Clock, SystemClock
from engine_shim.demo_processes import (
    Process,
    info_of,
    metrics_of,
    started,
    store_folder,
    until_quiet,
)
from engine_shim.errors import RequestFailed

SESSION = "demo-conversation"
REPLY_TOKENS = 48
REQUEST_TIMEOUT_S = 60.0
HIT, LOADED = "shim_prefix_hit_tokens_total", "session_kv_load_bytes_total"
SYSTEM = (
    "You are the assistant of a small harbour office. You answer in short plain sentences, you name"
    " the berth and the hour, and you say so when you do not know."
)
QUESTIONS = (
    "The ferry from the islands is late today. Which berth is free for it at noon, and how long may"
    " it stay before the cargo ship needs the same place?",
    "Good. The captain also asks for fresh water, eight tonnes, and for someone to look at the"
    " forward winch. Can both be done while the passengers go ashore?",
    "And tomorrow? There is a race of sailing boats in the bay from nine to one. Tell me what that"
    " changes for the pilots and for the fishing boats that come in early.",
    "Thank you. Please sum up everything we have agreed on, today and tomorrow, in the order in"
    " which it will happen, so that I can read it over the radio.",
    "And the radio reports fog after midnight. What should be moved to an earlier hour?",
    "Then write the note for the night watch, with the numbers they may have to call.",
)

Say = Callable[[str], None]


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One row of `session-kv demo`."""

    turn: int
    engine: str
    prompt_tokens: int
    reply_tokens: int
    own_tokens: int
    loaded_tokens: int
    need_tokens: int
    ttft_s: float
    equal: bool


class HandedTurn(msgspec.Struct, frozen=True, kw_only=True):
    """One row of `session-kv demo-pd`. need: of the prefill engine, what the turns before have
    stored; of the decode engine, the prompt's whole blocks."""

    turn: int
    prefilled_by: str
    decoded_by: str
    prompt_tokens: int
    reply_tokens: int
    prefill_own_tokens: int
    prefill_loaded_tokens: int
    prefill_need_tokens: int
    decode_own_tokens: int
    decode_loaded_tokens: int
    decode_need_tokens: int
    ttft_s: float
    equal: bool


class Report(msgspec.Struct, frozen=True):
    """ok: nothing is in `problems`."""

    turns: list[Turn] | list[HandedTurn]
    problems: list[str]

    @property
    def ok(self) -> bool:
        """True if everything was as it must be."""
        return not self.problems


class Answer(msgspec.Struct, frozen=True):
    """One reply. headers: of the reply, lower-case names."""

    text: str
    prompt_tokens: int
    reply_tokens: int
    ttft_s: float
    headers: dict[str, str]


def needed(block: int, before: Answer | None, prompt_tokens: int) -> int:
    """Tokens that a turn must not compute: whole blocks of the turn before and of this prompt. The
    last sampled token has no KV, and one token of a prompt is always computed."""
    if before is None:
        return 0
    stored = (before.prompt_tokens + before.reply_tokens - 1) // block
    return min(stored, (prompt_tokens - 1) // block) * block


def conversation(turns: int) -> list[str]:
    """The user's messages; after the last one it begins again."""
    return [QUESTIONS[index % len(QUESTIONS)] for index in range(turns)]


async def ask(
    http: httpx.AsyncClient,
    url: str,
    messages: Sequence[Mapping[str, str]],
    session_id: str | None = None,
    clock: Clock | None = None,
) -> Answer:
    """One streamed, greedy chat completion. Raises RequestFailed, httpx.HTTPError."""
    clock = clock or SystemClock()
    body = {
        "model": "shim", "messages": list(messages), "max_tokens": REPLY_TOKENS, "temperature": 0,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    headers = {"X-Session-ID": session_id} if session_id else {}
    began, first = clock.now(), 0.0
    texts: list[str] = []
    usage: dict[str, Any] = {}
    async with http.stream(
        "POST", f"{url}/v1/chat/completions", json=body, headers=headers
    ) as reply:
        if reply.status_code != 200:
            raise RequestFailed(f"{url}: {reply.status_code} {(await reply.aread()).decode()}")
        async for event in _events(reply):
            if "error" in event:
                raise RequestFailed(f"{url}: {event['error']['message']}")
            usage = event.get("usage") or usage
            text = "".join(choice["delta"].get("content") or "" for choice in event["choices"])
            if text and not first:
                first = clock.now() - began
            texts.append(text)
        answered = {name.lower(): value for name, value in reply.headers.items()}
    if session_id and answered.get("x-session-id") != session_id:
        raise RequestFailed(f"{url}: the reply's X-Session-ID is {answered.get('x-session-id')!r}")
    return Answer(
        "".join(texts), usage["prompt_tokens"], usage["completion_tokens"], first, answered
    )


async def _events(reply: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in reply.aiter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line[6:])


class Meter:
    """What one engine had in its own cache and what its workers loaded, since the last look."""

    def __init__(self, http: httpx.AsyncClient, process: Process, bytes_per_token: int) -> None:
        self._http, self._process = http, process
        self._bytes_per_token = bytes_per_token
        self._hit = self._loaded = 0.0

    async def look(self) -> tuple[int, int]:
        """(own tokens, loaded tokens)."""
        found = await metrics_of(self._http, self._process.url)
        hit, loaded = found.get(HIT, 0.0), found.get(LOADED, 0.0)
        own, received = hit - self._hit, loaded - self._loaded
        self._hit, self._loaded = hit, loaded
        return int(own), int(received) // self._bytes_per_token


def connector_flag(folder: str, **extra: Any) -> str:
    """`--kv-transfer-config` with the embedded store in `folder`."""
    return json.dumps(
        {
            "kv_connector": "SessionKVConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "store": "embedded", "embedded_dir": folder, "embedded_bytes": 256 << 20, **extra,
            },
        }
    )  # fmt: skip


COLD = ("serve", "--port", "0", "--no-enable-prefix-caching")


@contextlib.asynccontextmanager
async def running(commands: Mapping[str, Sequence[str]]) -> AsyncIterator[dict[str, Process]]:
    """All processes at once, by name."""
    async with contextlib.AsyncExitStack() as stack:
        names = list(commands)
        made = await asyncio.gather(
            *(stack.enter_async_context(started(name, commands[name])) for name in names),
            return_exceptions=True,
        )
        for one in made:
            if isinstance(one, BaseException):
                raise one
        yield {one.name: one for one in made if isinstance(one, Process)}


async def demo(turns: int, say: Say) -> Report:
    """Two engines share a store; a conversation goes to and fro.

    Raises EngineDead, EngineTimeout, RequestFailed, httpx.HTTPError.
    """
    with store_folder() as folder:
        warm = ("serve", "--port", "0", "--kv-transfer-config", connector_flag(folder))
        say("starting two engines on one embedded store, and a cold one to compare with")
        async with running({"A": warm, "B": warm, "cold": COLD}) as engines, http_client() as http:
            return await alternate(http, engines, turns, say)


def http_client() -> httpx.AsyncClient:
    """A client for loopback: never through a proxy of the environment."""
    return httpx.AsyncClient(timeout=REQUEST_TIMEOUT_S, trust_env=False)


async def alternate(
    http: httpx.AsyncClient, engines: Mapping[str, Process], turns: int, say: Say
) -> Report:
    """The conversation, on engines A and B in turn, each turn also on the engine `cold`."""
    info = await info_of(http, engines["A"].url)
    block = int(info["block_size"])
    meters = {name: Meter(http, engines[name], int(info["bytes_per_token"])) for name in "AB"}
    messages: list[dict[str, str]] = [{"role": "system", "content": SYSTEM}]
    rows: list[Turn] = []
    problems: list[str] = []
    before: Answer | None = None
    for number, question in enumerate(conversation(turns), start=1):
        name = "AB"[(number - 1) % 2]
        say(f"turn {number} of {turns} on engine {name}")
        messages.append({"role": "user", "content": question})
        answer = await ask(http, engines[name].url, messages, SESSION)
        cold = await ask(http, engines["cold"].url, messages)
        own, loaded = await meters[name].look()
        rows.append(
            Turn(
                turn=number, engine=name, prompt_tokens=answer.prompt_tokens,
                reply_tokens=answer.reply_tokens, own_tokens=own, loaded_tokens=loaded,
                need_tokens=needed(block, before, answer.prompt_tokens),
                ttft_s=round(answer.ttft_s, 4), equal=answer.text == cold.text,
            )
        )  # fmt: skip
        problems += faults(rows[-1])
        if not await until_quiet(http, [engines[one].url for one in "AB"]):
            problems.append(f"turn {number}: its blocks were not stored in time")
        messages.append({"role": "assistant", "content": answer.text})
        before = answer
    return Report(rows, problems)


def faults(row: Turn) -> list[str]:
    """What is wrong with a turn."""
    found = []
    if not row.equal:
        found.append(f"turn {row.turn}: the text differs from the cold engine's")
    if row.own_tokens + row.loaded_tokens < row.need_tokens:
        got = row.own_tokens + row.loaded_tokens
        found.append(f"turn {row.turn}: {got} tokens were not computed, {row.need_tokens} needed")
    if row.turn == 2 and row.loaded_tokens == 0:
        found.append("turn 2: nothing was loaded from the store")
    return found
