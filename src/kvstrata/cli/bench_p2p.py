"""`kvstrata bench p2p`: pulling from a peer over loopback, beside a plain socket copy."""

import hashlib
import json
import multiprocessing
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.table import Table

from kvstrata.core.clock import SystemClock
from kvstrata.core.keys import JobId, OffloadKey, make_offload_key
from kvstrata.core.memory import SlotView
from kvstrata.core.request import ReqContext, ScheduleEndContext
from kvstrata.core.results import LoadJob, LookupResult
from kvstrata.core.settings import parse_bytes
from kvstrata.core.tier import TierEnv
from kvstrata.primary.region import HostRegion
from kvstrata.tiers.p2p import P2pTier
from kvstrata.tiers.p2p.settings import (
    Address,
    P2pSettings,
    default_num_connections,
    parse_address,
)
from kvstrata.tiers.p2p.transport import SOCKET_BUFFER_BYTES

NUM_LOOKUP_KEYS: Final = 1000
PATIENCE_S: Final = 60.0
COPY, PUBLISH = b"c", b"p"
STEP: Final = ScheduleEndContext((), ())


def p2p(
    chunk_size: Annotated[str, typer.Option(help="Payload of one chunk.")] = "2MiB",
    chunks: Annotated[int, typer.Option(min=1, help="Chunks pulled in one job.")] = 64,
    connections: Annotated[
        int, typer.Option(min=1, help="Connections for payload.")
    ] = default_num_connections(),
    rounds: Annotated[int, typer.Option(min=1, help="Times to measure; medians count.")] = 25,
    *,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Pull chunks from another process, and copy as many bytes over a plain socket, in turns."""
    result = bench_p2p(parse_bytes(chunk_size, "chunk-size"), chunks, connections, rounds)
    if json_output:
        print(json.dumps(result))
        return
    table = Table(title=f"{chunks} chunks of {chunk_size}, loopback, medians of {rounds}")
    for title in ("", "GB/s", "of the socket"):
        table.add_column(title, justify="right")
    table.add_row("plain socket", f"{result['socket_GBps']:.2f}", "")
    for name, rate in (("p2p tier", "load"), ("p2p tier, first reader", "first_load")):
        rate_GBps = result[f"{rate}_GBps"]  # noqa: N806
        table.add_row(name, f"{rate_GBps:.2f}", f"{rate_GBps / result['socket_GBps']:.0%}")
    console = Console()
    console.print(table)
    console.print(f"lookup of {NUM_LOOKUP_KEYS} keys: {result['lookup_ms']:.2f} ms")


def bench_p2p(
    chunk_bytes: int, num_chunks: int, num_connections: int, num_rounds: int
) -> dict[str, Any]:
    """Measure; every byte pulled is verified by the tier, as always."""
    total_bytes = num_chunks * chunk_bytes
    region = HostRegion.create(num_chunks, chunk_bytes, shared=False)
    with _serving_process(num_chunks, chunk_bytes) as (address, plain_address, secret_file):
        settings = P2pSettings(
            identity="bench-reader",
            peers={"bench-owner": address},
            secret_file=secret_file,
            num_connections=num_connections,
        )
        tier = P2pTier(region, settings, _env())
        with socket.create_connection(plain_address) as plain:
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER_BYTES)
            _copy_plainly(plain, region)  # warm: pages are taken, connections are open
            _load(tier, 0, num_chunks)
            socket_s, first_s, load_s, lookup_s = [], [], [], []
            for i in range(num_rounds):
                socket_s.append(_timed(lambda: _copy_plainly(plain, region)))
                _publish_anew(plain)
                first_s.append(_timed(lambda i=i: _load(tier, 2 * i + 1, num_chunks)))
                load_s.append(_timed(lambda i=i: _load(tier, 2 * i + 2, num_chunks)))
                lookup_s.append(_timed(lambda: _look_up(tier)))
        tier.shutdown(PATIENCE_S)
    load_GBps = total_bytes / statistics.median(load_s) / 1e9  # noqa: N806
    socket_GBps = total_bytes / statistics.median(socket_s) / 1e9  # noqa: N806
    return {
        "load_GBps": round(load_GBps, 3),
        "socket_GBps": round(socket_GBps, 3),
        "ratio": round(load_GBps / socket_GBps, 3),
        "first_load_GBps": round(total_bytes / statistics.median(first_s) / 1e9, 3),
        "fastest_load_GBps": round(total_bytes / min(load_s) / 1e9, 3),
        "fastest_socket_GBps": round(total_bytes / min(socket_s) / 1e9, 3),
        "lookup_ms": round(statistics.median(lookup_s) * 1e3, 3),
        "num_lookup_keys": NUM_LOOKUP_KEYS,
        "chunk_bytes": chunk_bytes,
        "num_chunks": num_chunks,
        "num_connections": num_connections,
        "num_rounds": num_rounds,
        "num_cpus": os.cpu_count(),
    }


def _key(number: int) -> OffloadKey:
    return make_offload_key(hashlib.sha256(b"bench %d" % number).digest(), 0)


def _env() -> TierEnv:
    return TierEnv("p2p", "bench", SystemClock(), "bench")


def _timed(action: Any) -> float:  # noqa: ANN401
    started_s = time.perf_counter()
    action()
    return time.perf_counter() - started_s


def _load(tier: P2pTier, job_id: int, num_chunks: int) -> None:
    keys = [_key(i) for i in range(num_chunks)]
    tier.submit_load(LoadJob(JobId(job_id), keys, range(num_chunks)))
    stuck = tier.drain_jobs(PATIENCE_S)
    (result,) = tier.get_finished_jobs()
    if stuck or result.failed:
        raise RuntimeError(f"{len(result.failed)} chunks did not arrive")


def _look_up(tier: P2pTier) -> None:
    """Ask for many keys, half of which the peer has, until all is known."""
    tier.reset()
    keys, ctx = [_key(i) for i in range(NUM_LOOKUP_KEYS)], ReqContext("bench")
    while LookupResult.RETRY in tier.lookup_many(keys, ctx):
        tier.on_schedule_end(STEP)
        time.sleep(1e-4)  # as an engine's step leaves the interpreter to others


def _publish_anew(plain: socket.socket) -> None:
    """Have the chunks take their slots anew, so that their checksums are not known yet."""
    plain.sendall(PUBLISH)
    plain.recv(1)


def _copy_plainly(plain: socket.socket, slots: SlotView) -> None:
    """Have every row sent and receive it in place."""
    plain.sendall(COPY)
    for slot in range(len(slots)):
        row = slots[slot]
        while row.nbytes:
            num_bytes = plain.recv_into(row)
            if not num_bytes:
                raise ConnectionResetError("the serving process ended")
            row = row[num_bytes:]


@contextmanager
def _serving_process(num_chunks: int, chunk_bytes: int) -> Iterator[tuple[Address, Address, str]]:
    """Run the serving side in a process of its own; give its addresses and the secret."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        secret = Path(folder) / "secret"
        secret.touch(mode=0o600)
        secret.write_text(os.urandom(32).hex())
        process = context.Process(
            target=_serve, args=(theirs, num_chunks, chunk_bytes, str(secret)), daemon=True
        )
        process.start()
        try:
            if not ours.poll(PATIENCE_S):
                raise RuntimeError("the serving process did not start")
            address, plain_port = ours.recv()
            yield parse_address(address, ""), Address("127.0.0.1", plain_port), str(secret)
        finally:
            ours.close()
            process.join(PATIENCE_S)


def _serve(control: Connection, num_chunks: int, chunk_bytes: int, secret_file: str) -> None:
    region = HostRegion.create(num_chunks, chunk_bytes, shared=False)
    for slot in range(num_chunks):
        region[slot][:] = hashlib.shake_128(b"%d" % slot).digest(4096) * (chunk_bytes // 4096) + (
            bytes(chunk_bytes % 4096)
        )
    listen = Address("127.0.0.1", 0)
    settings = P2pSettings(identity="bench-owner", listen=listen, secret_file=secret_file)
    tier = P2pTier(region, settings, _env())
    keys = [_key(i) for i in range(num_chunks)]
    tier.shelf.publish(keys, range(num_chunks))
    with socket.create_server(listen) as listener:
        control.send((str(tier.address), listener.getsockname()[1]))
        plain, _ = listener.accept()
        with plain:
            while order := plain.recv(1):
                if order == PUBLISH:
                    tier.shelf.publish(keys, range(num_chunks))
                    plain.sendall(order)
                    continue
                for slot in range(num_chunks):
                    plain.sendall(region[slot])
    tier.shutdown(PATIENCE_S)
