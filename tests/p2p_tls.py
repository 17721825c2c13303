"""Certificates for tests of TLS between hosts, made with the `openssl` command."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest


class Authority:
    """Signs certificates for identities; a new one for each test that needs a stranger's."""

    def __init__(self, folder: Path) -> None:
        if shutil.which("openssl") is None:
            pytest.skip("needs the openssl command")
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._key, self._certificate = folder / "authority.key", folder / "authority.pem"
        self._run(
            *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"),
            *("-noenc", "-days", "30", "-subj", "/CN=authority of the tests"),
            *("-keyout", str(self._key), "-out", str(self._certificate)),
        )

    def settings(self, identity: str) -> dict[str, Any]:
        """Make a certificate for an identity; return the settings that use it."""
        key, request = self._folder / f"{identity}.key", self._folder / f"{identity}.csr"
        certificate, names = self._folder / f"{identity}.pem", self._folder / f"{identity}.ext"
        names.write_text(f"subjectAltName=DNS:{identity}\n")
        self._run(
            *("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-noenc"),
            *("-subj", f"/CN={identity}", "-keyout", str(key), "-out", str(request)),
        )
        self._run(
            *("x509", "-req", "-days", "30", "-in", str(request), "-extfile", str(names)),
            *("-CA", str(self._certificate), "-CAkey", str(self._key), "-CAcreateserial"),
            *("-out", str(certificate)),
        )
        authority = str(self._certificate)
        return {"tls": {"certificate": str(certificate), "key": str(key), "authority": authority}}

    @staticmethod
    def _run(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], check=True, capture_output=True)
