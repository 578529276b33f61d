"""`promoe plan`: reads headers, measures, predicts, prints, and, if asked, runs the model and compares."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Sequence
from contextlib import ExitStack, closing
from typing import Any, TextIO

import transformers

from promoe.commands.batch.prompts import PromptLengths
from promoe.commands.batch.reading import read_batch
from promoe.commands.batch.source import Source
from promoe.commands.plan import show, show_batch
from promoe.commands.plan.choice import Choice, choose, rates_to_try
from promoe.commands.plan.many_prompts import BatchPlan, memory_for, plan_batch
from promoe.commands.plan.measuring import measure_compute, measure_link
from promoe.commands.plan.options import Options
from promoe.commands.plan.overlap import fit_overlap
from promoe.commands.plan.reading import ReadModel, read_model
from promoe.commands.plan.result import Result
from promoe.commands.plan.routing import OFTEN, SELDOM, Routing, from_trace, made_up
from promoe.commands.plan.sizes import ModelSizes, Room, rate_name
from promoe.commands.plan.stand_in import EXPERTS_BYTES, StandIn
from promoe.commands.plan.throughput import BatchWork, Wanted
from promoe.commands.plan.time_model import ComputeTimes, LinkSpeed, Prediction, TimeModel
from promoe.commands.plan.verification import verify
from promoe.config import PromoeConfig
from promoe.errors import ConfigError, PromoeError
from promoe.experts.kernels.formats import Formats, formats_in
from promoe.files import check_writable
from promoe.model.context import context_tokens
from promoe.model.packing import packable
from promoe.model.tokenizer import load_tokenizer
from promoe.training.evaluate import open_trace
from promoe.training.routing_traces import RoutingTrace
from promoe.transfer.cpu_contention import CoreWatch
from promoe.transfer.devices import Device, open_device
from promoe.transfer.links.disk import choose_mode
from promoe.transfer.links.free_ram import free_ram_bytes
from promoe.transfer.links.probe import ProbeMode
from promoe.units import format_memory

# Cache rates of the table, beside the largest that fits and the chosen one.
RATES = (0.125, 0.25, 0.5, 0.75, 1.0)
# The quantised form that is proposed: the one that most people want.
FEWER_BITS = "int4"
# Share of the free memory that made-up experts may take while they are timed.
STAND_IN_SHARE = 0.25


def run_plan(options: Options, out: TextIO | None = None) -> Result:
    """Plan, print to `out` (None: stdout), write the JSON, and return what was found.

    Raises:
        PromoeError: an option cannot work, or the model cannot be served.
    """
    if options.json is not None:
        check_writable(options.json)
    transformers.logging.disable_progress_bar()
    trace = None if options.trace is None else open_trace(options.trace)
    device = open_device(options.device)
    read = read_model(options.model, options.dtype, options.experts, device is not None)
    with ExitStack() as stack:
        if read.store is not None:
            stack.enter_context(closing(read.store))
        plan = _Plan(options, read, device, out)
        if options.batch is None:
            plan.run(trace)
        else:
            plan.run_batch(Source(options.batch), trace)
    if options.json is not None:
        plan.found.write(options.json)
        print(f"\nwritten to {options.json}", file=out)
    return plan.found


class _Plan:
    """A plan in the making."""

    def __init__(self, options: Options, read: ReadModel, device: Device | None, out: TextIO | None) -> None:
        self.options, self.read, self.sizes, self._device, self._out = options, read, read.sizes, device, out
        self.room = _room(options, read.sizes, device)
        self.largest = self.room.largest_rate(read.sizes)
        self._formats = formats_in(layer.layout for layer in read.sizes.layers)
        self.found = Result(read.sizes, self.room, options.context)

    def run(self, trace: RoutingTrace | None) -> None:
        """Find everything, in the order in which it is printed.

        Raises:
            PromoeError: an option cannot work, or no slot fits.
        """
        options, sizes, found = self.options, self.sizes, self.found
        asked = [self.room.rate_of(cache, sizes) for cache in options.cache]
        self._print(show.model_lines(sizes, options.context))
        self._print(show.machine_lines(self.room, self.largest))
        if not self.largest:
            raise ConfigError(_no_room(options.model, sizes, self.room))
        rates = sorted({*(asked or (rate for rate in RATES if rate >= sizes.least_rate)), self.largest})
        fitting = [rate for rate in rates if rate <= self.largest or self._fits(rate)]
        routings = _routings(options, sizes, trace)
        time_model = self._measure(routings, rates)
        if isinstance(time_model, str):
            self._print(show.entry("speed", f"not predicted: {time_model}"))
            self._print(["", *show.fit_lines(sizes, rates, self.room)])
            return
        found.choice = choice = self._choose(time_model, asked, fitting)
        found.fewer_bits = self._in_fewer_bits(choice, routings)
        predictions = {one.rate: one for one in (*map(time_model, fitting), choice.prediction)}
        found.predictions = [predictions[rate] for rate in sorted(predictions)]
        self._print(show.measured_lines(time_model, found.links, found.taken))
        self._print(show.routing_lines(routings))
        too_large = [rate for rate in rates if rate not in fitting]
        self._print(["", *show.table_lines(sizes, found.predictions, too_large, choice.prediction)])
        self._print(["", *show.choice_lines(choice, self._advice(choice, time_model), self._commands(choice))])
        if options.verify:
            some = [rate for rate in fitting if rate in asked] or [rate for rate in fitting if rate < 1][:3] or fitting
            found.verified = verify(time_model, some, options.prompt_tokens, options.new_tokens, self._settings())
            self._print(["", *show.verified_lines(found.verified, time_model.compute_s, self._compute_s())])

    def run_batch(self, source: Source, trace: RoutingTrace | None) -> None:
        """Plan how a file of prompts is answered.

        Raises:
            PromoeError: the file cannot be read, no line of it can be answered, or nothing fits.
        """
        options, sizes = self.options, self.sizes
        lengths = PromptLengths(load_tokenizer(options.model), options.max_tokens)
        for line in read_batch(source, 0, options.max_tokens):
            if line.request is not None:
                lengths.add(line.request)
        work = lengths.work(context_tokens(self.read.model.config))
        if work is None:
            raise ConfigError(f"No line of {source.name} can be answered. `promoe batch` says why, line by line.")
        memory_bytes = memory_for(options.memory)
        rates = [self.room.rate_of(cache, sizes) for cache in options.cache]
        wanted = Wanted(rate=rates[0] if rates else None)
        routing = None if trace is None else from_trace(trace, sizes, str(options.trace), 256, 32)
        self._print(show.model_lines(sizes, options.context))
        self._print(show_batch.work_lines(work, memory_bytes))
        plans = {options.experts: plan_batch(self.read, work, memory_bytes, wanted, routing)}
        if not self._formats and (fewer := self._batch_in_fewer_bits(work, memory_bytes, routing)) is not None:
            plans[FEWER_BITS] = fewer
        self.found.batch = plans
        first = plans[options.experts]
        self._print(show_batch.measured_lines(first))
        self._print(["", *show_batch.table_lines(plans)])
        self._print(["", *show_batch.choice_lines(first, options.model, source.name, options.experts)])

    def _batch_in_fewer_bits(
        self, work: BatchWork, memory_bytes: int | None, routing: Routing | None
    ) -> BatchPlan | None:
        try:
            return plan_batch(self._read_anew(FEWER_BITS), work, memory_bytes, Wanted(), routing)
        except PromoeError:
            return None

    def _advice(self, choice: Choice, time_model: TimeModel) -> dict[str, str | None]:
        """Return what other forms of the experts would change, by label; None: nothing worth saying."""
        found, advice = self.found, dict[str, str | None]()
        if found.packed_compute_s is not None:
            advice["packing"] = show.packing_advice(
                self._pack_command(), self.sizes, time_model.compute_s, found.packed_compute_s
            )
        if found.fewer_bits is not None:
            advice["bits"] = show.bits_advice(self.options.model, FEWER_BITS, choice.prediction, found.fewer_bits)
        return advice

    def _fits(self, rate: float) -> bool:
        return self.room.fits(self.sizes.slots(rate))

    def _print(self, lines: Sequence[str]) -> None:
        print(*lines, sep="\n", file=self._out, flush=True)

    def _choose(self, time_model: TimeModel, asked: Sequence[float], fitting: Sequence[float]) -> Choice:
        rates = rates_to_try(self.sizes.least_rate, self.largest)
        if asked and self.options.tokens_per_second is None:
            rates = list(fitting) or rates
        return choose(time_model, rates, self.room, self._link_name, self.options.tokens_per_second)

    def _measure(self, routings: Sequence[Routing], rates: Sequence[float]) -> TimeModel | str:
        """Measure the machine, and return what predicts speeds; or why nothing can."""
        store, packed_s = self.read.store, None
        if self._device is not None:
            return "what a model takes on a GPU was never compared with a plan; the sizes hold"
        try:
            with closing(self._stand_in(self.read)) as stand_in:
                watch = CoreWatch()
                compute = measure_compute(stand_in, self.options.prompt_tokens)
                # A rate that was asked for may fit and be more than the largest one, which is in whole per cent.
                fitting = (self.sizes.least_rate, self.largest, *filter(self._fits, rates))
                links: dict[ProbeMode, LinkSpeed] = {
                    mode: measure_link(stand_in, store, self.read.folder, mode, PromoeConfig().workers)
                    for mode in {self._mode(rate) for rate in fitting}
                }
                compute = compute.quicker(measure_compute(stand_in, self.options.prompt_tokens))
                taken = watch.taken()
                if store is not None and formats_in(store.layouts) == self._formats:
                    links = {mode: fit_overlap(stand_in, store, mode, compute, link) for mode, link in links.items()}
            # Not before: it takes as much memory.
            if store is not None and (formats := packable(self.read.layers, store)):
                packed_s = self._compute_s(formats)
        except PromoeError as error:
            return str(error)
        except Exception as error:  # of a family's own forward
            return f"its blocks cannot be run alone ({type(error).__name__}: {error})"
        self.found.compute, self.found.links, self.found.taken = compute, links, taken
        self.found.packed_compute_s = packed_s
        return TimeModel(self.sizes, compute, self._link_at, routings)

    def _stand_in(self, read: ReadModel, formats: Formats | None = None) -> StandIn:
        spare_bytes = int(STAND_IN_SHARE * (self.room.free_bytes or EXPERTS_BYTES))
        formats = self._formats if formats is None else formats
        return StandIn(read.model, read.layers, min(EXPERTS_BYTES, spare_bytes), formats)

    def _compute_s(self, formats: Formats | None = None) -> float:
        """Return the seconds to compute a token, measured anew, as the model is or with packed experts."""
        compute = self._compute(self._read_anew(self.options.experts), formats, prompt_tokens=1)
        return TimeModel(self.sizes, compute, self._link_at, ()).compute_s

    def _compute(self, read: ReadModel, formats: Formats | None, prompt_tokens: int) -> ComputeTimes:
        with closing(self._stand_in(read, formats)) as stand_in:
            return measure_compute(stand_in, prompt_tokens)

    def _read_anew(self, experts: str) -> ReadModel:
        """Return the model without its files. A stand-in takes a model's blocks, so each needs a new model."""
        read = read_model(self.options.model, self.options.dtype, experts, self._device is not None)
        if read.store is not None:
            read.store.close()
        return read

    def _in_fewer_bits(self, choice: Choice, routings: Sequence[Routing]) -> Prediction | None:
        """Return what quantised experts would give with the memory of the chosen cache.

        None: all experts fit as they are, they are in a slot format already, or they cannot be quantised.
        """
        rate = choice.prediction.rate
        if rate == 1 or self._formats:
            return None
        try:
            read = self._read_anew(FEWER_BITS)
            compute = self._compute(
                read, formats_in(layer.layout for layer in read.sizes.layers), self.options.prompt_tokens
            )
        except PromoeError:
            return None
        share = min(1.0, choice.prediction.slots_bytes / read.sizes.slots_bytes)
        return TimeModel(read.sizes, compute, lambda _: self._link_at(rate), routings)(share)

    def _mode(self, rate: float) -> ProbeMode:
        free_bytes = self.room.free_bytes
        planned_bytes = self.sizes.other_bytes + self.sizes.slots(rate).nbytes
        left_bytes = None if free_bytes is None else free_bytes - planned_bytes
        return choose_mode(self.options.read_mode, self.sizes.expert_bytes, left_bytes)[0]

    def _link_at(self, rate: float) -> LinkSpeed:
        return self.found.links[self._mode(rate)]

    def _link_name(self, rate: float) -> str:
        return show.link_name(self._link_at(rate))

    def _settings(self) -> dict[str, Any]:
        """Return the arguments of `from_pretrained` beside the cache."""
        options = self.options
        settings: dict[str, Any] = {} if options.device == "cpu" else {"device": options.device}
        if options.experts != "auto":
            settings["experts"] = options.experts
        if options.dtype is not None:
            settings["dtype"] = options.dtype
        if options.read_mode != "auto":
            settings["config"] = PromoeConfig(read_mode=options.read_mode)
        return settings

    def _pack_command(self) -> str:
        dtype = "" if self.options.dtype is None else f" --dtype {shlex.quote(self.options.dtype)}"
        return f"promoe pack {shlex.quote(self.options.model)}{dtype}"

    def _commands(self, choice: Choice) -> list[str]:
        """Return what to copy: on the command line, where it has the options, and in Python."""
        cache, model = rate_name(choice.prediction.rate), self.options.model
        arguments = {name: repr(value) for name, value in self._settings().items() if name != "config"}
        if self.options.read_mode != "auto":
            arguments["config"] = f'promoe.PromoeConfig(read_mode="{self.options.read_mode}")'
        python = ", ".join(
            [json.dumps(model), f'cache="{cache}"', *(f"{name}={text}" for name, text in arguments.items())]
        )
        on_device = f" --device {shlex.quote(self.options.device)}" if "device" in arguments else ""
        in_form = f" --experts {shlex.quote(self.options.experts)}" if "experts" in arguments else ""
        shell = f'promoe run {shlex.quote(model)} "PROMPT"{in_form} --cache {cache}{on_device}'
        later = ["once its weights are in that folder, beside config.json:"]
        return [
            *(later if self.read.store is None and os.path.isdir(model) else []),
            *([] if set(arguments) - {"device", "experts"} else [shell]),
            f"model = promoe.from_pretrained({python})",
        ]


