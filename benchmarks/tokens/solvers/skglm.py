"""skglm: block coordinate descent with working sets and Anderson acceleration (numba)."""

from __future__ import annotations

import warnings

import numpy as np

from solvers.base import Solver


class Skglm(Solver):
    name = "skglm"
    package = "skglm"
    knobs = (0.3, 0.1, 0.03, 0.01, 1e-3, 1e-4, 1e-5, 1e-6)

    @staticmethod
    def skip(facts):
        return "no softmax with groups" if facts["kind"] == "softmax" else None

    def set_objective(self, objective):
        self.objective = objective
        self.A = np.array(objective.design, order="F")
        self.weight = objective.beta / len(objective.y)

    def warm_up(self):
        few = np.asfortranarray(self.A[:30, : 4 * self.objective.width])
        self._solve(few, self.objective.y[:30].copy(), self.weight / 1e3, 1e-3)

    def run(self, knob, clock):
        self.w = self._solve(self.A, self.objective.y, self.weight, knob * self.weight)

    def get_result(self):
        return self.w

    def _solve(self, A, y, weight, tolerance):
        from skglm.datafits import QuadraticGroup
        from skglm.penalties import WeightedGroupL2
        from skglm.solvers import GroupBCD
        from skglm.utils.data import grp_converter
        from skglm.utils.jit_compilation import compiled_clone

        indices, pointers = grp_converter(self.objective.width, A.shape[1])
        datafit = compiled_clone(QuadraticGroup(pointers, indices))
        penalty = compiled_clone(WeightedGroupL2(weight, np.ones(len(pointers) - 1), pointers, indices))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return GroupBCD(tol=tolerance, max_iter=200, max_epochs=1000).solve(A, y, datafit, penalty)[0]
