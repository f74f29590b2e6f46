"""The ordinary networks that solutions map to and from."""

from convexformer.architecture import Network, Weights
from convexformer.networks.attention import AttentionNetwork
from convexformer.networks.mlp import LinearNetwork, MLPNetwork
from convexformer.networks.simplex import train_in_simplex
from convexformer.networks.standardized import StandardizedNetwork

NETWORKS: dict[str, type[Network]] = {
    "AttentionNetwork": AttentionNetwork,
    "LinearNetwork": LinearNetwork,
    "MLPNetwork": MLPNetwork,
    "StandardizedNetwork": StandardizedNetwork,
}


def lift(network: Network) -> Weights:
    """Return the point of the convex program that a network maps to: same outputs, no larger objective."""
    if not isinstance(network, Network):
        raise TypeError(f"cannot lift a {type(network).__name__}; expected a network from convexformer.networks.")
    return network.lift()


__all__ = [
    "NETWORKS",
    "AttentionNetwork",
    "LinearNetwork",
    "MLPNetwork",
    "Network",
    "StandardizedNetwork",
    "lift",
    "train_in_simplex",
]
