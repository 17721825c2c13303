"""Choose the next token from logits."""

import numpy as np

from kvstrata.engine.request import Sampling
from kvstrata.engine.rows import Array


def sample(logits: Array, sampling: Sampling, position: int) -> int:
    """Return the token for `position`; equal arguments give equal tokens in every process.

    Args:
        logits: Shape (vocabulary,).
        sampling: Temperature and seed.
        position: Where in the request the token will stand.
    """
    if sampling.temperature <= 0:
        return int(logits.argmax())
    noise = np.random.default_rng((sampling.seed, position)).gumbel(size=logits.shape)
    return int((logits / sampling.temperature + noise).argmax())
