"""Certificates that cannot be used are one line, before anything starts."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import threading
from pathlib import Path

import pytest

from adaptor import config
from adaptor.errors import ConfigError
from adaptor.launchers.control import credentials
from tests.certificates import Authority
from tests.unit.threads import LONG_S


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that are read may be so slowly, beside much other work."""
    monkeypatch.setattr(credentials, "READ_S", LONG_S)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates") / "ours")


def _refusal(settings: dict[str, str]) -> str:
    with pytest.raises(ConfigError) as caught:
        credentials.load(config.load(settings))
    line = str(caught.value)
    assert "\n" not in line
    return line


def test_no_certificates_no_tls() -> None:
    assert credentials.load(config.load({})) is None


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


# while a job trains


@pytest.fixture
def files(authority: Authority, tmp_path: Path) -> dict[str, str]:
    """Certificates of this node, in a folder of its own."""
    settings = authority.settings("first")
    return {name: str(shutil.copy(path, tmp_path / name)) for name, path in settings.items()}


def test_files_that_have_not_changed_are_not_read_again(files: dict[str, str]) -> None:
    made = credentials.load(config.load(files))
    assert made is not None
    before = made.contexts
    assert asyncio.run(made.newest()) is before


@pytest.mark.robustness(
    "B4",
    "a renewed certificate is there and its key is not yet",
    "the pair before is used, and one line says so",
)
def test_a_half_written_pair(
    authority: Authority, files: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "adaptor")
    made = credentials.load(config.load(files))
    assert made is not None
    before, renewed = made.contexts, authority.settings("second")
    shutil.copy(renewed["TTP_TLS_CERT"], files["TTP_TLS_CERT"])
    for _ in range(3):
        assert asyncio.run(made.newest()) is before
    (line,) = caplog.messages
    assert line.startswith("changed certificates cannot be used, those read before are: TTP_TLS_KEY is ")
    assert line.endswith(": it is not the key of the certificate")
    shutil.copy(renewed["TTP_TLS_KEY"], files["TTP_TLS_KEY"])
    after = asyncio.run(made.newest())
    assert after is not before
    assert asyncio.run(made.newest()) is after
    assert caplog.messages[1:] == [f"TTP_TLS_CERT {files['TTP_TLS_CERT']} has changed and was read again"]


@pytest.mark.parametrize("what", ["noise", "nothing", "gone", "expired"])
def test_a_renewal_that_cannot_be_used(
    what: str, authority: Authority, files: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    made = credentials.load(config.load(files))
    assert made is not None
    before, path = made.contexts, Path(files["TTP_TLS_CERT"])
    if what == "expired":
        for name, expired in authority.settings("past", days=-1).items():
            shutil.copy(expired, files[name])
    elif what == "gone":
        path.unlink()
    else:
        path.write_bytes(b"noise" if what == "noise" else b"")
    for _ in range(2):
        assert asyncio.run(made.newest()) is before
    (line,) = caplog.messages
    assert line.startswith("changed certificates cannot be used, those read before are: TTP_TLS_")


def test_a_file_system_that_hangs(files: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for it longer than `READ_S`, and no second thread waits with the first."""
    monkeypatch.setattr(credentials, "READ_S", 0.05)
    made = credentials.load(config.load(files))
    assert made is not None
    path = Path(files["TTP_TLS_KEY"])
    path.unlink()
    os.mkfifo(path)  # who opens it waits for who writes

    async def twice() -> None:
        for _ in range(2):
            assert await made.newest() is before

    before = made.contexts
    asyncio.run(twice())
    (waiting,) = [thread for thread in threading.enumerate() if thread.name == "ttp-tls"]
    writer = os.open(
        path, os.O_WRONLY
    )  # returns when the thread opens it; where it opens it again is an empty file
    aside = path.with_suffix(".aside")
    aside.touch()
    aside.replace(path)  # which it opens again
    os.close(writer)
    waiting.join(LONG_S)
    assert not waiting.is_alive()
