"""A preempted request: its blocks wait for its stores, and it comes back by loading."""

import numpy as np

from kvstrata.build import build_manager
from kvstrata.engine.engine import Engine, EngineConfig
from kvstrata.engine.model import KVGroup
from kvstrata.engine.request import Request, Sampling
from tests.integration.workloads import VOCAB_SIZE, LateTransfers, UnfencedTransfers, make_model

MODEL = make_model((KVGroup((0, 1), 4),))
CONFIG = EngineConfig(num_blocks=(20,), blocks_per_chunk=(1,))
ROOMY = EngineConfig(num_blocks=(100,), blocks_per_chunk=(1,))


def add_requests(engine: Engine) -> list[Request]:
    random = np.random.default_rng(3)
    prompts = [[int(t) for t in random.integers(0, VOCAB_SIZE, n)] for n in (30, 21)]
    return [engine.add_request(prompt, Sampling(max_tokens=24)) for prompt in prompts]


def run_with(transfers: LateTransfers) -> list[Request]:
    manager = build_manager(
        {"primary": {"num_chunks": 60, "policy": "lru"}},
        chunk_bytes=CONFIG.chunk_bytes(MODEL.config),
        namespace="test",
    )
    engine = Engine(MODEL, CONFIG, manager, transfers=transfers)
    transfers.kv = engine.kv
    requests = add_requests(engine)
    list(engine.run())
    engine.close()
    return requests


def run_alone() -> list[Request]:
    engine = Engine(MODEL, ROOMY)
    requests = add_requests(engine)
    list(engine.run())
    return requests


def test_blocks_of_a_preempted_request_are_reused_only_after_its_stores() -> None:
    transfers = LateTransfers(seed=0, late_rate=0.95)
    requests = run_with(transfers)
    assert requests[1].counts.preemptions > 0
    assert transfers.num_waited > 0
    assert [r.output for r in requests] == [r.output for r in run_alone()]


def test_without_the_wait_it_would_come_back_with_foreign_content() -> None:
    found = [r.output for r in run_with(UnfencedTransfers(seed=0, late_rate=0.95))]
    assert found != [r.output for r in run_alone()]


def test_a_preempted_request_is_loaded_and_not_recomputed() -> None:
    _, preempted = run_with(LateTransfers(seed=0, late_rate=0.0))
    assert preempted.counts.preemptions == 1
    assert preempted.counts.loaded > 0
    # Every token but the last has to be computed once; a second time only what fills no chunk.
    assert preempted.counts.computed - (preempted.num_tokens - 1) < 4
