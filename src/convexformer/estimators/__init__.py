"""scikit-learn estimators on tokens: deterministic, and certified."""

from convexformer.estimators.base import TokenEstimator
from convexformer.estimators.classifier import TokenClassifier
from convexformer.estimators.compare import compare
from convexformer.estimators.leaderboard import Leaderboard
from convexformer.estimators.regressor import TokenRegressor
from convexformer.estimators.search import TokenClassifierCV, TokenRegressorCV

__all__ = [
    "Leaderboard",
    "TokenClassifier",
    "TokenClassifierCV",
    "TokenEstimator",
    "TokenRegressor",
    "TokenRegressorCV",
    "compare",
]
