"""Conversations with servers, through the public `openai` client, and what they must say.

The reference is a server without a connector. A prompt whose greedy reply has a near tie is
changed until it has none: so a difference of a few 1e-6 in the logits, which any other split of
the work brings, can't flip a token, and an unequal text is always a wrong text.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import openai
import redis

from connector.errors import StoreError
from connector.ids import NodeId, SessionKey
from connector.session import session_key
from store_worker.index import open_index
from tests.vllm.servers import MODEL_NAME, TOKENS_PER_BLOCK, VllmServer
from tests.waiting import eventually

GAP_MIN = 2e-3  # logits; two splits of one prefill differ by about 4e-6
TRIES_MAX = 40
WORDS = "alpha the of river 42 stone zebra mind a to print x=1 why? {json} and (note) moss".split()  # noqa: SIM905

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Reply:
    """One answer: the text, and usage. gap: least distance between the two likeliest tokens."""

    text: str
    prompt_tokens: int
    cached_tokens: int
    gap: float = 0.0


@dataclass(frozen=True)
class Turn:
    """What to send (session id apart) and the only right answer."""

    messages: Messages
    reply: Reply


@dataclass
class Dialog:
    """A conversation, turn by turn, as the reference had it."""

    turns: list[Turn] = field(default_factory=list)

    def need(self, turn: int) -> int:
        """Tokens that must come from a cache at this turn: whole blocks of the previous prompt
        and reply but for the reply's last token, which has no KV."""
        if turn == 0:
            return 0
        before, now = self.turns[turn - 1].reply, self.turns[turn].reply
        past = before.prompt_tokens + len(before.text) - 1
        return min(past // TOKENS_PER_BLOCK, (now.prompt_tokens - 1) // TOKENS_PER_BLOCK) * (
            TOKENS_PER_BLOCK
        )


def client_of(server: VllmServer) -> openai.OpenAI:
    """A client that neither retries nor waits for ever. No connection is kept: the server closes
    idle ones, and a request that meets the close would count as failed."""
    return openai.OpenAI(
        base_url=f"{server.url}/v1",
        api_key="none",
        max_retries=0,
        timeout=120.0,
        default_headers={"Connection": "close"},
    )


def chat(
    client: openai.OpenAI, messages: Messages, session: str = "", tokens: int = 24, **more: Any
) -> Reply:
    """One turn, greedy, not streamed. session: sent as X-Session-ID."""
    answer = client.chat.completions.create(
        model=MODEL_NAME,
        messages=messages,  # type: ignore[arg-type]
        temperature=0,
        max_tokens=tokens,
        extra_headers={"X-Session-ID": session} if session else {},
        **more,
    )
    choice, usage = answer.choices[0], answer.usage
    assert usage is not None and choice.message.content is not None
    details = usage.prompt_tokens_details
    gap = 0.0
    if choice.logprobs is not None and choice.logprobs.content:
        pairs = [c.top_logprobs for c in choice.logprobs.content]
        gap = min(abs(pair[0].logprob - pair[1].logprob) for pair in pairs)
    return Reply(
        text=choice.message.content,
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=(details.cached_tokens or 0) if details else 0,
        gap=gap,
    )


class StoreView:
    """What the index knows, for tests that must not run ahead of a save.

    A reply is sent before its last blocks are committed: a test that sends the next turn within
    milliseconds, to another server, waits for them here.
    """

    def __init__(self, index_url: str, servers: Sequence[VllmServer] = ()) -> None:
        """servers: whose troubles are told when a wait fails."""
        self._servers = servers
        self.index = open_index(index_url)
        self.raw = redis.Redis.from_url(index_url)

    def key(self, session: str) -> SessionKey:
        """The session's key in the index, as the servers make it."""
        return session_key(self.index.identity().secret, "default", None, session)

    def blocks(self, session: str) -> int:
        """Committed blocks that the session holds; without a session, all blocks."""
        try:
            if not session:
                return self.index.stats()["blocks"]
            state = self.index.session(self.key(session))
        except StoreError:
            return 0
        return state.blocks if state is not None else 0

    def wait_for(self, session: str, blocks: int) -> None:
        """Until at least so many blocks of the session are committed."""
        try:
            eventually(lambda: self.blocks(session) >= blocks, 20)
        except AssertionError:
            told = "\n".join(server.troubles() for server in self._servers)
            raise AssertionError(
                f"{self.blocks(session)} of {blocks} blocks of {session!r} are committed\n{told}"
            ) from None


