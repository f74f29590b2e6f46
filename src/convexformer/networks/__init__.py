"""The ordinary networks that solutions map to and from."""

from convexformer.architecture import Network, Weights
from convexformer.networks.attention import AttentionNetwork
from convexformer.networks.combined import SumNetwork
from convexformer.networks.fourier import FourierNetwork
from convexformer.networks.mlp import LinearNetwork, MLPNetwork
from convexformer.networks.selfattention import MixerNetwork, SelfAttentionNetwork
from convexformer.networks.simplex import train_in_simplex
from convexformer.networks.standardized import StandardizedNetwork
from convexformer.problem import Problem

NETWORKS: dict[str, type[Network]] = {
    kind.__name__: kind
    for kind in (
        AttentionNetwork,
        FourierNetwork,
        LinearNetwork,
        MLPNetwork,
        MixerNetwork,
        SelfAttentionNetwork,
        StandardizedNetwork,
        SumNetwork,
    )
}


def lift(network: Network, problem: Problem | None = None) -> Weights:
    """Return the point of the convex program that a network maps to: same outputs, no larger objective.

    With ``problem`` the point is one of that problem, whatever its head found in the tokens: self-attention separates
    into blocks of channels that no sample correlates, which a network alone does not show.
    """
    if not isinstance(network, Network):
        raise TypeError(f"cannot lift a {type(network).__name__}; expected a network from convexformer.networks.")
    return network.lift() if problem is None else problem.head.lift(network, problem.layout)


__all__ = ["NETWORKS", "Network", "lift", "train_in_simplex", *NETWORKS]
