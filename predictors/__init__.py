"""Predictors: from what a gate sees now, they foresee which experts later layers will use.

    base         what a predictor is given, what it answers, and its traits
    gate         applies a later layer's own gate to this layer's gate input; learns while running, needs no training
    early_calls  calls a gate before its turn
    linear_fit   the linear map with which `gate` learns
    history      what the previous token used; what is used most
    reference    random, all-knowing and always-wrong predictions, for measurements and tests
    network      the networks that `promoe-train` trains
    trained      a trained predictor as files: networks, calibration, and the model that it is for
    folded       a trained predictor at work, its networks folded into two products per visit
    registry     finds a predictor by name, folder or hub id

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
