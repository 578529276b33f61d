"""Tokenizers from GGUF files, compared with the tokenizers that were written into them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import pytest
from gguf_checkpoints import tokenizer as written_tokenizer
from gguf_checkpoints import write_gguf
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import GemmaTokenizer, LlamaTokenizer, PreTrainedTokenizerFast, Qwen2Tokenizer
from untouched import open_files, opened_since

from promoe.errors import CheckpointError
from promoe.model.gguf.pre_tokenizers import PRE_TOKENIZERS
from promoe.model.gguf.tokenizer import CONTROL, NORMAL, USER_DEFINED, make_tokenizer, read_tokenizer
from promoe.model.tokenizer import load_tokenizer, prompt_inputs

try:
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
except ImportError:  # an older Transformers
    GGUF_PRE_TOKENIZER_SPLITS = {}

TEXTS = [
    "",
    " ",
    "   ",
    "Hello world",
    " Hello  world ",
    "The quick brown fox isn't WE'LL done; 1234567 times!\n\n\n  x\t\ty\r\n",
    "naïve café, cafe\u0301 – Ünïcödé ñandú",
    "你好，世界。今天天气 is 好。テスト です 안녕하세요 Привет мир γειά σου",
    "emoji 😀👩‍👩‍👧 ❤️ \U0001d49c\U0001d4ea math ∑∫",
    "def f(x):\n    return x**2  # comment\n\n",
    "<|im_start|>user\nhi<|im_end|> <think> no <|im_end|><|im_end|>x",
    "a\u00a0b\u2028c\x00d\x7f",
    "CamelCaseWords XMLHttpRequest iPhone don'T",
    "https://example.org/a?b=c&d=%20#e",
]
CORPUS = [*TEXTS, *(f"{word}s and {word}ing {number}" for number, word in enumerate(["test", "model", "token"] * 30))]
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]


def trained(nfc: bool, pre_tokenizer: Any, size: int = 420) -> Tokenizer:
    bpe = Tokenizer(models.BPE())
    bpe.normalizer = normalizers.NFC() if nfc else None
    bpe.pre_tokenizer = pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=size, show_progress=False, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet())
    )
    bpe.train_from_iterator(CORPUS, trainer)
    return bpe


def parts_of(bpe: Tokenizer) -> tuple[dict[str, int], list[tuple[str, str]]]:
    model = json.loads(bpe.to_str())["model"]
    return model["vocab"], [tuple(merge) for merge in model["merges"]]


def write(
    path: Path,
    tokens: Sequence[str],
    types: Sequence[int],
    *,
    model: str = "gpt2",
    pre: str | None = None,
    merges: Sequence[tuple[str, str]] | None = None,
    scores: Sequence[float] | None = None,
    **fields: Any,
) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    for name in ("context_length", "embedding_length", "block_count", "head_count", "feed_forward_length"):
        getattr(writer, f"add_{name}")(64)  # without them, llama.cpp does not open the file
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    if merges is not None:
        writer.add_token_merges([" ".join(merge) for merge in merges])
    if scores is not None:
        writer.add_token_scores(scores)
    for name, value in fields.items():
        getattr(writer, f"add_{name}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def assert_alike(found: Any, expected: Any) -> None:
    assert len(found) == len(expected)
    for text in TEXTS:
        ids = expected(text)["input_ids"]
        assert found(text)["input_ids"] == ids, text
        assert found.decode(ids) == expected.decode(ids), text
        assert found.decode(ids, skip_special_tokens=True) == expected.decode(ids, skip_special_tokens=True), text


def test_the_tokenizer_of_qwen(tmp_path: Path) -> None:
    """Qwen2 composes characters, and has special tokens and others that are matched whole."""
    vocabulary, merges = parts_of(trained(True, Qwen2Tokenizer().backend_tokenizer.pre_tokenizer))
    expected = Qwen2Tokenizer(vocab=dict(vocabulary), merges=merges, pad_token="<|endoftext|>")
    expected.add_special_tokens({"additional_special_tokens": [AddedToken(one, special=True) for one in SPECIAL]})
    expected.add_tokens([AddedToken("<think>", normalized=False, special=False)])
    tokens = [token for token, _ in sorted(expected.get_vocab().items(), key=lambda one: one[1])]
    kinds = {**dict.fromkeys(SPECIAL, CONTROL), "<think>": USER_DEFINED}
    path = write(
        tmp_path / "m.gguf",
        tokens,
        [kinds.get(token, NORMAL) for token in tokens],
        pre="qwen2",
        merges=merges,
        eos_token_id=tokens.index("<|endoftext|>"),
        pad_token_id=tokens.index("<|endoftext|>"),
        add_bos_token=False,
    )
    found = load_tokenizer(str(path))
    assert_alike(found, expected)
    assert (found.eos_token, found.pad_token, found.bos_token) == ("<|endoftext|>", "<|endoftext|>", None)
    assert "<think>" in found.decode(found("<think>")["input_ids"], skip_special_tokens=True)


def test_texts_that_two_tokens_have(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Both ids decode to it, and the text is encoded as the later one."""
    vocabulary, merges = parts_of(trained(True, Qwen2Tokenizer().backend_tokenizer.pre_tokenizer))
    words = [token for token, _ in sorted(vocabulary.items(), key=lambda one: one[1])]
    tokens = [*words, "<|im_end|>", "<think>"]
    types = [NORMAL] * len(words) + [CONTROL, USER_DEFINED]
    merged = next(word for word in words if word.startswith("Ġ") and len(word) > 3)
    same = [merged, "A", "<|im_end|>", "<think>"]
    all_tokens = [*tokens, *same, "", ""]
    all_types = [*types, NORMAL, NORMAL, CONTROL, USER_DEFINED, NORMAL, NORMAL]
    path = write(tmp_path / "m.gguf", all_tokens, all_types, pre="qwen2", merges=merges, eos_token_id=len(words))
    found = load_tokenizer(str(path))
    assert "4 tokens whose text a later one has" in caplog.text
    assert len(found) == len(all_tokens)
    plain = load_tokenizer(str(write(tmp_path / "plain.gguf", tokens, types, pre="qwen2", merges=merges)))
    later = {tokens.index(text): len(tokens) + place for place, text in enumerate(same)}
    for text in [*TEXTS, "<think>A<|im_end|>"]:
        ids = plain(text)["input_ids"]
        assert found(text)["input_ids"] == [later.get(idx, idx) for idx in ids]
        for skip in (False, True):
            expected = plain.decode(ids, skip_special_tokens=skip)
            assert found.decode(ids, skip_special_tokens=skip) == expected
            assert found.decode([later.get(idx, idx) for idx in ids], skip_special_tokens=skip) == expected
    assert found.eos_token_id == len(words), "the id that the header names"
    empty = [len(all_tokens) - 2, len(all_tokens) - 1]
    assert found.decode(empty) == "".join(f"[EMPTY_{idx}]" for idx in empty)


