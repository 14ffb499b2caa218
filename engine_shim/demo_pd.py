"""`session-kv demo-pd`: one engine prefills, another decodes, the proxy stands before them."""

from __future__ import annotations

import json
from collections.abc import Mapping

import httpx

from engine_shim.demo import (
    COLD,
    SESSION,
    SYSTEM,
    Answer,
    HandedTurn,
    Meter,
    Report,
    Say,
    ask,
    connector_flag,
    conversation,
    http_client,
    needed,
    running,
)
from engine_shim.demo_processes import Process, info_of, store_folder, until_quiet

ENGINES = ("prefill", "decode")


async def demo_pd(turns: int, say: Say) -> Report:
    """As `demo.demo`; the store's index is where the proxy waits for a prompt's commit."""
    with store_folder() as folder:
        serve = ("serve", "--port", "0", "--kv-transfer-config")
        commands = {name: (*serve, connector_flag(folder, pd_role=name)) for name in ENGINES}
        say("starting a prefill and a decode engine on one embedded store, and a cold one")
        async with running({**commands, "cold": COLD}) as engines:
            proxy = (
                "proxy", "--port", "0", "--prefill", engines["prefill"].url,
                "--decode", engines["decode"].url, "--store", store_of(folder),
            )  # fmt: skip
            say("starting the proxy")
            async with running({"proxy": proxy}) as front, http_client() as http:
                return await _turns(http, {**engines, **front}, turns, say)


def store_of(folder: str) -> str:
    """The embedded store's servers as `--store` takes them: they run, as the engines do."""
    return json.dumps(
        {"index": f"unix://{folder}/index.sock", "data": [f"unix://{folder}/data.sock"]}
    )


async def _turns(
    http: httpx.AsyncClient, processes: Mapping[str, Process], turns: int, say: Say
) -> Report:
    info = await info_of(http, processes["prefill"].url)
    block, size = int(info["block_size"]), int(info["bytes_per_token"])
    meters = {name: Meter(http, processes[name], size) for name in ENGINES}
    messages: list[dict[str, str]] = [{"role": "system", "content": SYSTEM}]
    rows: list[HandedTurn] = []
    problems: list[str] = []
    before: Answer | None = None
    for number, question in enumerate(conversation(turns), start=1):
        say(f"turn {number} of {turns} through the proxy")
        messages.append({"role": "user", "content": question})
        answer = await ask(http, processes["proxy"].url, messages, SESSION)
        cold = await ask(http, processes["cold"].url, messages)
        prefill = await meters["prefill"].look()
        decode = await meters["decode"].look()
        rows.append(
            HandedTurn(
                turn=number,
                prefilled_by=answer.headers.get("x-session-kv-prefill", "-"),
                decoded_by=answer.headers.get("x-session-kv-decode", "-"),
                prompt_tokens=answer.prompt_tokens, reply_tokens=answer.reply_tokens,
                prefill_own_tokens=prefill[0], prefill_loaded_tokens=prefill[1],
                prefill_need_tokens=needed(block, before, answer.prompt_tokens),
                decode_own_tokens=decode[0], decode_loaded_tokens=decode[1],
                decode_need_tokens=(answer.prompt_tokens - 1) // block * block,
                ttft_s=round(answer.ttft_s, 4), equal=answer.text == cold.text,
            )
        )  # fmt: skip
        problems += faults(rows[-1])
        if not await until_quiet(http, [processes[name].url for name in ENGINES]):
            problems.append(f"turn {number}: its blocks were not stored in time")
        messages.append({"role": "assistant", "content": answer.text})
        before = answer
    return Report(rows, problems)


def faults(row: HandedTurn) -> list[str]:
    """What is wrong with a turn."""
    found = []
    if not row.equal:
        found.append(f"turn {row.turn}: the text differs from the cold engine's")
    if "-" in (row.prefilled_by, row.decoded_by):
        found.append(f"turn {row.turn}: it did not pass both engines")
    for name, got, need in (
        ("prefill", row.prefill_own_tokens + row.prefill_loaded_tokens, row.prefill_need_tokens),
        ("decode", row.decode_own_tokens + row.decode_loaded_tokens, row.decode_need_tokens),
    ):
        if got < need:
            found.append(f"turn {row.turn}: {name} did not compute {got} tokens, {need} needed")
    if row.turn == 2 and row.prefill_loaded_tokens == 0:
        found.append("turn 2: the prefill engine loaded nothing of the last turn")
    return found
