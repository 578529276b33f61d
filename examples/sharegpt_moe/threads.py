"""Choose the number of CPU threads while training, for a machine that is shared with other work."""

from __future__ import annotations

import torch


class ThreadChooser:
    """Keeps the thread count whose last step was the fastest, and tries the other one now and then.

    On a busy machine the threads of one operation wait for whichever of them is not scheduled: two threads were up to
    ten times slower than one. On an idle machine they are nearly twice as fast. So a trial can be dear, and is made
    only when it would cost less than `trial_share` of the time since the last one, going by how long it took then.

    Args:
        most: Largest number of threads; 1 and `most` are compared, `most` first. 1: there is nothing to choose.
        trial_share: Share of the time that may go into trials.
    """

    def __init__(self, most: int, trial_share: float = 0.05) -> None:
        self._most = most
        self._seconds: dict[int, float] = {}  # of the last step with each count
        self._since_trial = 0.0
        self._trial_share = trial_share
        self.current = most
        torch.set_num_threads(most)

    def step_took(self, seconds: float) -> None:
        """Note how long the last step took and set the threads for the next one."""
        self._seconds[self.current] = seconds
        self._since_trial += seconds
        other = 1 if self.current == self._most else self._most
        if other not in self._seconds:
            self.current = other
        elif seconds > self._seconds[other] or self._since_trial * self._trial_share > self._seconds[other]:
            self.current, self._since_trial = other, 0.0
        torch.set_num_threads(self.current)
