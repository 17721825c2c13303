import numpy as np

from kvstrata.engine.request import Sampling
from kvstrata.engine.sampling import sample

LOGITS = np.array([0.0, 2.0, 1.0, -5.0], dtype=np.float32)


def test_temperature_zero_takes_the_likeliest() -> None:
    assert sample(LOGITS, Sampling(temperature=0.0, seed=1), position=7) == 1


def test_choice_depends_on_seed_and_position_alone() -> None:
    hot = Sampling(temperature=1.0, seed=4)
    tokens = [sample(LOGITS, hot, position) for position in range(50)]
    assert tokens == [sample(LOGITS.copy(), hot, position) for position in range(50)]
    assert tokens != [sample(LOGITS, Sampling(temperature=1.0, seed=5), p) for p in range(50)]


def test_tokens_come_as_often_as_their_probability_says() -> None:
    drawn = [sample(LOGITS, Sampling(temperature=1.0), position) for position in range(2000)]
    weights = np.exp(LOGITS)
    assert np.allclose(np.bincount(drawn, minlength=4) / 2000, weights / weights.sum(), atol=0.04)
