# # Paths
#
# One certified solution for each beta, from the smallest at which all weights are zero down: which tokens enter, and when.

# %%
import convexformer as cf

X, y = cf.data.digits(patch=2)
path = cf.path("attention", X[:500], y[:500], n_betas=10, beta_min_ratio=0.01, intercept=True, tolerance=1e-4)
path

# %% [markdown]
# Each curve is a token; the lower panel is the certified relative gap.

# %%
path.plot(n_labels=6)

# %% [markdown]
# Any point of the path is a solution with its own network.

# %%
middle = path.solutions[5]
middle

# %%
from sklearn.metrics import accuracy_score

for index in (2, 5, 9):
    predicted = path.solutions[index].predict(X[500:1000]).argmax(1)
    accuracy = accuracy_score(y[500:1000], predicted)
    print(f"beta / beta_max {path.betas[index] / path.beta_max:.3f}: test accuracy {accuracy:.3f}")