def _room(options: Options, sizes: ModelSizes, device: Device | None) -> Room:
    kv_bytes = sizes.kv.nbytes(options.context)
    if device is None:
        return Room("RAM", free_ram_bytes(), sizes.other_bytes, kv_bytes)
    return Room(device.name, device.free_bytes(), sizes.other_bytes, kv_bytes)


def _routings(options: Options, sizes: ModelSizes, trace: RoutingTrace | None) -> list[Routing]:
    if trace is None:
        return [made_up(sizes, habit, options.prompt_tokens, options.new_tokens) for habit in (SELDOM, OFTEN)]
    return [from_trace(trace, sizes, str(options.trace), options.prompt_tokens, options.new_tokens)]


def _no_room(model: str, sizes: ModelSizes, room: Room) -> str:
    least_bytes = sizes.slots(sizes.least_rate).nbytes
    missing_bytes = least_bytes - (room.slots_bytes or 0)
    return (
        f"{model} does not run here: of {format_memory(room.free_bytes or 0)} of free {room.where}, the model without its "
        f"routed experts takes {format_memory(room.other_bytes)}, {format_memory(room.reserve_bytes)} are for KV cache and "
        f"activations, and the smallest cache is {format_memory(least_bytes)}. {format_memory(missing_bytes)} are missing: "
        "close other programs, lower --context, or take a machine with more."
    )
