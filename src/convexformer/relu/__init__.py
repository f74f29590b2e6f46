"""Around exact ReLU heads: ReLU networks from gated ones, their polishing, and bounds on the optimum from both sides."""

from convexformer.relu.conversion import Conversion, from_gated
from convexformer.relu.polishing import polish
from convexformer.relu.sandwich import Sandwich, sandwich

__all__ = ["Conversion", "Sandwich", "from_gated", "polish", "sandwich"]
