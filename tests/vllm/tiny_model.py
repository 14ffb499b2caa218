"""A tiny Llama whose greedy output depends on the whole context: made once, from a seed.

Four layers, hidden size 256, 4 KV heads of 64, random weights. Three things make it a judge of
"equal text" where a freshly initialised model is none:
- an init deviation of 0.15: with the usual small init it repeats one token whatever it reads, and
  with q and k scaled down as well, attention is a mean over the context that one token in a
  thousand doesn't move;
- output rows of everything but printable ASCII are zero, so that a reply re-tokenizes to itself
  and the next turn's prompt has the same blocks;
- float32: in bfloat16 a different split of the prefill flips near ties, with any connector.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

SEED = 0
LAYERS, HIDDEN, HEADS, HEAD_SIZE = 4, 256, 4, 64
MAX_TOKENS = 8192
INIT_STD = 0.15
SPECIAL = ("<pad>", "<s>", "</s>")
PRINTABLE = range(0x20, 0x7F)
RECIPE_VERSION = 1
FOLDER = Path(__file__).resolve().parents[2] / ".cache" / "tiny-model"

CHAT_TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
# Drops what an assistant thought in every turn before the last question, as reasoning models do.
REASONING_TEMPLATE = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% set text = m.content %}"
    "{% if m.role == 'assistant' and loop.index0 < ns.last %}"
    "{% set text = text.split('</think>')[-1] %}{% endif %}"
    "[{{ m.role }}] {{ text }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] <think>{% endif %}"
)


@dataclass(frozen=True)
class TinyModel:
    """Where the model lies, and chat templates as files."""

    folder: Path
    reasoning_template: Path

    @property
    def name(self) -> str:
        """What a server is asked for: the path it was started with."""
        return str(self.folder)


def token_ids(text: str) -> list[int]:
    """What the tokenizer makes of `text`: one token per byte, specials first in the vocabulary."""
    return [byte_id(byte) for byte in text.encode()]


def byte_id(byte: int) -> int:
    """Token id of one byte."""
    return len(SPECIAL) + byte


def text_of(ids: list[int]) -> str:
    """Inverse of `token_ids` for ids that are bytes."""
    return bytes(i - len(SPECIAL) for i in ids).decode()


def ensure() -> TinyModel:
    """The model, made if it isn't there; several processes may ask at once."""
    name = hashlib.sha256(_recipe().encode()).hexdigest()[:12]
    folder = FOLDER / name
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "config.json").is_file():
            making = FOLDER / f"{name}.making"
            shutil.rmtree(making, ignore_errors=True)
            _make(making)
            shutil.rmtree(folder, ignore_errors=True)
            os.replace(making, folder)
    return TinyModel(folder, folder / "reasoning.jinja")


def _recipe() -> str:
    return json.dumps(
        [
            RECIPE_VERSION,
            (SEED, LAYERS, HIDDEN, HEADS, HEAD_SIZE, MAX_TOKENS, INIT_STD, SPECIAL),
            CHAT_TEMPLATE,
            REASONING_TEMPLATE,
        ]
    )


def _make(folder: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder.mkdir(parents=True)
    config = LlamaConfig(
        vocab_size=len(SPECIAL) + 256,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        head_dim=HEAD_SIZE,
        max_position_embeddings=MAX_TOKENS,
        initializer_range=INIT_STD,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(SEED)
    model = LlamaForCausalLM(config).to(torch.float32).eval()
    printable = torch.zeros(config.vocab_size, 1)
    printable[[byte_id(byte) for byte in PRINTABLE]] = 1.0
    with torch.no_grad():
        model.lm_head.weight.mul_(printable)
    model.save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    (folder / "reasoning.jinja").write_text(REASONING_TEMPLATE, encoding="utf-8")


def _tokenizer():  # type: ignore[no-untyped-def]
    """Byte-level BPE without merges: 256 bytes in order of value, behind the special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate(SPECIAL)}
    for byte, char in _byte_alphabet().items():
        vocabulary[char] = byte_id(byte)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        model_max_length=MAX_TOKENS,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def _byte_alphabet() -> dict[int, str]:
    """The character byte-level BPE writes for each byte: itself where it prints, else 256 + n."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    found = {byte: chr(byte) for byte in plain}
    found.update({byte: chr(256 + index) for index, byte in enumerate(others)})
    return found


if __name__ == "__main__":
    print(ensure().folder)
