from __future__ import annotations

import copy
import gc
import pickle
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any

import pytest
import torch
from served import PROMPTS, greedy, served
from tiny_models import build
from torch import nn
from transformers import DynamicCache

import promoe
from promoe.errors import PatchStateError
from promoe.model import passes
from promoe.model.passes import PassObserver, PassState
from promoe.scheduler.reuse import MAX_TOKENS_LEARNED
from promoe.stats.recorder import Recorder


class Model(nn.Module):
    """Anything that is called as a transformers model is; `inside` runs in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inside: Callable[[], Any] = lambda: None

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.inside()
        return torch.zeros(1)


class Watched:
    """A model under observation, and what was seen of it."""

    def __init__(self) -> None:
        self.model = Model()
        self.lock = threading.Lock()
        self.recorder = Recorder([4], [100])
        self.ended: list[tuple[PassState, float]] = []
        self.observer = PassObserver(self.recorder, self.lock, lambda *ended: self.ended.append(ended))
        self.detach = self.observer.attach(self.model)

    def states(self, *args: Any, **kwargs: Any) -> PassState:
        """The state inside a pass with these arguments."""
        seen: list[PassState] = []
        self.model.inside = lambda: seen.append(self.observer.current())
        self.model(*args, **kwargs)
        self.model.inside = lambda: None
        return seen[0]


@pytest.fixture
def watched() -> Iterator[Watched]:
    watched = Watched()
    yield watched
    watched.detach()


def ids(batch: int, length: int) -> torch.Tensor:
    return torch.ones(batch, length, dtype=torch.long)


def cached(num_tokens: int) -> DynamicCache:
    cache = DynamicCache()
    if num_tokens:
        cache.update(torch.zeros(1, 1, num_tokens, 2), torch.zeros(1, 1, num_tokens, 2), 0)
    return cache


def mask(*rows: str) -> torch.Tensor:
    """`mask("011", "111")`: the first of three tokens of the first sequence is padding."""
    return torch.tensor([[int(position) for position in row] for row in rows])


# -- phase and sequences ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "kwargs", "phase", "num_sequences", "num_tokens"),
    [
        ((), {"input_ids": ids(1, 12)}, "prefill", 1, 12),
        ((), {"input_ids": ids(1, 1)}, "decode", 1, 1),
        ((), {"input_ids": ids(3, 1)}, "decode", 3, 3),
        ((), {"input_ids": ids(3, 2)}, "prefill", 3, 6),
        ((ids(2, 5),), {}, "prefill", 2, 10),
        ((None, ids(2, 5)), {}, "prefill", 2, 10),
        ((), {"inputs_embeds": torch.zeros(2, 5, 64)}, "prefill", 2, 10),
        ((), {"inputs_embeds": torch.zeros(2, 1, 64)}, "decode", 2, 2),
        ((), {"input_ids": None, "inputs_embeds": torch.zeros(2, 5, 64)}, "prefill", 2, 10),
        ((), {"decoder_input_ids": ids(2, 1)}, "decode", 2, 2),
        ((), {"labels": None}, "decode", 1, 1),
        # Continuous batching lays sequences end to end: three of one token each; and one such beside one of two.
        ((), {"input_ids": ids(1, 3), "cu_seq_lens_q": torch.tensor([0, 1, 2, 3])}, "decode", 3, 3),
        ((), {"input_ids": ids(1, 3), "cu_seq_lens_q": torch.tensor([0, 1, 3])}, "prefill", 1, 3),
        # A draft model's proposals are checked with what is cached; a prompt may be read so, too.
        ((), {"input_ids": ids(1, 3), "logits_to_keep": 3, "past_key_values": cached(5)}, "decode", 1, 3),
        ((), {"input_ids": ids(1, 3), "logits_to_keep": 3, "past_key_values": cached(0)}, "prefill", 1, 3),
        ((), {"input_ids": ids(1, 3), "logits_to_keep": 3}, "prefill", 1, 3),
        ((), {"input_ids": ids(1, 3), "logits_to_keep": 1, "past_key_values": cached(5)}, "prefill", 1, 3),
        ((), {"input_ids": ids(1, 3), "logits_to_keep": torch.arange(3), "past_key_values": None}, "prefill", 1, 3),
    ],
)
def test_phase_and_tokens(
    watched: Watched, args: Any, kwargs: Any, phase: str, num_sequences: int, num_tokens: int
) -> None:
    state = watched.states(*args, **kwargs)
    assert (state.phase, state.num_sequences) == (phase, num_sequences)
    assert state.real is None
    stats = watched.recorder.phase_stats(phase)  # type: ignore[arg-type]
    assert (stats.passes, stats.tokens, stats.sequences) == (1, num_tokens, num_sequences)


# -- padding ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.long, torch.bool, torch.float32], ids=str)
def test_padding_is_not_counted(watched: Watched, dtype: torch.dtype) -> None:
    state = watched.states(input_ids=ids(2, 3), attention_mask=mask("001", "111").to(dtype))
    assert state.real is not None
    assert state.real.tolist() == [False, False, True, True, True, True]
    assert watched.recorder.phase_stats("prefill").tokens == 4


def test_a_mask_that_covers_the_cache_too_is_about_its_last_columns(watched: Watched) -> None:
    """Chunked prefill: 3 new tokens after 2 cached ones."""
    state = watched.states(input_ids=ids(2, 3), attention_mask=mask("00011", "11111"))
    assert state.real is not None
    assert state.real.tolist() == [False, True, True, True, True, True]
    state = watched.states(input_ids=ids(2, 3), attention_mask=mask("00111", "11111"))
    assert state.real is None


@pytest.mark.parametrize(
    "attention_mask",
    [None, mask("111", "111"), mask("011"), mask("01", "11"), torch.zeros(2, 1, 3, 3), {"full_attention": None}],
    ids=["none", "no padding", "another batch", "too short", "4-d", "a dict"],
)
def test_where_nothing_is_known_nothing_is_padding(watched: Watched, attention_mask: Any) -> None:
    assert watched.states(input_ids=ids(2, 3), attention_mask=attention_mask).real is None
    assert watched.recorder.phase_stats("prefill").tokens == 6


def test_a_decoded_token_is_never_padding(watched: Watched) -> None:
    state = watched.states(input_ids=ids(2, 1), attention_mask=mask("0011", "1110"))
    assert state.real is None
    assert watched.recorder.phase_stats("decode").tokens == 2


def index_of(num_tokens: int) -> torch.Tensor:
    """Experts `[T, 2]` that say which token chose them."""
    return torch.arange(2 * num_tokens).reshape(num_tokens, 2)


def test_experts_of_real_tokens() -> None:
    index = index_of(4)
    state = PassState(real=torch.tensor([False, True, False, True]))
    assert state.real_tokens(index, index.tolist()) == [[2, 3], [6, 7]]
    assert state.real_tokens(index, None) == [[2, 3], [6, 7]]
    assert PassState().real_tokens(index, index.tolist()) == index.tolist()
    assert PassState().real_tokens(index, None) == index.tolist()


def test_a_layer_that_sees_other_tokens_than_the_pass_takes_all_of_them() -> None:
    state = PassState(real=torch.tensor([False, True, False, True]))
    assert state.real_tokens(index_of(3), None) == index_of(3).tolist()


def test_of_a_long_prompt_the_last_real_tokens_are_learned() -> None:
    num_tokens = MAX_TOKENS_LEARNED + 50
    index = index_of(num_tokens)
    assert PassState().real_tokens(index, None) == index[50:].tolist()
    real = torch.ones(num_tokens, dtype=torch.bool)
    real[-10:] = False  # right padding
    assert PassState(real=real).real_tokens(index, None) == index[40:-10].tolist()


def test_of_several_prompts_tokens_of_one_position_are_equally_old() -> None:
    index = torch.arange(6).reshape(6, 1)  # two sequences of three
    state = PassState(num_sequences=2)
    assert state.real_tokens(index, index.tolist()) == [[0], [3], [1], [4], [2], [5]]
    state.phase = "decode"  # proposals for two sequences
    assert state.real_tokens(index, index.tolist()) == [[0], [3], [1], [4], [2], [5]]
    state.real = torch.tensor([False, True, True, True, True, True])  # the first begins with padding
    assert state.real_tokens(index, index.tolist()) == [[3], [1], [4], [2], [5]]
    decode = PassState(phase="decode", num_sequences=2)
    assert decode.real_tokens(index[:2], index[:2].tolist()) == [[0], [1]]


def test_of_many_prompts_the_ends_of_all_are_learned() -> None:
    length = MAX_TOKENS_LEARNED
    index = torch.arange(2 * length).reshape(-1, 1)
    learned = PassState(num_sequences=2).real_tokens(index, None)
    half = MAX_TOKENS_LEARNED // 2
    assert learned == [[idx] for i in range(length - half, length) for idx in (i, length + i)]


# -- a pass and its end -----------------------------------------------------------------------------------------


def test_passes_are_numbered_and_end_once(watched: Watched) -> None:
    states = [watched.states(input_ids=ids(1, length)) for length in (4, 1, 1)]
    assert [state.pass_idx for state in states] == [1, 2, 3]
    assert [state for state, _ in watched.ended] == states
    assert all(duration_s >= 0 for _, duration_s in watched.ended)
    assert watched.recorder.phase_stats("decode").passes == 2
    total_s = sum(watched.recorder.phase_stats(phase).duration_s for phase in ("prefill", "decode"))
    assert total_s == pytest.approx(sum(duration_s for _, duration_s in watched.ended))


def test_each_pass_starts_with_nothing_gated_or_entered(watched: Watched) -> None:
    watched.states(input_ids=ids(1, 4)).gated.add(0)
    state = watched.states(input_ids=ids(1, 4))
    assert state.gated == set() == state.entered


def test_outside_of_a_pass_there_is_a_nameless_one(watched: Watched) -> None:
    state = watched.observer.current()
    assert (state.pass_idx, state.phase, state.num_sequences, state.real) == (0, "prefill", 1, None)
    assert watched.observer.current() is state
    watched.states(input_ids=ids(3, 1))
    after = watched.observer.current()
    assert after.pass_idx == 0
    assert after is not state


def test_an_exception_aborts_the_pass_and_the_next_is_its_own(watched: Watched) -> None:
    watched.model.inside = lambda: 1 // 0
    with pytest.raises(ZeroDivisionError):
        watched.model(input_ids=ids(2, 3), attention_mask=mask("001", "111"))
    assert watched.ended == []
    stats = watched.recorder.phase_stats("prefill")
    assert (stats.passes, stats.passes_aborted, stats.tokens, stats.duration_s) == (0, 1, 0, 0.0)
    assert watched.observer.current().pass_idx == 0
    assert watched.states(input_ids=ids(2, 3)).real is None
    assert watched.recorder.phase_stats("prefill").passes == 1


def test_a_pass_that_was_interrupted_is_closed_by_the_next(watched: Watched) -> None:
    """Ctrl-C ends a forward without calling any hook."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    watched.model.inside = interrupt
    with pytest.raises(KeyboardInterrupt):
        watched.model(input_ids=ids(1, 3))
    assert watched.recorder.phase_stats("prefill").passes_aborted == 0
    watched.states(input_ids=ids(1, 1))
    assert watched.recorder.phase_stats("prefill").passes_aborted == 1
    assert watched.recorder.phase_stats("decode").passes == 1
    assert [state.phase for state, _ in watched.ended] == ["decode"]
    watched.states(input_ids=ids(1, 1))
    assert watched.recorder.phase_stats("prefill").passes_aborted == 1


