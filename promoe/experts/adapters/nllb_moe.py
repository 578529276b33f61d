"""NLLB-MoE: the general contract over experts that are modules.

What it passes as ids is a mask `[T, E]` of zeros and ones, so that it computes with its experts 0 and 1 only; that is how
Transformers has it, and the same bits are what is promised.
"""

from __future__ import annotations

from .expert_modules import ExpertModulesAdapter


class NllbMoeAdapter(ExpertModulesAdapter):
    """`NllbMoeExperts`."""
