"""adelie: group lasso by coordinate descent in C++; one lambda, or a path of 20 down to it."""

from __future__ import annotations

import numpy as np

from solvers.base import Solver


class Adelie(Solver):
    name = "adelie"
    package = "adelie"
    knobs = tuple(10.0**-k for k in (2, 4, 5, 6, 6.5, 7, 7.5, 8, 8.5, 9, 9.5, 10, 11, 11.5, 12, 13))
    n_lambdas = 1

    @staticmethod
    def skip(facts):
        return "no groups per (class, token) with softmax" if facts["kind"] == "softmax" else None

    def set_objective(self, objective):
        import adelie

        self.objective = objective
        N = len(np.array(objective.y))
        self.matrix = adelie.matrix.dense(np.array(objective.design, order="F"), method="naive", n_threads=1)
        self.glm = adelie.glm.gaussian(np.array(objective.y))
        self.groups = np.arange(0, objective.n_features, objective.width)
        smallest = objective.beta / N
        self.lambdas = np.geomspace(objective.beta_max() / N, smallest, self.n_lambdas)[-self.n_lambdas :]
        self.lambdas[-1] = smallest

    def run(self, knob, clock):
        import adelie

        self.state = adelie.grpnet(
            self.matrix,
            self.glm,
            groups=self.groups,
            penalty=np.ones(len(self.groups)),
            alpha=1,
            lmda_path=self.lambdas,
            tol=knob,
            intercept=False,
            early_exit=False,
            progress_bar=False,
            n_threads=1,
            adev_tol=1.0,
        )

    def get_result(self):
        return self.state.betas[-1].toarray().ravel()


class AdeliePath(Adelie):
    name = "adelie, path"
    n_lambdas = 20

    @staticmethod
    def skip(facts):
        return Adelie.skip(facts) or ("run at small betas only" if facts["beta_ratio"] > 0.05 else None)
