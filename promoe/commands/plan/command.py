"""`promoe plan`: reads headers, measures, predicts, prints, and, if asked, runs the model and compares."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Sequence
from contextlib import ExitStack, closing
from typing import Any, TextIO

import transformers

from promoe.commands.plan import show
from promoe.commands.plan.choice import Choice, choose, rates_to_try
from promoe.commands.plan.fits import Room, largest_rate, pools, rate_name, rate_of, slots_bytes
from promoe.commands.plan.measuring import measure_compute, measure_link
from promoe.commands.plan.options import Options
from promoe.commands.plan.overlap import fit_overlap
from promoe.commands.plan.reading import ReadModel, read_model
from promoe.commands.plan.result import Result, write_result
from promoe.commands.plan.routing import OFTEN, SELDOM, Routing, from_trace, made_up
from promoe.commands.plan.sizes import ModelSizes
from promoe.commands.plan.stand_in import EXPERTS_BYTES, StandIn
from promoe.commands.plan.time_model import TimeModel
from promoe.commands.plan.times import LinkSpeed
from promoe.commands.plan.verification import verify
from promoe.config import PromoeConfig
from promoe.errors import ConfigError, PromoeError
from promoe.experts.kernels.packed_store import Packings, packings_in
from promoe.files import check_writable
from promoe.model.packed_files import packable
from promoe.training.evaluate_command import open_trace
from promoe.training.routing_traces import RoutingTrace
from promoe.transfer.cpu_contention import CoreWatch, Taken
from promoe.transfer.devices import Device, open_device
from promoe.transfer.links.file import choose_mode
from promoe.transfer.links.free_ram import free_ram_bytes
from promoe.transfer.links.probe import ProbeMode
from promoe.units import format_memory

# Cache rates of the table, beside the largest that fits and the chosen one.
RATES = (0.125, 0.25, 0.5, 0.75, 1.0)
# Of what is free, what made-up experts may take while they are timed.
STAND_IN_SHARE = 0.25


def run_plan(options: Options, out: TextIO | None = None) -> Result:
    """Plan, print to `out`, write the JSON, and return what was found.

    Raises:
        PromoeError: an option cannot work, or the model cannot be served.
    """
    if options.json is not None:
        check_writable(options.json)
    transformers.logging.disable_progress_bar()
    trace = None if options.trace is None else open_trace(options.trace)
    device = open_device(options.device)
    read = read_model(options.model, options.dtype)
    with ExitStack() as stack:
        if read.store is not None:
            stack.enter_context(closing(read.store))
        result = _Plan(options, read, device, out).run(trace)
    if options.json is not None:
        write_result(result, options.json)
        print(f"\nwritten to {options.json}", file=out)
    return result


class _Plan:
    """One plan in the making."""

    def __init__(self, options: Options, read: ReadModel, device: Device | None, out: TextIO | None) -> None:
        self.options, self.read, self.sizes, self._out = options, read, read.sizes, out
        self._columns = shutil.get_terminal_size((80, 24)).columns
        self._device = device
        self.room = _room(options, read.sizes, device)
        self._links: dict[ProbeMode, LinkSpeed] = {}
        self._taken: Taken | None = None  # while speeds were measured
        self._packed_s: float | None = None  # of a token, were experts packed; None: nothing gained

    def run(self, trace: RoutingTrace | None) -> Result:
        """Everything, in the order in which it is printed."""
        options, sizes = self.options, self.sizes
        asked = [rate_of(cache, sizes, self.room) for cache in options.cache]
        self._print(show.model_lines(sizes, options.context, self._columns))
        largest = largest_rate(sizes, self.room)
        self._print(show.machine_lines(self.room, largest, self._columns))
        rates = sorted(
            {*(asked or (rate for rate in RATES if rate >= sizes.least_rate)), *([largest] if largest else [])}
        )
        if not largest:
            raise ConfigError(_no_room(options.model, sizes, self.room))
        routings = _routings(options, sizes, trace)
        predictor = self._predictor(routings, rates)
        if isinstance(predictor, str):
            self._print(show.entry("speed", f"not predicted: {predictor}", self._columns))
            self._print(["", *show.fit_lines(sizes, rates, self.room)])
            return Result(sizes, self.room, options.context)
        fitting = [rate for rate in rates if rate <= largest or self._fits(rate)]
        predictions = [predictor(rate) for rate in fitting]
        choice = self._choose(predictor, asked, fitting, largest)
        self._print(show.measured_lines(predictor, self._links, self._taken, self._columns))
        self._print(show.routing_lines(routings, self._columns))
        table = sorted({one.rate: one for one in (*predictions, choice.prediction)}.values(), key=lambda one: one.rate)
        self._print(
            ["", *show.table_lines(sizes, table, [rate for rate in rates if rate not in fitting], choice.prediction)]
        )
        packing = None
        if self._packed_s is not None:
            packing = show.packing_advice(self._pack_command(), sizes, predictor.compute_s, self._packed_s)
        self._print(["", *show.choice_lines(choice, packing, self._commands(choice), self._columns)])
        verified = []
        if options.verify:
            run_at = (
                [rate for rate in fitting if rate in asked] or [rate for rate in fitting if rate < 1][:3] or fitting
            )
            verified = verify(predictor, run_at, options.prompt_tokens, options.new_tokens, self._settings())
            self._print(["", *show.verified_lines(verified, predictor.compute_s, self._compute_s(), self._columns)])
        return Result(
            sizes,
            self.room,
            options.context,
            compute=predictor.compute,
            packed_compute_s=self._packed_s,
            links=self._links,
            predictions=table,
            choice=choice,
            verified=verified,
            taken=self._taken,
        )

    def _fits(self, rate: float) -> bool:
        return self.room.fits(slots_bytes(pools(self.sizes, rate)))

    def _print(self, lines: Sequence[str]) -> None:
        print(*lines, sep="\n", file=self._out, flush=True)

    def _choose(self, predictor: TimeModel, asked: Sequence[float], fitting: Sequence[float], largest: float) -> Choice:
        rates = rates_to_try(self.sizes.least_rate, largest)
        if asked and self.options.tokens_per_second is None:
            rates = list(fitting) or rates
        return choose(predictor, rates, self.room, self._link_name, self.options.tokens_per_second)

    def _predictor(self, routings: Sequence[Routing], rates: Sequence[float]) -> TimeModel | str:
        """What predicts speeds; or why nothing can."""
        if self._device is not None:
            return "what a model takes on a GPU was never compared with a plan; the sizes hold"
        try:
            with closing(self._stand_in(self.read)) as found:
                watch = CoreWatch()
                compute = measure_compute(found, self.options.prompt_tokens)
                # A rate that was asked for may fit and be more than the largest one, which is in whole per cent.
                ends = (self.sizes.least_rate, largest_rate(self.sizes, self.room))
                for mode in {self._mode(rate) for rate in (*ends, *filter(self._fits, rates))}:
                    workers = PromoeConfig().workers
                    self._links[mode] = measure_link(found, self.read.store, self.read.folder, mode, workers)
                compute = compute.quicker(measure_compute(found, self.options.prompt_tokens))
                self._taken = watch.taken()
                if self.read.store is not None:
                    self._links = {
                        mode: fit_overlap(found, self.read.store, mode, compute, link)
                        for mode, link in self._links.items()
                    }
            # Not before: it takes as much memory.
            if self.read.store is not None and (packings := packable(self.read.layers, self.read.store)):
                self._packed_s = self._compute_s(packings)
        except PromoeError as error:
            return str(error)
        except Exception as error:  # of a family's own forward
            return f"its blocks cannot be run alone ({type(error).__name__}: {error})"
        return TimeModel(self.sizes, compute, self._link_at, routings)

    def _stand_in(self, read: ReadModel, packings: Packings | None = None) -> StandIn:
        spare_bytes = int(STAND_IN_SHARE * (self.room.free_bytes or EXPERTS_BYTES))
        packings = packings_in(read.store) if packings is None else packings
        return StandIn(read.model, read.layers, min(EXPERTS_BYTES, spare_bytes), packings)

    def _compute_s(self, packings: Packings | None = None) -> float:
        """Computing a token once more, as it is or with packed experts. Its blocks are the model's: they are read anew."""
        read = read_model(self.options.model, self.options.dtype)
        if read.store is not None:
            read.store.close()
        with closing(self._stand_in(read, packings)) as found:
            return TimeModel(self.sizes, measure_compute(found, 1), self._link_at, ()).compute_s

    def _mode(self, rate: float) -> ProbeMode:
        free_bytes = self.room.free_bytes
        planned = self.sizes.other_bytes + slots_bytes(pools(self.sizes, rate))
        return choose_mode(
            self.options.read_mode, self.sizes.expert_bytes, None if free_bytes is None else free_bytes - planned
        )[0]

    def _link_at(self, rate: float) -> LinkSpeed:
        return self._links[self._mode(rate)]

    def _link_name(self, rate: float) -> str:
        return show.link_name(self._link_at(rate))

    def _settings(self) -> dict[str, Any]:
        """For `from_pretrained`, beside the cache."""
        options = self.options
        settings: dict[str, Any] = {} if options.device == "cpu" else {"device": options.device}
        if options.dtype is not None:
            settings["dtype"] = options.dtype
        if options.read_mode != "auto":
            settings["config"] = PromoeConfig(read_mode=options.read_mode)
        return settings

    def _pack_command(self) -> str:
        dtype = "" if self.options.dtype is None else f" --dtype {shlex.quote(self.options.dtype)}"
        return f"promoe pack {shlex.quote(self.options.model)}{dtype}"

    def _commands(self, choice: Choice) -> list[str]:
        """To copy: on the command line, where it has the options, and in Python."""
        cache, model = rate_name(choice.prediction.rate), self.options.model
        arguments = {name: repr(value) for name, value in self._settings().items() if name != "config"}
        if self.options.read_mode != "auto":
            arguments["config"] = f'promoe.PromoeConfig(read_mode="{self.options.read_mode}")'
        python = ", ".join(
            [json.dumps(model), f'cache="{cache}"', *(f"{name}={text}" for name, text in arguments.items())]
        )
        on_device = f" --device {shlex.quote(self.options.device)}" if "device" in arguments else ""
        shell = f'promoe run {shlex.quote(model)} "PROMPT" --cache {cache}{on_device}'
        later = ["once its weights are in that folder, beside config.json:"]
        return [
            *(later if self.read.store is None and os.path.isdir(model) else []),
            *([] if set(arguments) - {"device"} else [shell]),
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
    least_bytes = slots_bytes(pools(sizes, sizes.least_rate))
    missing_bytes = least_bytes - (room.slots_bytes or 0)
    return (
        f"{model} does not run here: of {format_memory(room.free_bytes or 0)} of free {room.where}, the model without its "
        f"routed experts takes {format_memory(room.other_bytes)}, {format_memory(room.reserve_bytes)} are for KV cache and "
        f"activations, and the smallest cache is {format_memory(least_bytes)}. {format_memory(missing_bytes)} are missing: "
        "close other programs, lower --context, or take a machine with more."
    )
