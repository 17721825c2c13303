"""Copies keep off the cores that compute threads are bound to."""

import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from subprocess import PIPE, Popen
from threading import Event, Thread

import pytest

from kvstrata.integrations.vllm_cpus import spare_cpus

ALLOWED = sorted(os.sched_getaffinity(0))
FIRST, REST = {ALLOWED[0]}, set(ALLOWED[1:])
pytestmark = pytest.mark.skipif(len(ALLOWED) < 2, reason="needs two CPUs")


def spare_beside(cpus: set[int]) -> set[int]:
    """Ask on a thread that is bound to `cpus`, as vLLM binds those that compute."""
    with ThreadPoolExecutor(1, initializer=os.sched_setaffinity, initargs=(0, cpus)) as pool:
        return pool.submit(spare_cpus, os.getpid()).result()


@contextmanager
def bound_threads(cpus: set[int]) -> Iterator[None]:
    """Threads of this process that compute, one bound to each of these CPUs."""
    may_end = Event()
    threads = []
    for cpu in cpus:
        is_bound = Event()

        def run(cpu: int = cpu, is_bound: Event = is_bound) -> None:
            os.sched_setaffinity(0, {cpu})
            is_bound.set()
            may_end.wait()

        threads.append(Thread(target=run))
        threads[-1].start()
        is_bound.wait()
    try:
        yield
    finally:
        may_end.set()
        for thread in threads:
            thread.join()


def test_the_core_of_the_thread_that_computes_is_not_spare() -> None:
    assert spare_beside(FIRST) == REST


def test_beside_a_thread_that_is_bound_to_no_core_all_its_cpus_are_spare() -> None:
    with bound_threads(FIRST):
        assert spare_beside(set(ALLOWED)) == set(ALLOWED)


def test_where_every_core_computes_all_are_spare() -> None:
    with bound_threads(REST):
        assert spare_beside(FIRST) == set(ALLOWED)


def test_the_cores_of_other_ranks_are_not_spare() -> None:
    code = f"import os; os.sched_setaffinity(0, {{{ALLOWED[-1]}}}); print(flush=True); input()"
    with Popen([sys.executable, "-c", code], stdin=PIPE, stdout=PIPE, text=True) as child:
        assert child.stdout is not None
        child.stdout.readline()
        expected = (REST - {ALLOWED[-1]}) or set(ALLOWED)
        assert spare_beside(FIRST) == expected
        child.communicate("\n")
