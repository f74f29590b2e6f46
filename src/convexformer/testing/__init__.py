"""Contract checks: run them on an operator, a loss, a penalty or a head of your own.

Every check raises ``AssertionError`` with the numbers that disagree, and returns None on success::

    from convexformer.testing import check_gauge
    check_gauge(MyGauge(), shape=(4, 3, 2))

The checks are exact statements (adjoints, Fenchel-Young, optimality of a prox), tried at random points.
"""

from convexformer.testing.gauges import check_gauge, check_penalty
from convexformer.testing.heads import check_head, check_weak_duality
from convexformer.testing.losses import check_loss
from convexformer.testing.operators import check_operator

__all__ = ["check_gauge", "check_head", "check_loss", "check_operator", "check_penalty", "check_weak_duality"]
