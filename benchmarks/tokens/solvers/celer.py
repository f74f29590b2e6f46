"""celer: group lasso with working sets and dual extrapolation (Cython)."""

from __future__ import annotations

import warnings

import numpy as np

from solvers.base import Solver


class Celer(Solver):
    name = "celer"
    package = "celer"
    knobs = tuple(10.0**-k for k in range(2, 10))

    @staticmethod
    def skip(facts):
        return "no softmax" if facts["kind"] == "softmax" else None

    def set_objective(self, objective):
        self.objective = objective
        self.A = np.array(objective.design, order="F")

    def warm_up(self):
        d = self.objective.width
        self._model(1e-1).fit(np.asfortranarray(self.A[:30, : 4 * d]), self.objective.y[:30])

    def run(self, knob, clock):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the objective tells whether it converged
            self.model = self._model(knob).fit(self.A, self.objective.y)

    def get_result(self):
        return self.model.coef_

    def _model(self, tolerance):
        from celer import GroupLasso

        return GroupLasso(
            groups=self.objective.width,
            alpha=self.objective.beta / len(self.objective.y),
            tol=tolerance,
            fit_intercept=False,
            max_iter=100,
            max_epochs=50_000,
        )
