"""Loads: objects into slots, verified, hedged where asked, never past their deadline."""

from functools import partial
from math import inf

import numpy as np

from kvstrata.core.errors import CorruptChunkError
from kvstrata.core.events import EventKind, RemovalReason
from kvstrata.core.results import LoadJob
from kvstrata.tiers.chunk_format import HEADER_BYTES, verify_chunk
from kvstrata.tiers.jobs import Outcome
from kvstrata.tiers.object.board import Board, Copy, CopyState
from kvstrata.tiers.object.client import RETRIED, FailureKind, ObjectStoreError
from kvstrata.tiers.object.removal import Removals
from kvstrata.tiers.object.workers import Lane


class Loads:
    """Copies from the store into slots."""

    def __init__(self, board: Board, removals: Removals) -> None:
        self._board = board
        self._removals = removals

    def submit(self, job: LoadJob) -> None:
        """Queue a job's chunks. The caller holds the lock."""
        board = self._board
        hints = job.req_context.hints if job.req_context else None
        wait_s = inf if hints is None or hints.max_wait_s is None else hints.max_wait_s
        deadline_s = board.env.clock.now_s() + min(board.settings.load_timeout_s, wait_s)
        names = board.names_of(job.keys)
        copies = [
            Copy(job, key, name, slot, deadline_s)
            for key, name, slot in zip(job.keys, names, job.slots, strict=False)
        ]
        board.open(job, copies)
        board.pool.submit(Lane.LOAD, *(partial(self._load, copy) for copy in copies))

    def _load(self, copy: Copy, *, is_hedge: bool = False) -> None:
        """Try one time, on a worker."""
        board = self._board
        with board.lock:
            if copy.state is not CopyState.WAITING or (is_hedge and not copy.num_running):
                return
            if board.is_leaving(copy.name):
                board.settle(copy, Outcome.FAILED)
                return
            copy.num_running += 1
            num_deletions = board.num_deletions
            if is_hedge:
                board.counters["hedged_loads"] += 1
            else:
                copy.num_tries += 1
        if board.settings.hedge_after_s is not None and not is_hedge:
            hedge = partial(self._load, copy, is_hedge=True)
            delay_s = max(board.settings.hedge_after_s, 1e-6)
            board.pool.submit(Lane.LOAD, hedge, delay_s=delay_s)
        with board.guarding(copy):
            try:
                body = board.client.read(board.path_of(copy.name), board.object_bytes)
            except ObjectStoreError as error:
                self._failed(copy, error)
                return
            with board.lock:
                board.health.answered()
                copy.num_running -= 1
                if copy.state is not CopyState.WAITING:
                    return  # given up, or the other one of a hedged pair was sooner
                copy.state = CopyState.LANDING
                board.counters["hedges_won"] += is_hedge
            self._land(copy, body, num_deletions)

    def _land(self, copy: Copy, body: memoryview, num_deletions: int) -> None:
        board = self._board
        payload = board.slots[copy.slot]
        # numpy copies without holding the interpreter's lock.
        np.frombuffer(payload, np.uint8)[:] = np.frombuffer(body, np.uint8)[HEADER_BYTES:]
        try:  # what has arrived in the slot is checked, so that the copy is covered as well
            header = verify_chunk(body, payload, copy.key, board.digest, board.env.name)
        except CorruptChunkError:
            with board.lock:
                self._removals.remove([copy.name], RemovalReason.CORRUPT)
                board.settle(copy, Outcome.CORRUPT)
            return
        with board.lock:
            if header.expires_at_s <= board.env.clock.wall_s():
                self._removals.remove([copy.name], RemovalReason.EXPIRED)
                board.settle(copy, Outcome.FAILED)
                return
            board.note_read(copy.name, header.expires_at_s, num_deletions)
            board.settle(copy, Outcome.ARRIVED)

    def _failed(self, copy: Copy, error: ObjectStoreError) -> None:
        board = self._board
        is_absent = error.kind is FailureKind.NOT_FOUND
        if not is_absent and error.kind is not FailureKind.WRONG_SIZE:
            board.failed(error, "loading")
        with board.lock:
            copy.num_running -= 1
            if copy.state is not CopyState.WAITING:
                return
            if error.kind is FailureKind.WRONG_SIZE:
                self._removals.remove([copy.name], RemovalReason.CORRUPT)
                board.settle(copy, Outcome.CORRUPT)
            elif is_absent:
                if board.forget(copy.name):
                    board.say(EventKind.REMOVED, [copy.name], RemovalReason.EXTERNAL)
                board.settle(copy, Outcome.FAILED)
            elif copy.num_running:
                return  # the other one of a hedged pair is still reading
            elif error.kind in RETRIED and copy.num_tries < board.settings.num_tries:
                board.counters["retries"] += 1
                delay_s = board.backoff_s(copy.num_tries)
                board.pool.submit(Lane.LOAD, partial(self._load, copy), delay_s=delay_s)
            else:
                board.settle(copy, Outcome.FAILED)
