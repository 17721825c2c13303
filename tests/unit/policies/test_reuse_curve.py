"""What the policies learn about times of use."""

import random

from kvstrata.core.keys import OffloadKey
from kvstrata.policies.reuse_curve import EDGES_S, ReuseCurves


def key(number: int) -> OffloadKey:
    return OffloadKey(number.to_bytes(8, "big"))


def age_bin(age_s: float) -> int:
    return max(i for i, edge in enumerate(EDGES_S) if edge <= age_s)


def learn(curves: ReuseCurves, num_requests: int, gap_s: float, class_idx: int = 0) -> None:
    """Let half of all chunks be used again after `gap_s`, the others never."""
    for number in range(num_requests):
        now_s = float(number)
        used = [key(number - int(gap_s))] if number >= gap_s and number % 2 else []
        curves.note_use(used, now_s)
        curves.sample(key(number), class_idx, 1, now_s)
        curves.update_if_due(now_s)


def test_a_chunk_is_worth_holding_until_it_is_usually_used_again() -> None:
    curves = ReuseCurves(4096)
    learn(curves, 3_000, 40.0)
    assert 40.0 < curves.horizon_s() <= 64.0


def test_a_chunk_past_its_usual_time_is_worth_less_than_a_new_one() -> None:
    curves = ReuseCurves(4096)
    learn(curves, 3_000, 40.0)
    rates = curves.value().rates[0]
    assert rates[age_bin(100.0)] < rates[age_bin(0.0)] < rates[age_bin(32.0)]


def test_chance_of_use_is_learned_from_chunks_that_were_never_used_too() -> None:
    curves = ReuseCurves(4096)
    learn(curves, 3_000, 40.0)
    survival = curves.value().survival[0]
    assert 0.4 < survival[age_bin(64.0)] < 0.6


def test_a_class_without_samples_is_judged_as_its_group() -> None:
    curves = ReuseCurves(4096, num_groups=2, num_kinds=2)
    learn(curves, 3_000, 40.0, class_idx=1)
    value = curves.value()
    assert value.survival[0][age_bin(64.0)] < 0.7  # same group as class 1
    assert abs(value.survival[0][10] - value.survival[2][10]) < 0.1  # other group: the total


def test_side_tables_stay_bounded_over_many_requests() -> None:
    curves = ReuseCurves(16)
    rng = random.Random(1)
    for number in range(20_000):
        now_s = number / 50
        curves.note_use([key(rng.randrange(100_000))], now_s)
        curves.mark_end(key(number), now_s)
        curves.sample(key(number), 0, 1, now_s)
        curves.update_if_due(now_s)
        assert curves.num_in_flight <= 512 + 2 * 256
        assert curves.num_marks <= 2 * 512 + 256
    assert curves.horizon_s() > 0


def test_repeated_keys_in_one_request_count_once() -> None:
    curves = ReuseCurves(4096)
    curves.note_use([], 0.0)
    curves.sample(key(1), 0, 1, 0.0)
    assert len(curves.note_use([key(1), key(1)], 1.0)) == 1


def test_the_end_of_the_turn_before_is_met_on_the_path() -> None:
    curves = ReuseCurves(4096)
    curves.note_use([key(1), key(2)], 5.0)
    curves.mark_end(key(2), 5.0)
    met = curves.note_use([key(1), key(2), key(3)], 9.0)
    assert [mark.end_s for mark in met] == [5.0]


def test_late_uses_are_learned_however_many_requests_end_meanwhile() -> None:
    curves = ReuseCurves(4096)
    for number in range(8_000):
        now_s = float(number)
        curves.note_use([key(number)], now_s)  # sampled 2,000 requests ago
        for i in range(8):
            curves.mark_end(key(100_000 + 8 * number + i), now_s)
        curves.sample(key(number + 2_000), 0, 1, now_s)
        curves.update_if_due(now_s)
    survival = curves.value().survival[0]
    assert survival[age_bin(1_000.0)] > 0.6
    assert survival[age_bin(3_000.0)] < 0.2