def test_another_hook_that_raises_before_ours_began(watched: Watched) -> None:
    def refuse(model: nn.Module, args: Any) -> None:
        raise ValueError("no")

    handle = watched.model.register_forward_pre_hook(refuse, prepend=True)
    with pytest.raises(ValueError, match="no"):
        watched.model(input_ids=ids(1, 3))
    handle.remove()
    assert watched.recorder.phase_stats("prefill").passes_aborted == 0
    assert watched.states(input_ids=ids(1, 3)).pass_idx == 1


def test_another_hook_that_raises_after_ours_began_aborts_the_pass(watched: Watched) -> None:
    def refuse(model: nn.Module, args: Any) -> None:
        raise ValueError("no")

    handle = watched.model.register_forward_pre_hook(refuse)
    with pytest.raises(ValueError, match="no"):
        watched.model(input_ids=ids(1, 3))
    handle.remove()
    assert watched.recorder.phase_stats("prefill").passes_aborted == 1


def test_what_the_end_of_a_pass_raises_reaches_the_caller_once() -> None:
    def end(state: PassState, duration_s: float) -> None:
        raise LookupError(f"after pass {state.pass_idx}")

    model, recorder = Model(), Recorder([4], [100])
    detach = PassObserver(recorder, threading.Lock(), end).attach(model)
    for number in (1, 2):
        with pytest.raises(LookupError, match=f"after pass {number}"):
            model(input_ids=ids(1, 3))
    detach()
    assert recorder.phase_stats("prefill").passes == 2


