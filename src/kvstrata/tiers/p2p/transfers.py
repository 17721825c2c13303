"""What is asked of a peer: questions and fetches as tasks, and the jobs that fetches add up to."""

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from typing_extensions import override

from kvstrata.core.errors import ProtocolError
from kvstrata.core.keys import JobId, OffloadKey
from kvstrata.core.memory import SlotView
from kvstrata.core.results import JobResult, LoadJob
from kvstrata.tiers.p2p.nixl_plane import NixlPlane
from kvstrata.tiers.p2p.session import CancelledTransferError, Lane, Task
from kvstrata.tiers.p2p.transport import Channel
from kvstrata.tiers.p2p.wire import (
    Attach,
    Attached,
    Fetch,
    Found,
    Locate,
    Located,
    Lookup,
    Release,
    Seals,
    State,
    chunk_digest,
)

SEALED_BYTES: Final = 8 << 20  # what is lost at most when the peer is lost while it sends


class Outcome(Enum):
    """How the attempt to fetch one chunk ended."""

    LOADED = "loaded"
    ABSENT = "absent"  # the peer does not have it, or not any more
    BUSY = "busy"  # it has it, but over a limit
    LOST = "lost"  # the peer was lost, or the job cancelled or out of time
    CORRUPT = "corrupt"


@dataclass(eq=False, slots=True)
class Load:
    """One load job in flight; its slots are the job's while an item is open."""

    job: LoadJob
    deadline_s: float
    num_open: int
    started_s: float
    failed: set[OffloadKey] = field(default_factory=set)
    corrupt: set[OffloadKey] = field(default_factory=set)
    expires_at_s: dict[OffloadKey, float] = field(default_factory=dict)
    channels: set[Channel] = field(default_factory=set)
    is_cancelled: bool = False

    @property
    def result(self) -> JobResult:
        """What became of it."""
        failed, corrupt = frozenset(self.failed), frozenset(self.corrupt)
        return JobResult(self.job.job_id, failed, corrupt, self.expires_at_s)

    @property
    def is_over(self) -> bool:
        """Whether there is no point in going on."""
        return self.is_cancelled or time.monotonic() >= self.deadline_s


class Loads:
    """All load jobs in flight; each ends in one result, once no item of it is open.

    Thread: any. Blocks: for a short lock; `wait` as long as it says.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._loads: dict[JobId, Load] = {}
        self._finished: list[JobResult] = []

    def start(self, job: LoadJob, timeout_s: float, started_s: float) -> Load:
        """Take up a job; an empty one ends at once."""
        load = Load(job, time.monotonic() + timeout_s, len(job.keys), started_s)
        with self._changed:
            self._loads[job.job_id] = load
            self._end_if_settled(load)
        return load

    def finish(self, result: JobResult) -> None:
        """Add the result of a job that never ran."""
        with self._changed:
            self._finished.append(result)

    def settle(
        self,
        load: Load,
        outcomes: Mapping[OffloadKey, Outcome],
        expires_at_s: Mapping[OffloadKey, float] | None = None,
    ) -> None:
        """Close chunks for good. Nothing writes their slots any more."""
        with self._changed:
            for key, outcome in outcomes.items():
                if outcome is not Outcome.LOADED:
                    load.failed.add(key)
                if outcome is Outcome.CORRUPT:
                    load.corrupt.add(key)
            load.expires_at_s.update(expires_at_s or {})
            load.num_open -= len(outcomes)
            self._end_if_settled(load)

    def _end_if_settled(self, load: Load) -> None:
        if load.num_open == 0:
            del self._loads[load.job.job_id]
            self._finished.append(load.result)
            self._changed.notify_all()

    def enter(self, load: Load, channel: Channel) -> bool:
        """Note that a connection works for the job; False if the job is over."""
        with self._changed:
            if load.is_over:
                return False
            load.channels.add(channel)
            return True

    def leave(self, load: Load, channel: Channel) -> None:
        """Note that it does not any more."""
        with self._changed:
            load.channels.discard(channel)

    def cancel(self, job_ids: Collection[JobId] | None = None) -> None:
        """End these jobs, or all, as soon as their connections notice; unknown ids are ignored."""
        with self._changed:
            for job_id in list(self._loads) if job_ids is None else job_ids:
                load = self._loads.get(job_id)
                if load is not None:
                    load.is_cancelled = True
                    for channel in load.channels:
                        channel.abort()

    def take_finished(self) -> list[JobResult]:
        """Return the results since the last call."""
        with self._changed:
            finished, self._finished = self._finished, []
            return finished

    def wait(self, timeout_s: float) -> Collection[JobId]:
        """Wait until no job is in flight; return those that still are."""
        with self._changed:
            self._changed.wait_for(lambda: not self._loads, timeout_s)
            return list(self._loads)

    def in_flight(self) -> list[Load]:
        """Return the jobs in flight, oldest first."""
        with self._changed:
            return list(self._loads.values())


Told = Callable[[str, Sequence[OffloadKey], Sequence[int] | None, int], None]


class Question(Task):
    """Which of these does the peer have? `told` gets its states, or None if there is no answer."""

    lane = Lane.CONTROL

    def __init__(self, peer: str, keys: Sequence[OffloadKey], epoch: int, told: Told) -> None:
        self._peer, self._keys, self._epoch, self._told = peer, keys, epoch, told

    @override
    def run(self, channel: Channel) -> None:
        channel.set_deadline(channel.silence_timeout_s)
        channel.send(Lookup(self._keys))
        self._told(self._peer, self._keys, _states(channel, len(self._keys)), self._epoch)

    @override
    def fail(self) -> None:
        self._told(self._peer, self._keys, None, self._epoch)


@dataclass(frozen=True, slots=True)
class Piece:
    """Chunks of one load that one peer is asked for at once, `keys[i]` into `slots[i]`.

    `others` are the peers to try afterwards, in order.
    """

    load: Load
    peer: str
    keys: Sequence[OffloadKey]
    slots: Sequence[int]
    others: tuple[str, ...]


Tried = Callable[[Piece, Mapping[OffloadKey, Outcome], Mapping[OffloadKey, float]], None]
"""Gets what became of a piece's chunks, and when those that came expire, if they do."""


