"""Predictors: from what a gate sees now to which experts later layers will use.

    base       what a predictor is given and what it answers
    gate       skip-based: a later layer's own gate on this layer's gate input (no training), corrected while running
    linear_fit what corrects it: a linear map that learns
    history    previous token's experts, popularity
    network    what is trained: gate input at one layer -> scores at later ones
    trained    a trained predictor as files: networks, calibration, and which model it is for
    learned    a trained predictor at work
    registry   predictors by name or place
    reference  random, oracle and always-wrong predictions, for measurements and tests

A prediction changes *when* bytes move, never what is computed.
"""

from .base import Forecast, LayerVisit, Predictor, PredictorContext, ReuseForecast, Traits
from .registry import KINDS, check_kind, create
from .trained import TrainedPredictor

__all__ = [
    "KINDS",
    "Forecast",
    "LayerVisit",
    "Predictor",
    "PredictorContext",
    "ReuseForecast",
    "TrainedPredictor",
    "Traits",
    "check_kind",
    "create",
]