def test_pieces_that_two_tokens_have(tmp_path: Path) -> None:
    """The same for SentencePiece, whose merges come from scores."""
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "a",
        "b",
        "ab",
        "▁ab",
        "b",
        "ab",
    ]
    types = [2, CONTROL, CONTROL, *[6] * 256, *[NORMAL] * 7]
    scores = [0.0] * 259 + [-9.0, -9.0, -9.0, -1.0, -2.0, -9.0, -1.0]
    ends = {"bos_token_id": 1, "eos_token_id": 2, "unk_token_id": 0}
    found = load_tokenizer(str(write(tmp_path / "m.gguf", tokens, types, model="llama", scores=scores, **ends)))
    assert found("ab abb")["input_ids"] == [1, 263, 263, 264]
    assert found("bab")["input_ids"] == [1, 259, 264, 265]
    assert found.decode([263, 261, 262, 264, 265]) == "abbabbab"


@pytest.mark.parametrize("kind", [NORMAL, CONTROL, USER_DEFINED])
def test_ends_of_a_wrong_type(tmp_path: Path, kind: int) -> None:
    """A token that ends answers is matched whole, and answers do not show it, as in llama.cpp."""
    vocabulary, merges = parts_of(trained(True, Qwen2Tokenizer().backend_tokenizer.pre_tokenizer))
    words = [token for token, _ in sorted(vocabulary.items(), key=lambda one: one[1])]
    tokens = [*words, "<|endoftext|>", "<|eot_id|>", "<|other|>"]
    types = [NORMAL] * len(words) + [CONTROL, kind, NORMAL]
    path = write(tmp_path / "m.gguf", tokens, types, pre="qwen2", merges=merges, eos_token_id=len(words))
    found = load_tokenizer(str(path))
    ids = found("<|eot_id|>")["input_ids"]
    assert ids == [len(words) + 1]
    assert found.decode(ids, skip_special_tokens=True) == ""
    assert len(found("<|other|>")["input_ids"]) > 1


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
def test_every_way_to_cut_words(tmp_path: Path, pre: str) -> None:
    """A tokenizer that was trained with it has the same ids when it is read from a file."""
    way = PRE_TOKENIZERS[pre]
    bpe = trained(way.nfc, way.build())
    bpe.decoder = decoders.ByteLevel()
    vocabulary, merges = parts_of(bpe)
    tokens = [token for token, _ in sorted(vocabulary.items(), key=lambda one: one[1])]
    path = write(tmp_path / "m.gguf", tokens, [NORMAL] * len(tokens), pre=pre, merges=merges)
    assert_alike(read_tokenizer(path), PreTrainedTokenizerFast(tokenizer_object=bpe))


