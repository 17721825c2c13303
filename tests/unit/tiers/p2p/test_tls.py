"""TLS between hosts: both show a certificate, and it has to be for the identity they claim."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstrata.core.keys import JobId
from kvstrata.core.request import ReqContext
from kvstrata.core.results import LoadJob, LookupResult
from kvstrata.testing import numbered_key
from kvstrata.testing.tier_calls import wait_for
from tests.p2p_hosts import Host, Proxy, eventually, secret_file
from tests.p2p_tls import Authority

A = numbered_key(0)
HIT, MISS = LookupResult.HIT, LookupResult.MISS
LISTEN = "127.0.0.1:0"


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ours")


@pytest.fixture
def owner(authority: Authority) -> Iterator[Host]:
    with Host("owner", listen=LISTEN, **authority.settings("owner")) as owner:
        owner.primary.put(A)
        yield owner


def test_hosts_of_one_authority_serve_each_other(owner: Host, authority: Authority) -> None:
    with Host("reader", peers={"owner": owner.address}, **authority.settings("reader")) as reader:
        assert reader.look_up(A) == [HIT]
        assert reader.fetch(A).failed == frozenset()


def test_a_certificate_of_another_authority_opens_nothing(owner: Host, tmp_path: Path) -> None:
    foreign = Authority(tmp_path / "foreign")
    with Host("reader", peers={"owner": owner.address}, **foreign.settings("reader")) as reader:
        assert reader.look_up(A) == [MISS]
    assert owner.stats()["accepted_connections"] == 0


def test_a_host_without_a_certificate_is_not_let_in(owner: Host, tmp_path: Path) -> None:
    with Host(
        "reader", peers={"owner": owner.address}, secret_file=secret_file(tmp_path),
        connect_timeout_s=1.0,
    ) as reader:  # fmt: skip
        assert reader.look_up(A) == [MISS]
    assert owner.stats()["accepted_connections"] == 0


def test_a_caller_is_not_let_in_under_an_identity_that_is_not_its_certificates(
    owner: Host, authority: Authority
) -> None:
    with Host("somebody", peers={"owner": owner.address}, **authority.settings("reader")) as reader:
        assert reader.look_up(A) == [MISS]
    eventually(lambda: owner.stats()["protocol_errors"] == 1, "the error counted")


def test_a_host_is_not_believed_under_an_identity_that_is_not_its_certificates(
    authority: Authority,
) -> None:
    with (
        Host("owner", listen=LISTEN, **authority.settings("other")) as impostor,
        Host("reader", peers={"owner": impostor.address}, **authority.settings("reader")) as reader,
    ):
        impostor.primary.put(A)
        assert reader.look_up(A) == [MISS]


def test_certificates_and_a_secret_may_both_be_asked_for(
    authority: Authority, tmp_path: Path
) -> None:
    secret = secret_file(tmp_path)
    with (
        Host("owner", listen=LISTEN, secret_file=secret, **authority.settings("owner")) as owner,
        Host("with", peers={"owner": owner.address}, secret_file=secret,
             **authority.settings("with")) as reader,
        Host("without", peers={"owner": owner.address}, **authority.settings("without"))
        as outsider,
    ):  # fmt: skip
        owner.primary.put(A)
        assert reader.look_up(A) == [HIT]
        assert outsider.look_up(A) == [MISS]


def test_a_transfer_under_tls_can_be_cancelled(authority: Authority) -> None:
    chunk_bytes = 8 << 20
    with (
        Host("owner", listen=LISTEN, chunk_bytes=chunk_bytes, num_slots=2,
             **authority.settings("owner")) as owner,
        Proxy(owner.address) as wire,
        Host("reader", peers={"owner": wire.address}, chunk_bytes=chunk_bytes, num_slots=2,
             silence_timeout_s=600.0, **authority.settings("reader")) as reader,
    ):  # fmt: skip
        owner.primary.put(A)
        assert reader.look_up(A) == [HIT]
        wire.stop_after(300_000)
        reader.tier.submit_load(LoadJob(JobId(1), [A], [0], ReqContext("r")))
        eventually(lambda: wire.num_passed_bytes > 300_000, "the transfer's start")
        reader.tier.cancel(JobId(1))
        assert wait_for(reader.tier, 1)[1].failed == {A}
        wire.resume()
        assert reader.fetch(A).failed == frozenset()
