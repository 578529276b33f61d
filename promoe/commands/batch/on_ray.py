"""Answers requests with several models on a Ray cluster, by Ray Data.

Each replica is an actor that opens the model for itself, with its share of memory and cores. A block of requests is answered as
a whole: when an actor or a node dies, Ray gives its blocks to another one, and none of their lines had been written.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from promoe.commands.batch.answering import Answering, Done
from promoe.commands.batch.lines import Request
from promoe.commands.batch.options import Options
from promoe.errors import ConfigError
from promoe.files import loads
from promoe.runtime.sampling import Sampling

if TYPE_CHECKING:
    from promoe.commands.batch.planned import Sizes

# Requests that are in the cluster at once: models stay open for so many.
IN_CLUSTER = 50_000
# Requests of a block, in sequences at once: the more, the fewer steps with a few sequences, and the more is done again.
BLOCK = 4
# Of a node's id, that are printed.
NODE_DIGITS = 8


class Replica:
    """One model of several; `__call__` answers a block of requests."""

    def __init__(self, options: Options, cache: str | int, sizes: dict[str, int], threads: int) -> None:
        import torch

        from promoe.model.tokenizer import load_tokenizer
        from promoe.runtime.loading import from_pretrained

        torch.set_num_threads(threads)
        model = from_pretrained(options.model, **{**options.for_opening(), "cache": cache})
        tokenizer = load_tokenizer(options.model)
        self._answering = Answering(model, tokenizer, options.model, options.max_tokens, sizes)

    def __call__(self, block: dict[str, Any]) -> dict[str, Any]:
        """Return `{"done": what became of the requests, "node": where}` for `{"request": requests}`, the requests as JSON."""
        import ray

        requests = map(_read, block["request"])
        done = [json.dumps(asdict(one)) for one in self._answering.run(requests)]
        return {"done": done, "node": [ray.get_runtime_context().get_node_id()] * len(done)}


def answer_on_ray(options: Options, sizes: Sizes, requests: Iterable[Request]) -> Iterator[Done]:
    """Answer requests on a cluster, and yield each once its block is done with.

    Raises:
        ConfigError: Ray is not installed, its cluster cannot be reached, or it has fewer cores than replicas.
    """
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise ConfigError("--replicas needs Ray. Install it: pip install 'promoe[ray]'.") from error
    assert options.replicas is not None
    started = not ray.is_initialized()
    if started:
        try:
            ray.init(address=options.ray, log_to_driver=False, include_dashboard=False, logging_level="error")
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise ConfigError(
                f"The Ray cluster {options.ray or 'here'} cannot be used: {error}. "
                "Give the address of a running one with --ray, or leave it out to start one here."
            ) from error
    try:
        threads = int(ray.cluster_resources().get("CPU", 0)) // options.replicas
        if threads < 1:
            raise ConfigError(
                f"--replicas {options.replicas} need a core each, and the cluster has "
                f"{ray.cluster_resources().get('CPU', 0):.0f}. Ask for fewer, or add nodes."
            )
        remaining = iter(requests)
        by_node: Counter[str] = Counter()
        while some := list(islice(remaining, IN_CLUSTER)):
            yield from _answered(ray, replace(options, ray=None), sizes, threads, some, by_node)
        counts = ", ".join(f"{node[:NODE_DIGITS]} {count}" for node, count in sorted(by_node.items()))
        print(f"lines by node: {counts}", file=sys.stderr)
    finally:
        if started:
            ray.shutdown()


def _answered(
    ray: Any, options: Options, sizes: Sizes, threads: int, requests: list[Request], by_node: Counter[str]
) -> Iterator[Done]:
    size = min(BLOCK * sizes.of_batch["at_once"], -(-len(requests) // (options.replicas or 1)))
    ray.data.DataContext.get_current().enable_progress_bars = False
    rows = ray.data.from_items(
        [{"request": json.dumps(asdict(request))} for request in requests],
        override_num_blocks=-(-len(requests) // size),
    )
    done = rows.map_batches(
        Replica,
        fn_constructor_args=(options, sizes.cache, sizes.of_batch, threads),
        batch_size=size,
        num_cpus=threads,
        compute=ray.data.ActorPoolStrategy(size=options.replicas),
    )
    for row in done.iter_rows():
        by_node[row["node"]] += 1
        yield Done(**loads(row["done"].encode()))


def _read(request: str) -> Request:
    fields = loads(request.encode())
    return Request(**{**fields, "sampling": Sampling(**fields["sampling"]), "stops": tuple(fields["stops"])})
