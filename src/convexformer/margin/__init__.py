"""Attention SVMs and gradient flow: where training keys and queries ends up (Sheen et al. 2024).

``AttentionSVM`` solves the margin problems, with a certificate; ``gradient_flow`` follows training towards them;
``check_assumptions`` says which theorem applies; ``sample_data`` draws data for each.
"""

from convexformer.margin.assumptions import Assumption, AssumptionReport, check_assumptions
from convexformer.margin.certificate import NotSeparableError, margin_certificate
from convexformer.margin.data import Sequences, TieWarning
from convexformer.margin.flow import gradient_flow
from convexformer.margin.initial import aligned_init
from convexformer.margin.kkt import Residuals
from convexformer.margin.operator import MarginOperator
from convexformer.margin.sampling import Sample, sample_data
from convexformer.margin.svm import AttentionSVM
from convexformer.margin.trajectory import Flow

__all__ = [
    "Assumption",
    "AssumptionReport",
    "AttentionSVM",
    "Flow",
    "MarginOperator",
    "NotSeparableError",
    "Residuals",
    "Sample",
    "Sequences",
    "TieWarning",
    "aligned_init",
    "check_assumptions",
    "gradient_flow",
    "margin_certificate",
    "sample_data",
]
