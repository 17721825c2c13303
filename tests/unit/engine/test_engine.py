from dataclasses import replace

import numpy as np
import pytest

from kvstrata.engine.engine import Engine, EngineConfig
from kvstrata.engine.model import KVGroup, Transformer
from kvstrata.engine.request import Request, Sampling, Status
from kvstrata.engine.scheduler import SchedulerLimits
from kvstrata.engine.tiny import tiny_config, tiny_weights

CONFIG = tiny_config((KVGroup((0,), 4), KVGroup((1,), 8, window=10)))
MODEL = Transformer(CONFIG, tiny_weights(CONFIG, seed=1))
DEFAULT = Sampling(max_tokens=12)
ROOMY, TIGHT = (200, 100), (24, 13)


def make_engine(num_blocks: tuple[int, int] = ROOMY, **limits: int) -> Engine:
    return Engine(MODEL, EngineConfig(num_blocks, (1, 1), SchedulerLimits(**limits)))


def make_prompt(count: int, seed: int = 0) -> list[int]:
    return list(map(int, np.random.default_rng(seed).integers(0, CONFIG.vocab_size, count)))


def run_all(
    engine: Engine, prompts: list[list[int]], sampling: Sampling = DEFAULT
) -> list[Request]:
    requests = [
        engine.add_request(prompt, replace(sampling, seed=sampling.seed + i))
        for i, prompt in enumerate(prompts)
    ]
    finished = list(engine.run())
    assert {r.req_id for r in finished} == {r.req_id for r in requests}
    return requests


def assert_nothing_is_held(engine: Engine, num_blocks: tuple[int, int]) -> None:
    for pool, count in zip(engine.tables.pools, num_blocks, strict=True):
        pool.check()
        assert pool.num_free == count - 1


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_tokens_are_the_same_alone_together_and_under_preemption(temperature: float) -> None:
    sampling = replace(DEFAULT, temperature=temperature)
    shared = make_prompt(20)
    prompts = [shared[: 3 * i] + make_prompt(20 + i, seed=i) for i in range(6)]
    alone = [
        run_all(make_engine(), [p], replace(sampling, seed=i))[0].output
        for i, p in enumerate(prompts)
    ]
    tight = make_engine(TIGHT, num_step_tokens_max=16)
    requests = run_all(tight, prompts, sampling)
    assert sum(r.counts.preemptions for r in requests) > 0
    assert [r.output for r in requests] == alone
    assert [r.output for r in run_all(make_engine(), prompts, sampling)] == alone
    assert_nothing_is_held(tight, TIGHT)


def test_a_returning_prompt_is_served_from_the_engines_blocks() -> None:
    engine = make_engine()
    first = run_all(engine, [make_prompt(41)])[0]
    second = run_all(engine, [make_prompt(41)])[0]
    assert (second.counts.engine, second.counts.computed) == (40, 12)
    assert second.output == first.output


def test_no_step_computes_more_than_its_limit() -> None:
    engine = make_engine(num_step_tokens_max=16)
    request = engine.add_request(make_prompt(50), Sampling(max_tokens=1))
    counts = []
    while engine.has_work:
        before = request.num_computed_tokens
        engine.step()
        counts.append(request.num_computed_tokens - before)
    assert counts == [16, 16, 16, 2]


def test_decoding_goes_on_beside_a_long_prefill() -> None:
    engine = make_engine(num_step_tokens_max=16)
    short = engine.add_request(make_prompt(5), Sampling(max_tokens=5))
    engine.add_request(make_prompt(90, seed=1), Sampling(max_tokens=1))
    for _ in range(5):
        engine.step()
    assert short.status is Status.FINISHED


def test_an_aborted_request_gives_its_blocks_back() -> None:
    engine = make_engine()
    running = engine.add_request(make_prompt(40), Sampling(max_tokens=50))
    waiting = engine.add_request(make_prompt(40, seed=1))
    engine.step()
    engine.abort(running.req_id)
    engine.abort(waiting.req_id)
    engine.abort("unknown")
    assert not engine.has_work
    assert running.status is waiting.status is Status.ABORTED
    assert_nothing_is_held(engine, ROOMY)


def test_output_ends_with_a_stop_token() -> None:
    whole = run_all(make_engine(), [make_prompt(30)])[0].output
    stopping = replace(DEFAULT, stop_tokens=frozenset({whole[3]}))
    stopped = run_all(make_engine(), [make_prompt(30)], stopping)[0]
    assert stopped.output == whole[: whole.index(whole[3]) + 1]


def test_a_request_that_can_never_fit_is_refused() -> None:
    engine = make_engine(TIGHT)
    with pytest.raises(ValueError, match="more blocks than the engine has"):
        engine.add_request(make_prompt(90))
    with pytest.raises(ValueError, match="empty"):
        engine.add_request([])
    assert not engine.has_work


def test_a_request_id_can_be_used_again_only_when_it_is_over() -> None:
    engine = make_engine()
    engine.add_request(make_prompt(5), req_id="a")
    with pytest.raises(ValueError, match="in use"):
        engine.add_request(make_prompt(5), req_id="a")
    list(engine.run())
    engine.add_request(make_prompt(5), req_id="a")
    engine.close()
    assert not engine.has_work
