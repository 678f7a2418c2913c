"""Certificates that cannot be used are one line, before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from adaptor import config
from adaptor.errors import ConfigError
from adaptor.launchers import tls
from tests.certificates import Authority


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates") / "ours")


def _refusal(settings: dict[str, str]) -> str:
    with pytest.raises(ConfigError) as caught:
        tls.load(config.load(settings))
    line = str(caught.value)
    assert "\n" not in line
    return line


def test_no_certificates_no_tls() -> None:
    assert tls.load(config.load({})) is None


@pytest.mark.parametrize("variable", ["TTP_TLS_CERT", "TTP_TLS_KEY", "TTP_TLS_CA"])
def test_a_file_that_is_not_there(variable: str, authority: Authority, tmp_path: Path) -> None:
    path = str(tmp_path / "missing.pem")
    line = _refusal({**authority.settings(), variable: path})
    assert line == f"{variable} is {path!r}: the file cannot be read (No such file or directory)"


def test_a_folder(authority: Authority, tmp_path: Path) -> None:
    line = _refusal({**authority.settings(), "TTP_TLS_KEY": str(tmp_path)})
    assert line == f"TTP_TLS_KEY is {str(tmp_path)!r}: the file cannot be read (Is a directory)"


@pytest.mark.parametrize("variable", ["TTP_TLS_CERT", "TTP_TLS_KEY"])
def test_a_file_of_something_else(variable: str, authority: Authority, tmp_path: Path) -> None:
    path = tmp_path / "noise.pem"
    path.write_bytes(bytes(range(256)))
    line = _refusal({**authority.settings(), variable: str(path)})
    assert str(path) in line
    assert line.endswith(": one of them is not in PEM form, or the key has a passphrase")


def test_a_signer_of_something_else(authority: Authority, tmp_path: Path) -> None:
    path = tmp_path / "noise.pem"
    path.write_bytes(bytes(range(256)))
    line = _refusal({**authority.settings(), "TTP_TLS_CA": str(path)})
    assert line == f"TTP_TLS_CA is {str(path)!r}: no certificate in PEM form is in it"


def test_the_key_of_another_certificate(authority: Authority) -> None:
    other = authority.settings("other")["TTP_TLS_KEY"]
    line = _refusal({**authority.settings(), "TTP_TLS_KEY": other})
    assert line.startswith(f"TTP_TLS_KEY is {other!r}, ")
    assert line.endswith(": it is not the key of the certificate")


def test_a_key_with_a_passphrase(authority: Authority) -> None:
    """Nobody is asked for it: there may be no terminal."""
    settings = authority.settings()
    line = _refusal({**settings, "TTP_TLS_KEY": authority.locked(settings["TTP_TLS_KEY"])})
    assert line.endswith("or the key has a passphrase")


def test_an_expired_certificate(authority: Authority) -> None:
    line = _refusal(authority.settings("old", days=-1))
    assert line.startswith("TTP_TLS_CERT is ")
    assert line.endswith(": certificate has expired")


def test_another_signer(authority: Authority, tmp_path: Path) -> None:
    other = str(Authority(tmp_path / "other").path)
    line = _refusal({**authority.settings(), "TTP_TLS_CA": other})
    assert f"it is not accepted with TTP_TLS_CA {other!r}: certificate " in line
