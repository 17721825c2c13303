"""vLLM's request, step and events in our words, and ours in vLLM's."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from vllm.distributed.kv_events import (
    MEDIUM_CPU,
    MEDIUM_STORAGE,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
)
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash

from kvstrata.core.events import PRIMARY_MEDIUM, EventKind, OffloadingEvent
from kvstrata.core.keys import get_block_hash, get_group_idx


class VllmRequest:
    """vLLM's request as an `EngineRequest`."""

    __slots__ = ("request",)

    def __init__(self, request: Any) -> None:  # noqa: ANN401
        self.request = request

    @property
    def req_id(self) -> str:
        """The id that vLLM uses inside."""
        return str(self.request.request_id)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return int(self.request.num_prompt_tokens)

    @property
    def num_tokens(self) -> int:
        """Tokens known so far."""
        return int(self.request.num_tokens)

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose KV is in blocks, or will be once the scheduled steps have run."""
        return int(self.request.num_computed_tokens)

    @property
    def block_hashes(self) -> Sequence[bytes]:
        """Chained hashes of vLLM; none, so that nothing is found or stored, where they fall short.

        An adapter is in the hash by its name only, and may be another one after a restart. A
        resumable request replaces tokens that it had.
        """
        if self.request.lora_request is not None or self.request.resumable:
            return ()
        hashes: Sequence[bytes] = self.request.block_hashes
        return hashes

    @property
    def kv_transfer_params(self) -> Mapping[str, Any] | None:
        """As the client sent them."""
        params: Mapping[str, Any] | None = self.request.kv_transfer_params
        return params


class VllmStep:
    """vLLM's scheduler output as a `StepOutput`."""

    def __init__(self, output: Any, num_groups: int, readmitted: Collection[str]) -> None:  # noqa: ANN401
        """Read the output.

        Args:
            output: vLLM's `SchedulerOutput`; not changed.
            num_groups: KV groups.
            readmitted: Requests that got blocks in this step: a reset between two steps preempts
                requests that may then be admitted at once, and are not preempted any more.
        """
        self._tables = output.kv_connector_block_state
        self.num_scheduled_tokens: Mapping[str, int] = output.num_scheduled_tokens
        preempted = set(output.preempted_req_ids or ())
        self.preempted_req_ids = preempted - set(readmitted) - set(self.num_scheduled_tokens)
        cached = output.scheduled_cached_reqs
        # The V2 model runner lists resumed requests among the new ones.
        self.new_req_ids = [
            new.req_id for new in output.scheduled_new_reqs if new.req_id not in preempted
        ]
        # Blocks of waiting requests were announced by `update_state_after_alloc`.
        self.new_block_ids: list[list[int]] = [[] for _ in range(num_groups)]
        for tables in cached.new_block_ids:
            for group_idx, block_ids in enumerate(tables or ()):
                self.new_block_ids[group_idx] += block_ids
        self.unfilled_block_ids: Sequence[Collection[int]] = [()] * num_groups

    def get_block_ids(self, req_id: str) -> Sequence[Sequence[int]]:
        """Return the whole block table of a scheduled request."""
        tables: Sequence[Sequence[int]] | None = self._tables.get_block_ids(req_id)
        assert tables is not None, req_id
        return tables


def translated(event: OffloadingEvent) -> Iterable[KVCacheEvent]:
    """Yield vLLM's events for one of ours; hashes are those that vLLM publishes itself."""
    if event.kind is EventKind.CLEARED:
        yield AllBlocksCleared()
        return
    is_host = event.medium == PRIMARY_MEDIUM
    where = {
        "medium": MEDIUM_CPU if is_host else MEDIUM_STORAGE,
        "ownership": None if is_host else event.medium,
    }
    for key in event.keys:
        hashes = [maybe_convert_block_hash(BlockHash(get_block_hash(key)))]
        group_idx = get_group_idx(key)
        if event.kind is EventKind.STORED:
            yield BlockStored(
                block_hashes=hashes, parent_block_hash=None, token_ids=[], block_size=0,
                lora_id=None, lora_name=None, group_idx=group_idx, **where,
            )  # fmt: skip
        else:
            yield BlockRemoved(block_hashes=hashes, group_idx=group_idx, **where)
