"""Certificates: the duality gap, recomputed in float64 from the weights alone."""

from convexformer.certificates.gap import Certificate, DualPoint, certificate, certify, dual_point, dual_value

__all__ = ["Certificate", "DualPoint", "certificate", "certify", "dual_point", "dual_value"]