def test_the_end_is_told_without_the_lock() -> None:
    """It takes the lock itself."""
    model, lock, locked = Model(), threading.Lock(), []
    detach = PassObserver(Recorder([4], [100]), lock, lambda *ended: locked.append(lock.locked())).attach(model)
    model(input_ids=ids(1, 3))
    detach()
    assert locked == [False]


def test_threads_have_passes_of_their_own(watched: Watched) -> None:
    inside = threading.Barrier(2)
    seen: dict[int, PassState] = {}

    def meet() -> None:
        state = watched.observer.current()
        inside.wait(60)  # both are in their pass now
        assert watched.observer.current() is state
        seen[state.num_sequences] = state

    watched.model.inside = meet
    with ThreadPoolExecutor(2) as threads:
        calls = [threads.submit(watched.model, input_ids=ids(batch, length)) for batch, length in ((1, 5), (2, 1))]
        for call in calls:
            call.result(60)
    assert (seen[1].phase, seen[2].phase) == ("prefill", "decode")
    assert {seen[1].pass_idx, seen[2].pass_idx} == {1, 2}
    assert watched.recorder.phase_stats("prefill").tokens == 5
    assert watched.recorder.phase_stats("decode").tokens == 2


def test_detaching_removes_every_hook() -> None:
    watched = Watched()
    before = Model()
    watched.detach()
    for name, value in vars(before).items():
        if "hooks" in name:
            assert dict(vars(watched.model)[name]) == dict(value), name
    watched.model(input_ids=ids(1, 3))
    assert watched.recorder.phase_stats("prefill").passes == 0