@pytest.mark.parametrize("pre", sorted(set(PRE_TOKENIZERS) & set(GGUF_PRE_TOKENIZER_SPLITS)))
def test_words_are_cut_as_transformers_cuts_them(pre: str) -> None:
    split = pre_tokenizers.Split(Regex(GGUF_PRE_TOKENIZER_SPLITS[pre]), behavior="isolated")
    theirs = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    for text in TEXTS:
        assert PRE_TOKENIZERS[pre].build().pre_tokenize_str(text) == theirs.pre_tokenize_str(text)


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("deepseek-llm", "Hi  жук 12,\nაბ 你好", ["Hi", " ", " жук", " ", "1", "2", ",", "\n", "აბ", " ", "你好"]),
        ("deepseek-coder", "x1, = 你", ["x", "1", ",", " =", " ", "你"]),
        ("deepseek-v3", "it's 12345 テスト .Net", ["it", "'s", " ", "123", "45", " ", "テスト", " .", "Net"]),
        ("refact", "a 12", ["a", " ", "1", "2"]),
        ("gpt-2", "a 12  b", ["a", " 12", " ", " b"]),
        ("glm4", "I'M 1234", ["I", "'M", " ", "123", "4"]),
        ("gpt-4o", "iPhone's 1234", ["i", "Phone's", " ", "123", "4"]),
        ("tekken", "iPhone 12", ["i", "Phone", " ", "1", "2"]),
        ("kimi-k2", "iPhone你好s 1234", ["i", "Phone", "你好", "s", " ", "123", "4"]),
        ("qwen35", "e\u0301x 1", ["e\u0301x", " ", "1"]),
    ],
)  # fmt: skip
def test_words(pre: str, text: str, words: list[str]) -> None:
    pieces = PRE_TOKENIZERS[pre].build().pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in pieces] == words


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
def test_llama_cpp_has_the_same_ids(tmp_path: Path, pre: str) -> None:
    way = PRE_TOKENIZERS[pre]
    vocabulary, merges = parts_of(trained(way.nfc, way.build()))
    tokens = [token for token, _ in sorted(vocabulary.items(), key=lambda one: one[1])]
    types = [NORMAL] * len(tokens) + [CONTROL] * 3 + [USER_DEFINED]
    ends = {"bos_token_id": len(tokens), "eos_token_id": len(tokens) + 2}
    path = write(tmp_path / "m.gguf", [*tokens, *SPECIAL, "<think>"], types, pre=pre, merges=merges, **ends)
    # llama.cpp does not compose characters, and knows no marks in letters.
    assert_as_llama_cpp(path, [text for text in TEXTS if "e\u0301" not in text])


def assert_as_llama_cpp(path: Path, texts: Sequence[str]) -> None:
    llama_cpp = pytest.importorskip("llama_cpp")
    theirs, ours = llama_cpp.Llama(str(path), vocab_only=True, verbose=False), read_tokenizer(path)
    for text in filter(None, texts):
        assert ours(text)["input_ids"] == theirs.tokenize(text.encode(), add_bos=True, special=True), text
    theirs.close()


