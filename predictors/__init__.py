"""Predictors: from what a gate sees now to which experts later layers will use.

    base       what a predictor is given and what it answers
    gate       skip-based: a later layer's own gate on this layer's gate input (no training)
    history    previous token's experts, popularity
    reference  random, oracle and always-wrong predictions, for measurements and tests

A prediction changes *when* bytes move, never what is computed.
"""

from .base import Forecast, LayerVisit, Predictor, PredictorContext
from .registry import KINDS, check_kind, create

__all__ = ["KINDS", "Forecast", "LayerVisit", "Predictor", "PredictorContext", "check_kind", "create"]
