"""CVXPY with a first-order and an interior-point cone solver, on the one problem small enough for them."""

from __future__ import annotations

import warnings

import numpy as np

from solvers.base import Solver


class Cone(Solver):
    environment = "own"
    package = "cvxpy"

    @staticmethod
    def skip(facts):
        small = facts["kind"] == "squared" and facts["size"] <= 5e4
        return None if small else "run on the smallest squared problem only"

    def set_objective(self, objective):
        import cvxpy

        self.Z = cvxpy.Variable((objective.n_features // objective.width, objective.width))
        outputs = objective.design @ cvxpy.reshape(self.Z, (objective.n_features,), order="C")
        loss = 0.5 * cvxpy.sum_squares(outputs - objective.y)
        self.program = cvxpy.Problem(cvxpy.Minimize(loss + objective.beta * cvxpy.sum(cvxpy.norm(self.Z, 2, axis=1))))

    def run(self, knob, clock):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.program.solve(solver=self.solver, warm_start=False, **self.options(knob))
        stats = self.program.solver_stats
        clock.state(stats.solve_time + (stats.setup_time or 0.0))  # without CVXPY's compilation

    def get_result(self):
        return np.asarray(self.Z.value)


class SCS(Cone):
    name = "CVXPY, SCS"
    solver = "SCS"
    knobs = tuple(10.0**-k for k in range(3, 11))

    def options(self, knob):
        return {"eps_abs": knob, "eps_rel": knob, "max_iters": 1_000_000, "time_limit_secs": 60}


class Clarabel(Cone):
    name = "CVXPY, CLARABEL"
    solver = "CLARABEL"
    knobs = tuple(10.0**-k for k in (4, 6, 8, 10))

    def options(self, knob):
        return {"tol_gap_abs": knob, "tol_gap_rel": knob, "tol_feas": knob, "time_limit": 60.0}
