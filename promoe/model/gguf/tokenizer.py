"""Make the tokenizer that a GGUF file describes: byte-level ("gpt2") or SentencePiece ("llama", "gemma4") BPE.

It is made here, of the tokenizers library, rather than by Transformers, whose versions differ in which files they can read.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from promoe.errors import CheckpointError, shown
from promoe.model.gguf.ends import end_tokens
from promoe.model.gguf.pre_tokenizers import PRE_TOKENIZERS
from promoe.stores.tensor_files import TensorFile

logger = logging.getLogger(__name__)

# Of `tokenizer.ggml.token_type`.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
# Transformers' names of tokens, and those of GGUF.
_ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
# The tokenizers library has one id per text. Of tokens with the same text, all but the last one get this and their id at
# the end of theirs, which the decoder takes away. It is a noncharacter of Unicode, which texts do not have.
_SAME = "\ufdd0"
# A token that is longer is not cut into merges: each cut is as long as the token.
LONGEST_MERGED = 512


def read_tokenizer(path: Path) -> Any:
    """Return the tokenizer in a GGUF file, or in the first of its parts.

    Raises:
        CheckpointError: there is none, it is damaged, or of a kind that is not known.
    """
    file = TensorFile.open(path)
    file.close()
    return make_tokenizer(path, file.metadata or {})


def make_tokenizer(path: Path, metadata: Mapping[str, Any]) -> Any:
    """Return the tokenizer that the metadata of a GGUF file describes. Raises as `read_tokenizer`."""
    from transformers import PreTrainedTokenizerFast

    description = _Description(path, metadata)
    made = description.build()
    template = metadata.get("tokenizer.chat_template")
    special = {f"{role}_token": description.token(name) for role, name in _ROLES.items()}
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        clean_up_tokenization_spaces=False,
        chat_template=template if isinstance(template, str) else None,
        **{role: token for role, token in special.items() if token is not None},
    )


class _Description:
    """The metadata of a tokenizer, checked."""

    def __init__(self, path: Path, metadata: Mapping[str, Any]) -> None:
        self._path = path
        self._metadata = metadata
        # llama.cpp has this name for a token without text.
        texts = [text or f"[EMPTY_{idx}]" for idx, text in enumerate(self._list("tokens", str))]
        if not texts:
            raise self._error("it has no tokens")
        last = {text: idx for idx, text in enumerate(texts)}
        self._num_same = len(texts) - len(last)
        self.tokens = [text if last[text] == idx else f"{text}{_SAME}{idx}" for idx, text in enumerate(texts)]
        self.vocabulary = {token: idx for idx, token in enumerate(self.tokens)}
        self._types = [*(self._list("token_type", int, len(self.tokens)) or [NORMAL] * len(self.tokens))]

    def build(self) -> Any:
        """Return it as a tokenizer of the tokenizers library."""
        from tokenizers import AddedToken

        kind = self._get("model")
        if kind not in ("gpt2", "llama", "gemma4"):
            raise self._error(f"its kind is {shown(kind)}, and only 'gpt2', 'llama' and 'gemma4' can be made")
        try:
            made, adds_bos = self._byte_level() if kind == "gpt2" else self._sentencepiece(kind == "gemma4")
            if self._num_same:
                self._decode_all(made)
            self._mend_types(made, by_bytes=kind == "gpt2")
            special = [AddedToken(token, normalized=False, special=True) for token in self._of_type(CONTROL)]
            plain = [AddedToken(token, normalized=False, special=False) for token in self._of_type(USER_DEFINED)]
            made.add_special_tokens(special)
            made.add_tokens(plain)
            self._set_ends(made, adds_bos)
        except Exception as error:  # the tokenizers library raises plain Exception
            if isinstance(error, CheckpointError):
                raise
            raise self._error(f"{type(error).__name__}: {str(error)[:1000]}") from error
        return made

    def token(self, role: str) -> str | None:
        """Return the token that the file names for a role, such as "eos"; None: it names none."""
        idx = self._get(f"{role}_token_id")
        return self.tokens[idx] if type(idx) is int and 0 <= idx < len(self.tokens) else None

    def _byte_level(self) -> tuple[Any, bool | None]:
        from tokenizers import Tokenizer, decoders, models, normalizers

        name = self._get("pre")
        if name is not None and str(name) not in PRE_TOKENIZERS:
            raise self._error(
                f"its pre-tokenizer {shown(name)} is not known (known: {', '.join(sorted(PRE_TOKENIZERS))})"
            )
        if name is None:
            logger.warning(
                "%s does not say how text is cut into words. It is cut as for GPT-2; ids may differ.", self._path
            )
        way = PRE_TOKENIZERS["gpt-2" if name is None else str(name)]
        merges = [self._pair(merge) for merge in self._list("merges", str)]
        made = Tokenizer(models.BPE(self.vocabulary, merges, fuse_unk=False, ignore_merges=way.whole_words))
        if way.nfc:
            made.normalizer = normalizers.NFC()
        made.pre_tokenizer = way.build()
        made.decoder = decoders.ByteLevel()
        return made, way.adds_bos

    def _sentencepiece(self, is_gemma4: bool) -> tuple[Any, bool | None]:
        from tokenizers import Tokenizer, decoders, models, normalizers

        given = self._list("merges", str)
        merges = [self._pair(merge) for merge in given] if given else self._merges_by_score()
        unknown = self.token("unknown") or next(iter(self._of_type(UNKNOWN)), None)
        made = Tokenizer(models.BPE(self.vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
        prefix = not is_gemma4 and self._get("add_space_prefix") is not False
        steps: list[Any] = [normalizers.Prepend("▁")] if prefix else []
        made.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
        strip = [decoders.Strip(" ", left=1)] if prefix else []
        made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
        # Gemma 4's file asks for BOS, but its tokenizer adds none: the chat template has it.
        return made, None if is_gemma4 else True

    def _merges_by_score(self) -> list[tuple[str, str]]:
        """Return the merges that lead to every token from two others, those to tokens with higher scores first."""
        scores = self._list("scores", float, len(self.tokens))
        if not scores:
            raise self._error("it has neither merges nor scores")
        found: list[tuple[float, int, int, str, str]] = []
        for token, kind, score in zip(self.tokens, self._types, scores, strict=True):
            if kind not in (NORMAL, USER_DEFINED) or len(token) > LONGEST_MERGED:
                continue
            for cut in range(1, len(token)):
                left, right = self.vocabulary.get(token[:cut]), self.vocabulary.get(token[cut:])
                if left is not None and right is not None:
                    found.append((-score, left, right, token[:cut], token[cut:]))
        found.sort(key=lambda one: one[:3])
        return [(left, right) for *_, left, right in found]

    def _decode_all(self, made: Any) -> None:
        """Let all ids of a text decode to it. Texts are encoded as the last one."""
        from tokenizers import Regex, decoders

        logger.warning(
            "%s has %d tokens whose text a later one has, too: texts get the later id. llama.cpp refuses such files.",
            self._path,
            self._num_same,
        )
        made.decoder = decoders.Sequence([decoders.Replace(Regex(rf"{_SAME}\d+\z"), ""), made.decoder])

    def _mend_types(self, made: Any, by_bytes: bool) -> None:
        """Take ends of answers for control tokens, which answers do not show. What merges lead to stays a word."""
        for idx in end_tokens(self._metadata):
            is_word = self._types[idx] == NORMAL and (not by_bytes or idx in made.encode(self.tokens[idx]).ids)
            if self._types[idx] in (NORMAL, USER_DEFINED) and not is_word:
                self._types[idx] = CONTROL

    def _set_ends(self, made: Any, adds_bos: bool | None) -> None:
        """Let texts begin with BOS and end with EOS, if the file says so.

        Args:
            made: the tokenizer.
            adds_bos: whether it adds BOS if the file says nothing; None: never.
        """
        from tokenizers import processors

        bos, eos = self._get("add_bos_token"), self._get("add_eos_token")
        first = self.token("bos") if adds_bos is not None and (adds_bos if bos is None else bos is True) else None
        last = self.token("eos") if eos is True else None
        named = [token for token in (first, last) if token is not None]
        if not named:
            return
        single = [*([first] if first else []), "$A", *([last] if last else [])]
        pair = [*single, *(f"{one}:1" if one != "$A" else "$B:1" for one in single)]
        made.post_processor = processors.TemplateProcessing(
            single=single, pair=pair, special_tokens=[(token, self.vocabulary[token]) for token in dict.fromkeys(named)]
        )

    def _of_type(self, kind: int) -> list[str]:
        return [token for token, one in zip(self.tokens, self._types, strict=True) if one == kind]

    def _pair(self, merge: str) -> tuple[str, str]:
        left, space, right = merge.partition(" ")
        if not (left and space and right):
            raise self._error(f"a merge is {shown(merge)}, and two tokens with a space between them were expected")
        return left, right

    def _list(self, name: str, kind: type, length: int | None = None) -> list[Any]:
        found = self._get(name)
        if found is None:
            return []
        kinds = (int, float) if kind is float else kind
        if not isinstance(found, list) or not all(isinstance(one, kinds) for one in found):
            raise self._error(f"tokenizer.ggml.{name} is {shown(found)}, not a list of {kind.__name__}")
        if length is not None and len(found) != length:
            raise self._error(f"tokenizer.ggml.{name} has {len(found)} elements, and there are {length} tokens")
        return found

    def _get(self, name: str) -> Any:
        return self._metadata.get(f"tokenizer.ggml.{name}")

    def _error(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"Cannot make the tokenizer that {self._path} describes: {what}. The model can be opened (promoe.from_pretrained): "
            "use the tokenizer of the original model with it, or another GGUF file."
        )
