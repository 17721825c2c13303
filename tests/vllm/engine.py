"""vLLM in this process, with and without the connector."""

import gc
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams, TokensPrompt
from vllm.distributed import cleanup_dist_env_and_memory

from tests.vllm.models import VOCABULARY

PLAIN = "kvstrata.integrations.vllm:KVStrataConnector"
Tokens = list[list[int]]
# Waiting for a copy takes steps of no work as well; the slowest test needs a twentieth of this.
NUM_STEPS_MAX = 200_000


def prompts(num: int, num_tokens: int, seed: int, num_shared: int = 0) -> Tokens:
    """Random prompts; the first `num_shared` tokens are the same in all of them."""
    rng = random.Random(seed)
    shared = [rng.randrange(3, VOCABULARY) for _ in range(num_shared)]
    return [
        shared + [rng.randrange(3, VOCABULARY) for _ in range(num_tokens - num_shared)]
        for _ in range(num)
    ]


def transfer_config(extra: dict[str, Any] | None, connector: str = PLAIN) -> dict[str, Any]:
    """The JSON argument that loads the connector."""
    module, _, name = connector.partition(":")
    return {
        "kv_connector": name,
        "kv_connector_module_path": module,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra or {},
    }


class Engine:
    """One vLLM engine; `extra` None runs it without a connector."""

    def __init__(
        self, model: Path, extra: dict[str, Any] | None, connector: str = PLAIN, **options: Any
    ) -> None:
        settings: dict[str, Any] = {
            "dtype": "float32",
            "block_size": 128,
            "num_gpu_blocks_override": 20,
            "max_model_len": 2048,
            "enforce_eager": True,
            "disable_log_stats": False,
            "seed": 0,
            **options,
        }
        if extra is not None:
            settings["kv_transfer_config"] = transfer_config(extra, connector)
        self.llm = LLM(str(model), **settings)
        self.core = self.llm.llm_engine.engine_core.engine_core
        self.first_token_s: list[float] = []  # of every request that got through

    @property
    def connector(self) -> Any:
        """The connector beside the scheduler."""
        return self.core.scheduler.connector

    @property
    def scheduler(self) -> Any:
        """The engine-neutral half of it."""
        return self.connector.scheduler_side.scheduler

    def run(self, batch: Sequence[list[int]], num_new: int = 8, **sampling: Any) -> Tokens:
        """Generate greedily for all prompts at once; returns the new tokens."""
        done = self.steps(batch, num_new, {}, **sampling)
        return [done[i] for i in range(len(batch))]

    def run_each(self, batch: Sequence[list[int]], num_new: int = 8, **sampling: Any) -> Tokens:
        """Generate for one prompt after the other."""
        return [self.run([tokens], num_new, **sampling)[0] for tokens in batch]

    def steps(
        self,
        batch: Sequence[list[int]],
        num_new: int,
        events: Mapping[int, Callable[[], None]],
        **sampling: Any,
    ) -> dict[int, list[int]]:
        """Generate greedily for all prompts at once; returns what got through, by number.

        Args:
            batch: The prompts; the request of number i has the id `str(i)`.
            num_new: Tokens to generate.
            events: What happens before which step.
            sampling: More sampling parameters.

        Raises:
            AssertionError: The requests do not end in a generous number of steps: some starve.
        """
        core = self.llm.llm_engine
        params = SamplingParams(temperature=0, max_tokens=num_new, ignore_eos=True, **sampling)
        ids: dict[str, int] = {}
        for i, tokens in enumerate(batch):
            core.add_request(str(i), TokensPrompt(prompt_token_ids=tokens), params)
            ids[str(i)] = i
        done: dict[int, list[int]] = {}
        step = 0
        while core.has_unfinished_requests():
            if step in events:
                events[step]()
            for output in core.step():
                if output.finished:
                    done[ids[output.request_id]] = list(output.outputs[0].token_ids)
                    self.first_token_s.append(output.metrics.first_token_latency)
            step += 1
            assert step < NUM_STEPS_MAX, f"still unfinished: {sorted(ids.values() - done.keys())}"
        return done

    def abort(self, number: int) -> None:
        """Abort one request of a running batch."""
        self.llm.llm_engine.abort_request([str(number)])

    def counter(self, name: str) -> float:
        """The value of one of the engine's counters, over all labels."""
        found = [metric for metric in self.llm.get_metrics() if metric.name == name]
        assert found, name
        return float(sum(metric.value for metric in found))

    def settle(self) -> None:
        """Step until no copy is in flight: nothing steps an idle engine in this process."""
        while self.connector.has_pending_push_work():
            self.core.step_fn()

    def check_leaks(self) -> None:
        """Assert that no job, pin or request is left."""
        self.settle()
        self.scheduler.check()
        mine, manager = self.scheduler.get_stats(), self.scheduler.manager.get_stats()
        for name in ("open_loads", "open_stores", "open_blocks", "live_requests", "held_requests"):
            assert mine[name] == 0, name
        for name in ("num_writing", "num_pinned", "num_requests"):
            assert manager[name] == 0, name

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()
        del self.llm, self.core
        cleanup_dist_env_and_memory()
        gc.collect()


@contextmanager
def engine(
    model: Path, extra: dict[str, Any] | None, connector: str = PLAIN, **options: Any
) -> Iterator[Engine]:
    """An engine that is closed at the end, and has leaked nothing."""
    running = Engine(model, extra, connector, **options)
    try:
        yield running
        if extra is not None:
            running.check_leaks()
    finally:
        running.close()