class FetchTask(Task):
    """Fetch chunks from one peer straight into their slots."""

    lane = Lane.PAYLOAD

    def __init__(self, piece: Piece, rows: SlotView, loads: Loads, tried: Tried) -> None:
        """Prepare it; `tried` is called once, when none of the slots is touched any more."""
        self._piece, self._rows = piece, rows
        self._loads, self._tried = loads, tried
        self._outcomes: dict[OffloadKey, Outcome] = {}
        self._expires_at_s: dict[OffloadKey, float] = {}

    @override
    def run(self, channel: Channel) -> None:
        load = self._piece.load
        if self._loads.enter(load, channel):
            try:
                channel.set_deadline(load.deadline_s - time.monotonic())
                self._fetch(channel)
            except OSError as error:
                if load.is_over:  # aborted from here, or too slow: not the peer's death
                    raise CancelledTransferError(channel.name, "transfer ended") from error
                raise
            finally:
                self._loads.leave(load, channel)
        self._report()

    @override
    def fail(self) -> None:
        self._report()

    def _report(self) -> None:
        outcomes = {key: self._outcomes.get(key, Outcome.LOST) for key in self._piece.keys}
        self._tried(self._piece, outcomes, self._expires_at_s)

    def _fetch(self, channel: Channel) -> None:
        keys = self._piece.keys
        num_per_seals = max(1, min(len(keys), SEALED_BYTES // self._rows.chunk_bytes))
        channel.send(Fetch(keys, num_per_seals))
        here = self._note_states(channel)
        for start in range(0, len(here), num_per_seals):
            group = here[start : start + num_per_seals]
            channel.receive_payload(*(self._rows[self._piece.slots[index]] for index in group))
            self._judge(channel, group)

    def _note_states(self, channel: Channel) -> list[int]:
        """Take the first answer; return the indices of the chunks that are there."""
        here = []
        for index, state in enumerate(_states(channel, len(self._piece.keys))):
            if state == State.HIT:
                here.append(index)
            else:
                is_busy = state == State.BUSY
                self._outcomes[self._piece.keys[index]] = (
                    Outcome.BUSY if is_busy else Outcome.ABSENT
                )
        return here

    def _checksum(self, index: int) -> bytes:
        row = self._rows[self._piece.slots[index]]
        digest = chunk_digest(self._piece.keys[index], row.nbytes)
        digest.update(row)
        return digest.digest()

    def _judge(self, channel: Channel, here: Sequence[int]) -> None:
        """Compare the checksums of what came with what the peer says they must be."""
        received = [self._checksum(index) for index in here]
        seals = channel.receive(Seals).seals
        if len(seals) != len(here):
            raise ProtocolError(channel.name, f"{len(seals)} seals of {len(here)} chunks")
        for index, checksum, seal in zip(here, received, seals, strict=True):
            key = self._piece.keys[index]
            if seal.checksum is None:
                self._outcomes[key] = Outcome.ABSENT
            elif checksum != seal.checksum:
                self._outcomes[key] = Outcome.CORRUPT
            else:
                self._outcomes[key] = Outcome.LOADED
                if seal.expires_at_s is not None:
                    self._expires_at_s[key] = seal.expires_at_s


class NixlFetchTask(FetchTask):
    """Fetch chunks from one peer by reading its slots; over the connection if it has no NIXL."""

    def __init__(
        self, piece: Piece, rows: SlotView, loads: Loads, tried: Tried, plane: NixlPlane
    ) -> None:
        super().__init__(piece, rows, loads, tried)
        self._plane = plane

    @override
    def _fetch(self, channel: Channel) -> None:
        if channel.nixl_agent is None:
            channel.send(Attach())
            metadata = channel.receive(Attached).metadata
            channel.nixl_agent = self._plane.meet(metadata) if metadata else ""
        if not channel.nixl_agent:
            super()._fetch(channel)
            return
        channel.send(Locate(self._piece.keys))
        here = self._note_states(channel)
        addresses = channel.receive(Located).addresses
        if len(addresses) != len(here):
            raise ProtocolError(channel.name, f"{len(addresses)} addresses of {len(here)} chunks")
        if here:
            slots = [self._piece.slots[index] for index in here]
            self._plane.read(channel.nixl_agent, slots, addresses)
        channel.send(Release())
        self._judge(channel, here)


def _states(channel: Channel, num_keys: int) -> bytes:
    states = channel.receive(Found).states
    if len(states) != num_keys:
        raise ProtocolError(channel.name, f"{len(states)} answers to {num_keys} keys")
    return states
