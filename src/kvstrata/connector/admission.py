"""When a request may start to load, so that loaded requests can't hold each other up."""


class LoadGate:
    """Knows who holds blocks for a load and has not run since, and whose load failed.

    Two ways to a standstill are closed here. Requests that have loaded a part hold blocks that
    each of them needs to go on: with a known capacity only as many load as fit in whole. And a
    request whose load failed may head the engine's queue without blocks, and so keep the loaded
    ones behind it from running: it is told to wait until those have run, and no new load starts
    meanwhile.
    """

    def __init__(self, capacity_tokens: int | None) -> None:
        self._capacity_tokens = capacity_tokens
        self._not_run: set[str] = set()  # loading, or loaded and not scheduled since
        self._prefilling: dict[str, int] = {}  # loaded and not through the prompt: tokens it needs
        self._failed_waiting: set[str] = set()

    def may_start(self, req_id: str, num_tokens: int) -> bool:
        """Say whether a request of this many tokens may load now; False: ask again later."""
        if self._failed_waiting - {req_id}:
            return False
        if self._capacity_tokens is None or not self._prefilling:
            return True
        return sum(self._prefilling.values()) + num_tokens <= self._capacity_tokens

    def may_compute(self, req_id: str) -> bool:
        """Say whether a request whose load failed may ask for blocks; False: ask again later."""
        self._failed_waiting.add(req_id)
        return not self._not_run - {req_id}

    def on_load(self, req_id: str, num_tokens: int) -> None:
        """Note that a load starts for a request that will need `num_tokens`."""
        self._not_run.add(req_id)
        self._prefilling[req_id] = num_tokens

    def on_scheduled(self, req_id: str) -> None:
        """Note that a request runs."""
        self._not_run.discard(req_id)
        self._failed_waiting.discard(req_id)

    def on_prefilled(self, req_id: str) -> None:
        """Note that a request has computed, or will in this step, all tokens it came with."""
        self._prefilling.pop(req_id, None)

    def forget(self, req_id: str) -> None:
        """Note that a request lost its blocks or ended."""
        self._not_run.discard(req_id)
        self._prefilling.pop(req_id, None)
        self._failed_waiting.discard(req_id)

    @property
    def num_held(self) -> int:
        """Requests that hold blocks for a load and have not run since."""
        return len(self._not_run)
