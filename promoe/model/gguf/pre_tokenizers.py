"""How text is cut into words before a byte-level tokenizer merges bytes, by llama.cpp's names for it.

A GGUF file names only the way (`tokenizer.ggml.pre`). Each way is a list of regular expressions, one after the other; what
matches is a word of its own. They are those of the tokenizers that the models were published with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_ENGLISH = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"


def _words(digits: str, letters: str = r"\p{L}", others: str = r"[^\s\p{L}\p{N}]") -> str:
    """Return the expression of GPT-4 and its descendants: words, numbers, signs and spaces."""
    return rf"{_ENGLISH}|{_BEFORE}{letters}+|{digits}| ?{others}+[\r\n]*|{_SPACES}"


def _cased(digits: str, after: str = "", without: str = "", ends: str = r"\r\n/") -> str:
    """Return the expression that also cuts where a small letter is followed by a capital one."""
    upper = rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{without}]"
    lower = rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{without}]"
    words = rf"{_BEFORE}{upper}*{lower}+{after}|{_BEFORE}{upper}+{lower}*{after}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[{ends}]*|{_SPACES}"


# Letters with case, of an older Unicode: without these.
_NO_LETTERS = (
    r"\x{560}-\x{588}\x{10C7}-\x{10FF}\x{1C80}-\x{1C88}\x{2D00}-\x{2D2D}\x{A790}-\x{AB68}\x{10570}-\x{105BC}"
    r"\x{16E40}-\x{16E7F}\x{1D400}-\x{1DF1E}"
)
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[\p{{Lu}}\p{{Ll}}\p{{Lt}}&&[^{_NO_LETTERS}]]+",
    r"\s?[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3000}-\x{3002}]+",
    r"\s+$",
    r"[\x{4E00}-\x{9FA5}\x{800}-\x{4E00}\x{AC00}-\x{D7FF}]+",
    r"\p{N}",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_LLM[4], r"\p{N}")
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    r"[\x{4E00}-\x{9FA5}\x{3040}-\x{30FF}]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"""
    + _SPACES,
)


@dataclass(frozen=True)
class PreTokenizer:
    """One way to cut text.

    Attributes:
        splits: regular expressions, in the syntax of the tokenizers library.
        gpt2: whether GPT-2's own expression follows them.
        nfc: whether characters are composed first (Unicode's normal form C).
        whole_words: whether a word that is a token is not made of merges.
        adds_bos: whether texts begin with the BOS token if the file does not say so.
    """

    splits: Sequence[str] = ()
    gpt2: bool = False
    nfc: bool = False
    whole_words: bool = False
    adds_bos: bool = False

    def build(self) -> Any:
        """Return it as a pre-tokenizer of the tokenizers library, which also turns bytes into letters."""
        from tokenizers import Regex, pre_tokenizers

        steps = [pre_tokenizers.Split(Regex(split), behavior="isolated") for split in self.splits]
        return pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.gpt2)])


_GPT2 = PreTokenizer(gpt2=True)
_DIGITS = PreTokenizer((r"\p{N}",), gpt2=True)
_GPT4 = PreTokenizer((_words(r"\p{N}{1,3}"),))
_LLAMA3 = PreTokenizer(_GPT4.splits, whole_words=True, adds_bos=True)
_QWEN2 = PreTokenizer((_words(r"\p{N}"),))
_KIMI = r"\p{Han}+|" + _cased(r"\p{N}{1,3}", f"{_ENGLISH}?", r"&&[^\p{Han}]", ends=r"\r\n")
_GPT4O = PreTokenizer((_cased(r"\p{N}{1,3}", after=f"{_ENGLISH}?"),))

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    **dict.fromkeys(("gpt-2", "mpt", "jais", "trillion", "granite-docling", "phi-2", "gigachat", "mellum"), _GPT2),
    "olmo": PreTokenizer(gpt2=True, nfc=True),
    **dict.fromkeys(("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b"), _DIGITS),
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"), _LLAMA3
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), _GPT4),
    "qwen2": PreTokenizer(_QWEN2.splits, nfc=True),
    **dict.fromkeys(("deepseek-r1-qwen", "kormo", "f2llmv2", "megrez", "stablelm2", "hunyuan", "grok-2"), _QWEN2),
    "qwen35": PreTokenizer((_words(r"\p{N}", r"[\p{L}\p{M}]", r"[^\s\p{L}\p{M}\p{N}]"),), nfc=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), _GPT4O),
    "tekken": PreTokenizer((_cased(r"\p{N}"),), whole_words=True, adds_bos=True),
    "deepseek-llm": PreTokenizer(_DEEPSEEK_LLM),
    "deepseek-coder": PreTokenizer(_DEEPSEEK_CODER),
    "kimi-k2": PreTokenizer((_KIMI,)),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), PreTokenizer(_DEEPSEEK_V3)),
}
