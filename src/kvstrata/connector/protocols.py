"""What the connector needs to see of an engine: one request, and one step."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol


class EngineRequest(Protocol):
    """A request as the engine's scheduler knows it; the connector reads it and changes nothing.

    The object is kept from `on_new_request` to `request_finished` and read anew at each call, so
    it may be the engine's own, growing request. `num_computed_tokens` is as the engine counts it
    when the call is made; in `build_connector_meta` it does not hold this step's tokens yet.
    """

    @property
    def req_id(self) -> str:
        """Unique among live requests."""
        ...

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        ...

    @property
    def num_tokens(self) -> int:
        """Tokens known so far: prompt and output."""
        ...

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose keys and values are in the engine's blocks."""
        ...

    @property
    def block_hashes(self) -> Sequence[bytes]:
        """Chained hashes, one for every full `tokens_per_hash` tokens known; it only grows.

        A hash has to name everything that changes the bytes of its prefix: tokens, adapter, media,
        tenant, salt. `core.namespace.hash_blocks` makes such hashes; an engine's own will do.
        """
        ...

    @property
    def kv_transfer_params(self) -> Mapping[str, Any] | None:
        """As the client sent them."""
        ...


class StepOutput(Protocol):
    """What one scheduler iteration decided. Tables and block ids are per KV group, in order."""

    @property
    def num_scheduled_tokens(self) -> Mapping[str, int]:
        """Tokens that this step computes, by request id: every request that runs in it."""
        ...

    @property
    def new_req_ids(self) -> Collection[str]:
        """Requests that run for the first time (not those that come back after a preemption)."""
        ...

    @property
    def preempted_req_ids(self) -> Collection[str]:
        """Requests whose blocks were taken away while this step was scheduled.

        In the step that preempts it, a request is not asked about or given blocks again.
        """
        ...

    @property
    def new_block_ids(self) -> Sequence[Collection[int]]:
        """All blocks handed out since the last step, one collection per group.

        Naming more than those is harmless, naming fewer is not. Blocks already announced by
        `update_state_after_alloc` need not be named again.
        """
        ...

    @property
    def unfilled_block_ids(self) -> Sequence[Collection[int]]:
        """Blocks of running requests that somebody else still fills, one collection per group.

        The chunks that hold them, and later ones, are not stored until they are no longer named.
        Empty for an engine where nobody else fills blocks.
        """
        ...

    def get_block_ids(self, req_id: str) -> Sequence[Sequence[int]]:
        """Return the whole block table of a scheduled request: for each group, block i's id.

        Places that a sliding window has left behind hold the null block. Asked only for requests
        that this step schedules and for which a chunk is to be stored.
        """
        ...