@dataclass(kw_only=True)
class SharedStore:
    """Servers that share a store, a client of each, and what its index knows.

    settle_s: how long a server may take until nothing holds a block.
    """

    servers: list[VllmServer]
    clients: list[openai.OpenAI]
    view: StoreView
    settle_s: float = 20

    def reset_local(self) -> None:
        """Empty the engines' own caches: the next hits come from the store. Nothing may hold a
        block once they are idle."""
        for server in self.servers:
            what = f"{server.spec.name} holds nothing"
            eventually(server.reset_local_cache, self.settle_s, what, 0.05)

    def home(self, session: str) -> NodeId:
        """Where the index says that the session is at home."""
        state = self.view.index.session(self.view.key(session))
        assert state is not None and state.home is not None
        return state.home

    def troubles(self) -> str:
        return "\n".join(server.troubles() for server in self.servers)


class Reference:
    """Makes dialogs, and knows the right answer to anything."""

    def __init__(self, server: VllmServer) -> None:
        self._client = client_of(server)
        self._known: dict[tuple[Any, ...], Dialog] = {}

    def close(self) -> None:
        self._client.close()

    def reply(self, messages: Messages, tokens: int = 24, **more: Any) -> Reply:
        """The reference's answer, with the gap of its closest call."""
        return chat(
            self._client, messages, tokens=tokens, logprobs=True, top_logprobs=2, **more
        )

    def dialog(
        self, seed: int, turns: int = 4, words: int = 60, tokens: int = 24, **more: Any
    ) -> Dialog:
        """A conversation without near ties. more: for every request, such as a chat template."""
        key = (seed, turns, words, tokens, str(more))
        if key in self._known:
            return self._known[key]
        chance, dialog, messages = random.Random(seed), Dialog(), [system_message(seed)]
        for _ in range(turns):
            turn = self._turn(chance, messages, words, tokens, more)
            dialog.turns.append(turn)
            messages = [*turn.messages, {"role": "assistant", "content": turn.reply.text}]
        self._known[key] = dialog
        return dialog

    def _turn(
        self, chance: random.Random, past: Messages, words: int, tokens: int, more: dict[str, Any]
    ) -> Turn:
        for _ in range(TRIES_MAX):
            question = " ".join(chance.choice(WORDS) for _ in range(words))
            messages = [*past, {"role": "user", "content": question}]
            reply = self.reply(messages, tokens, **more)
            if reply.gap > GAP_MIN:
                return Turn(messages, reply)
        raise AssertionError(f"no prompt without a near tie in {TRIES_MAX} tries")


def system_message(seed: int) -> dict[str, str]:
    """Unlike any other seed's from the first token on."""
    return {"role": "system", "content": f"{seed} is the number of this talk."}


def follow(
    clients: list[openai.OpenAI],
    dialog: Dialog,
    session: str,
    view: StoreView | None = None,
    **more: Any,
) -> list[Reply]:
    """Hold a dialog, its turns going round the clients; every text must be the reference's.

    view: wait for each turn's commit before the next is sent.
    """
    replies: list[Reply] = []
    already = view.blocks("") if view is not None and not session else 0
    for index, turn in enumerate(dialog.turns):
        if view is not None and index:
            view.wait_for(session, already + dialog.need(index) // TOKENS_PER_BLOCK)
        client = clients[index % len(clients)]
        reply = chat(client, turn.messages, session, tokens=len(turn.reply.text), **more)
        assert reply.text == turn.reply.text, f"turn {index + 1} of {session}"
        assert reply.prompt_tokens == turn.reply.prompt_tokens
        replies.append(reply)
    return replies


def assert_cached(dialog: Dialog, replies: list[Reply], first: int = 1) -> None:
    """From turn `first` on (0 is the first), as many tokens came from a cache as must."""
    for index in range(first, len(replies)):
        assert replies[index].cached_tokens >= dialog.need(index), (
            f"turn {index + 1}: {replies[index].cached_tokens} cached, "
            f"{dialog.need(index)} needed of {replies[index].prompt_tokens}"
        )
