"""The low-priority level of the queue: experts that a forecast says will be used, by deadline."""

from __future__ import annotations

from collections.abc import Iterable, Iterator


class Speculation:
    """Wanted experts with the step at which their layer is due; a new forecast replaces its layer's old one."""

    def __init__(self) -> None:
        self._by_layer: dict[int, dict[int, tuple[int, float]]] = {}  # layer -> code -> (deadline, -probability)
        self._order: list[int] | None = []  # most urgent last; None: to be sorted again

    def replace(self, layer_idx: int, deadline_step: int, codes: Iterable[tuple[int, float]]) -> set[int]:
        """Want these `(code, probability)` of a layer and no others of it; returns the codes no longer wanted."""
        old = self._by_layer.pop(layer_idx, {})
        new = {code: (deadline_step, -probability) for code, probability in codes}
        if new:
            self._by_layer[layer_idx] = new
        if old or new:
            self._order = None
        return old.keys() - new.keys()

    def drop(self, layer_idx: int) -> set[int]:
        """Forget a layer's wishes; returns them."""
        old = self._by_layer.pop(layer_idx, None)
        if old is None:
            return set()
        self._order = None
        return set(old)

    def wants(self, layer_idx: int, code: int) -> bool:
        """Whether an expert is wanted."""
        return code in self._by_layer.get(layer_idx, ())

    def most_urgent(self) -> int | None:
        """The expert to send next: earliest deadline, then most probable."""
        if self._order is None:
            wishes = [(wish, code) for layer in self._by_layer.values() for code, wish in layer.items()]
            self._order = [code for _, code in sorted(wishes, reverse=True)]
        return self._order[-1] if self._order else None

    def __bool__(self) -> bool:
        """Whether there may be something to send: False is certain."""
        return bool(self._by_layer) if self._order is None else bool(self._order)

    def skip(self) -> None:
        """Do not offer the most urgent again until a forecast changes; it stays wanted."""
        assert self._order, "nothing to skip"
        self._order.pop()

    def __iter__(self) -> Iterator[int]:
        return (code for layer in self._by_layer.values() for code in layer)
