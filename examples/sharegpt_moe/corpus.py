"""ShareGPT as token streams: which conversations, which of them held out, the tokenizer and its chat template.

The filter keeps English prose that a small model can learn something from: conversations with no
code fences, hardly any non-ASCII or markup characters and the share of function words that English has. Run as a
script, it writes `heldout_prompts.json`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import dropwhile, islice
from os import PathLike
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from promoe.training.sharegpt import Conversation, Turn, read_conversations

BEGIN, END, PAD, HUMAN, GPT = "<|begin|>", "<|end|>", "<|pad|>", "<|human|>", "<|gpt|>"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|gpt|>' if message['role'] == 'assistant' else '<|human|>' }}{{ message['content'] }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}<|gpt|>{% endif %}"
)
PROMPTS = Path(__file__).with_name("heldout_prompts.json")
HELDOUT_ONE_IN = 50
MAX_TOKENS = 2048  # of one conversation: variety is worth more to a small model than the ends of long chats

_ROLES = {"human": HUMAN, "user": HUMAN, "gpt": GPT, "chatgpt": GPT, "bing": GPT, "bard": GPT}
_NAME = re.compile(r"[^.?!]\s+\"?[A-Z][a-z]|[\\@]")  # a capital inside a sentence: people and firms, mostly
_MARKUP = re.compile(r"[{}\[\]<>|\\=;_`#~^@$/]")
_WORD = re.compile(r"[A-Za-z']+")
_FUNCTION_WORDS = frozenset(
    re.findall(
        r"\w+",
        "a an and are as at be but by can for from has have he her his i in is it its my not of on or our she so that "
        "the their they this to was we were which will with would you your",
    )
)


@dataclass(frozen=True)
class Corpus:
    """Token streams of the kept conversations, one after the other: uint16 `[num_tokens]`."""

    train: NDArray[np.uint16]
    heldout: NDArray[np.uint16]
    conversations: tuple[int, int]  # train, held out


def is_heldout(conversation: Conversation) -> bool:
    """One conversation in 50, by a hash of its id without the part number: all parts fall on the same side."""
    digest = hashlib.sha256(conversation.stem.encode()).digest()
    return int.from_bytes(digest[:8], "big") % HELDOUT_ONE_IN == 0


def is_english_prose(text: str) -> bool:
    """Return whether `text` passes the filter of the module's docstring."""
    if len(text) < 80 or "```" in text:
        return False
    if sum(map(len, re.findall(r"[^\x00-\x7f]+", text))) > 0.01 * len(text):
        return False
    if len(_MARKUP.findall(text)) > 0.005 * len(text):
        return False
    words = _WORD.findall(text.lower())
    return len(words) * 8 > len(text) and sum(word in _FUNCTION_WORDS for word in words) > 0.25 * len(words)


def kept_turns(conversation: Conversation) -> tuple[Turn, ...]:
    """Return the turns to train on, in order; none if the filter drops the conversation."""
    turns = tuple(turn for turn in conversation.turns if turn.text.strip())
    # A later part of a conversation starts with the answer that ended the part before: seen there already.
    turns = tuple(dropwhile(lambda turn: _ROLES.get(turn.speaker) != HUMAN, turns))
    if len(turns) < 2 or any(turn.speaker not in _ROLES for turn in turns):
        return ()
    return turns if is_english_prose("\n".join(turn.text for turn in turns)) else ()


def render(turns: Iterable[Turn]) -> str:
    """Return the text of a conversation with special tokens, as the chat template writes it."""
    return BEGIN + "".join(_ROLES[turn.speaker] + turn.text.strip() + END for turn in turns)


def split_conversations(path: str | PathLike[str] | None, limit: int | None = None) -> tuple[list[str], list[str]]:
    """Return rendered (train, held-out) conversations of the first `limit` records of a ShareGPT file."""
    sides: tuple[list[str], list[str]] = ([], [])
    for conversation in islice(read_conversations(path), limit):
        if turns := kept_turns(conversation):
            sides[is_heldout(conversation)].append(render(turns))
    return sides


def heldout_prompts(path: str | PathLike[str] | None = None, count: int = 24) -> list[str]:
    """Return first human turns of held-out conversations, in file order: one line of 40 to 220 characters, naming nobody."""

    def candidates() -> Iterator[str]:
        for conversation in read_conversations(path):
            if not conversation.id.endswith("_0") or not is_heldout(conversation):
                continue
            if not (turns := kept_turns(conversation)):
                continue
            text = turns[0].text.strip()
            if 40 <= len(text) <= 220 and "\n" not in text and not _NAME.search(text):
                yield text

    return list(islice(candidates(), count))


def train_tokenizer(texts: list[str], vocab_size: int, model_max_length: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE on `texts` and wrap it, with special tokens and chat template, for transformers."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[BEGIN, END, PAD, HUMAN, GPT],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=BEGIN,
        eos_token=END,
        pad_token=PAD,
        extra_special_tokens={"human_token": HUMAN, "gpt_token": GPT},
        chat_template=CHAT_TEMPLATE,
        model_max_length=model_max_length,
        clean_up_tokenization_spaces=False,
    )


def tokenize(tokenizer: PreTrainedTokenizerFast, texts: list[str], max_tokens: int = MAX_TOKENS) -> NDArray[np.uint16]:
    """Encode rendered conversations, cut each after `max_tokens`, and put them one after the other."""
    encodings = tokenizer.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    return np.concatenate([np.asarray(encoding.ids[:max_tokens], dtype=np.uint16) for encoding in encodings])


def build_corpus(
    path: str | PathLike[str] | None, vocab_size: int, model_max_length: int, limit: int | None = None, seed: int = 0
) -> tuple[Corpus, PreTrainedTokenizerFast]:
    """Read, filter, split, train the tokenizer on the training side, and encode both sides.

    The training conversations are shuffled with `seed`; the held-out ones keep the order of the file.
    """
    train, heldout = split_conversations(path, limit)
    np.random.default_rng(seed).shuffle(train)
    tokenizer = train_tokenizer(train, vocab_size, model_max_length)
    corpus = Corpus(tokenize(tokenizer, train), tokenize(tokenizer, heldout), (len(train), len(heldout)))
    return corpus, tokenizer


def save_corpus(folder: Path, corpus: Corpus, tokenizer: PreTrainedTokenizerFast) -> None:
    """Write the token streams and the tokenizer for a resumed run."""
    tokenizer.save_pretrained(folder / "tokenizer")
    np.savez(folder / "tokens.npz", train=corpus.train, heldout=corpus.heldout, conversations=corpus.conversations)


def load_corpus(folder: Path) -> tuple[Corpus, PreTrainedTokenizerFast]:
    """Read what `save_corpus` wrote."""
    tokens = np.load(folder / "tokens.npz")
    train, heldout = (int(count) for count in tokens["conversations"])
    return (
        Corpus(tokens["train"], tokens["heldout"], (train, heldout)),
        PreTrainedTokenizerFast.from_pretrained(folder / "tokenizer"),
    )


if __name__ == "__main__":
    PROMPTS.write_text(json.dumps(heldout_prompts(), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
