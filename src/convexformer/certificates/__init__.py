"""Certificates: the duality gap, recomputed in float64 from an objective and weights alone."""

from convexformer.certificates.certificate import Certificate
from convexformer.certificates.gap import (
    DualPoint,
    certificate,
    certificate_at,
    dual_point,
    dual_value,
    with_best_intercept,
)

__all__ = [
    "Certificate",
    "DualPoint",
    "certificate",
    "certificate_at",
    "dual_point",
    "dual_value",
    "with_best_intercept",
]
