"""The staircase: factors of low rank, a certificate, and more factors where the certificate asks for them."""

from convexformer.solvers.staircase.staircase import Staircase, StaircaseOptions

__all__ = ["Staircase", "StaircaseOptions"]