def test_a_watched_model_cannot_be_copied_or_pickled(watched: Watched) -> None:
    watched.model.inside = print  # the fixture's model holds nothing else that refuses
    for copy_it in (copy.deepcopy, pickle.dumps):
        with pytest.raises(PatchStateError, match=r"cannot be copied or pickled\. Unpatch it first"):
            copy_it(watched.model)


def test_a_served_model_counts_real_tokens_only() -> None:
    prompt = PROMPTS["padded"]  # 9, 6 and 2 tokens
    with served("qwen2_moe", cache="50%") as model:
        greedy(model, prompt, new_tokens=2)
        stats = model.promoe.stats()
    assert (stats.prefill.passes, stats.prefill.tokens, stats.prefill.sequences) == (1, 17, 3)
    assert (stats.decode.passes, stats.decode.tokens, stats.decode.sequences) == (2, 6, 6)


class Thing:
    """Something that can be referred to weakly."""


def test_nothing_is_collected_while_stacks_are_walked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collection may let another thread run, whose frames then end while they are walked: the process would die of it."""
    seen = []

    def look(frame: FrameType | None, modules: set[int]) -> bool:
        seen.append(gc.isenabled())
        return False

    model = build("qwen2_moe", layers=1)
    monkeypatch.setattr(passes, "_calls_one_of", look)
    assert gc.isenabled()
    assert passes.threads_in_forward(model, promoe.find_moe_layers(model)) == []
    assert seen
    assert not any(seen)
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    model = build("qwen2_moe", layers=1)
    gc.disable()
    try:
        passes.threads_in_forward(model, promoe.find_moe_layers(model))
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_what_threads_know_is_let_go_at_once() -> None:
    """Without a collection: neither the caller's model nor what is local in another thread is kept."""
    model = build("qwen2_moe", layers=1)
    kept, inside, leave = [], threading.Event(), threading.Event()

    def other() -> None:
        thing = Thing()
        kept.append(weakref.ref(thing))
        inside.set()
        leave.wait()

    thread = threading.Thread(target=other)
    thread.start()
    inside.wait()
    gc.collect()
    gc.disable()
    try:
        passes.threads_in_forward(model, promoe.find_moe_layers(model))
        leave.set()
        thread.join()
        kept.append(weakref.ref(model))
        del model
        assert [one() for one in kept] == [None, None]
    finally:
        gc.enable()


def test_a_failure_leaves_the_collector_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("no frames")

    model = build("qwen2_moe", layers=1)
    monkeypatch.setattr(sys, "_current_frames", fail)
    with pytest.raises(RuntimeError, match="no frames"):
        passes.threads_in_forward(model, promoe.find_moe_layers(model))
    assert gc.isenabled()


def test_who_walks_stacks_may_be_interrupted_by_one_who_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal handler that closes the model comes in the midst of it."""
    model = build("qwen2_moe", layers=1)
    layers = promoe.find_moe_layers(model)
    look, found = passes._calls_one_of, []

    def interrupted(frame: FrameType | None, modules: set[int]) -> bool:
        monkeypatch.setattr(passes, "_calls_one_of", look)
        found.append(passes.threads_in_forward(model, layers))
        return look(frame, modules)

    monkeypatch.setattr(passes, "_calls_one_of", interrupted)
    walking = threading.Thread(target=passes.threads_in_forward, args=(model, layers), daemon=True)
    walking.start()
    walking.join(60)
    assert not walking.is_alive()
    assert found == [[]]
    assert gc.isenabled()
