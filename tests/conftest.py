import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)

# the same examples on every machine and in every run; how long one takes is nobody's business
settings.register_profile(
    "convexformer",
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("convexformer")