def test_sentencepiece(tmp_path: Path) -> None:
    """Merges are not in the file: they follow from the scores."""
    bpe = Tokenizer(models.BPE())
    bpe.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(vocab_size=500, show_progress=False)
    # llama.cpp aborts if there are tokens with zero bytes.
    bpe.train_from_iterator([word for text in CORPUS for word in text.split() if "\0" not in word], trainer)
    vocabulary, merges = parts_of(bpe)
    begins = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    made = [left + right for left, right in merges]
    characters = [token for token in vocabulary if token not in set(made)]
    tokens = [*begins, *dict.fromkeys(made), *characters]
    types = [2, CONTROL, CONTROL, *[6] * 256, *[NORMAL] * (len(tokens) - len(begins))]
    scores = [0.0] * len(begins) + [-float(rank) for rank in range(len(tokens) - len(begins))]
    path = write(
        tmp_path / "m.gguf",
        tokens,
        types,
        model="llama",
        scores=scores,
        bos_token_id=1,
        eos_token_id=2,
        unk_token_id=0,
        add_bos_token=True,
    )
    found = load_tokenizer(str(path))
    ids_of = {token: idx for idx, token in enumerate(tokens)}
    plain = Tokenizer(models.BPE(ids_of, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    plain.normalizer, plain.decoder = bpe.normalizer, LlamaTokenizer().backend_tokenizer.decoder
    plain.add_special_tokens(["<unk>", "<s>", "</s>"])
    for text in TEXTS:
        ids = found(text)["input_ids"]
        assert ids == [1, *plain.encode(text, add_special_tokens=False).ids], text
        assert found.decode(ids, skip_special_tokens=True) == text
    assert found("</s>x")["input_ids"][:2] == [1, 2]
    assert_as_llama_cpp(path, [text for text in TEXTS if "<|" not in text])  # which llama.cpp takes for control tokens
    assert (found.bos_token, found.eos_token, found.unk_token, found.pad_token) == ("<s>", "</s>", "<unk>", None)


def test_gemma(tmp_path: Path) -> None:
    """Merges are in the file, texts have no space in front, and BOS is left to the chat template."""
    bpe = Tokenizer(models.BPE())
    bpe.normalizer = normalizers.Replace(" ", "▁")
    trainer = trainers.BpeTrainer(vocab_size=400, show_progress=False)
    bpe.train_from_iterator([text for text in CORPUS if "\0" not in text], trainer)
    learned, merges = parts_of(bpe)
    begins = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens = [*begins, *(token for token in learned if token not in begins)]
    expected = GemmaTokenizer(vocab={token: idx for idx, token in enumerate(tokens)}, merges=merges)
    types = [CONTROL] * 5 + [6] * 256 + [NORMAL] * (len(tokens) - len(begins))
    path = write(
        tmp_path / "m.gguf",
        tokens,
        types,
        model="gemma4",
        merges=merges,
        eos_token_id=1,
        bos_token_id=2,
        unk_token_id=3,
        pad_token_id=0,
        add_bos_token=True,
    )
    assert_alike(load_tokenizer(str(path)), expected)


def test_a_model_s_file(tmp_path: Path) -> None:
    path = write_gguf(tmp_path, "qwen3_moe", parts=2)
    found, expected = load_tokenizer(str(tmp_path)), written_tokenizer()
    assert_alike(found, expected)
    assert found.chat_template == expected.chat_template
    encoded = prompt_inputs(found, "hi")["input_ids"]
    assert encoded.tolist() == prompt_inputs(expected, "hi")["input_ids"].tolist()
    assert read_tokenizer(path).eos_token == expected.eos_token


@pytest.mark.parametrize(
    ("fields", "ids"),
    [
        ({}, [2]),
        ({"add_bos_token": True}, [0, 2]),
        ({"add_bos_token": True, "add_eos_token": True}, [0, 2, 1]),
        ({"pre": "llama-bpe"}, [0, 2]),
        ({"pre": "llama-bpe", "add_bos_token": False}, [2]),
    ],
)
def test_ends_of_a_text(fields: dict[str, Any], ids: list[int]) -> None:
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": ["<s>", "</s>", "a"],
        "tokenizer.ggml.token_type": [CONTROL, CONTROL, NORMAL],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        **{f"tokenizer.ggml.{name}": value for name, value in fields.items()},
    }
    assert make_tokenizer(Path("m"), metadata)("a")["input_ids"] == ids


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"tokens": []}, "it has no tokens"),
        ({"tokens": None}, "it has no tokens"),
        ({"tokens": [1, 2]}, "tokens is [1, 2], not a list of str"),
        ({"model": "bert"}, "its kind is 'bert', and only 'gpt2', 'llama' and 'gemma4'"),
        ({"pre": "newest"}, "its pre-tokenizer 'newest' is not known (known: chatglm-bpe"),
        ({"pre": ["x"]}, "its pre-tokenizer ['x'] is not known"),
        ({"token_type": [1]}, "token_type has 1 elements, and there are 2 tokens"),
        ({"merges": ["ab"]}, "a merge is 'ab', and two tokens"),
        ({"merges": ["a c"]}, "Token `c` out of vocabulary"),
        ({"model": "llama"}, "neither merges nor scores"),
        ({"model": "llama", "scores": ["x", "y"]}, "scores is ['x', 'y'], not a list of float"),
    ],
)
def test_faults_are_named(tmp_path: Path, fields: dict[str, Any], what: str) -> None:
    values = {"model": "gpt2", "tokens": ["a", "b"], **fields}
    metadata = {f"tokenizer.ggml.{name}": value for name, value in values.items() if value is not None}
    with pytest.raises(CheckpointError) as caught:
        make_tokenizer(tmp_path / "m.gguf", metadata)
    message = str(caught.value)
    assert message.startswith(f"Cannot make the tokenizer that {tmp_path / 'm.gguf'} describes: ")
    assert what in message


def test_a_way_that_is_not_named_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    make_tokenizer(Path("m"), {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a"]})
    assert "does not say how text is cut into words" in caplog.text


def test_no_file_is_left_open(tmp_path: Path) -> None:
    path = write_gguf(tmp_path, "qwen3_moe")
    files = open_files()
    read_tokenizer(path)
    assert not opened_since(files)
