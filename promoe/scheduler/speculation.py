"""The experts that forecasts expect to be used, ordered by deadline: what is fetched when nothing is more urgent."""

from __future__ import annotations

from collections.abc import Iterable


class Speculation:
    """Wanted experts and the step at which their layer is due. A new forecast of a layer replaces its old one."""

    def __init__(self) -> None:
        self._by_layer: dict[int, dict[int, tuple[int, float]]] = {}  # layer -> code -> (deadline, -probability)
        self._order: list[int] | None = []  # most urgent last; None: to be sorted again

    def replace(self, layer_idx: int, deadline_step: int, codes: Iterable[tuple[int, float]]) -> None:
        """Want these `(code, probability)` of a layer and no others of it."""
        old = self._by_layer.pop(layer_idx, {})
        new = {code: (deadline_step, -probability) for code, probability in codes}
        if new:
            self._by_layer[layer_idx] = new
        if old or new:
            self._order = None

    def drop(self, layer_idx: int) -> None:
        """Forget the wanted experts of a layer."""
        if self._by_layer.pop(layer_idx, None) is not None:
            self._order = None

    def wants(self, layer_idx: int, code: int) -> bool:
        """Return whether an expert is wanted."""
        return code in self._by_layer.get(layer_idx, ())

    def most_urgent(self) -> int | None:
        """Return the expert to send next: the one with the earliest deadline, then the most probable."""
        if self._order is None:
            wishes = [(wish, code) for layer in self._by_layer.values() for code, wish in layer.items()]
            self._order = [code for _, code in sorted(wishes, reverse=True)]
        return self._order[-1] if self._order else None

    def __bool__(self) -> bool:
        """Return whether there may be something to send. If False, there certainly is nothing."""
        return bool(self._by_layer) if self._order is None else bool(self._order)

    def skip(self) -> None:
        """Do not return the most urgent one again until a forecast changes; it stays wanted."""
        assert self._order, "nothing to skip"
        self._order.pop()
