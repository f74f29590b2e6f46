"""Hyperplane arrangements: the activation patterns of ReLU neurons, and projections on the cones they come with."""

from convexformer.arrangements.arrangement import Arrangement, cell_bound
from convexformer.arrangements.cells import Cells, enumerate_cells, sample_cells
from convexformer.arrangements.cones import ConeProjection, least_distance, project_on_cone, split_in_cone

__all__ = [
    "Arrangement",
    "Cells",
    "ConeProjection",
    "cell_bound",
    "enumerate_cells",
    "least_distance",
    "project_on_cone",
    "sample_cells",
    "split_in_cone",
]
