"""Unusable certificates are one line, before anything starts."""

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
    """Allow slow reads of files: the machine may be busy."""
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
    other_path = authority.settings("other")["TTP_TLS_KEY"]
    line = _refusal({**authority.settings(), "TTP_TLS_KEY": other_path})
    assert line.startswith(f"TTP_TLS_KEY is {other_path!r}, ")
    assert line.endswith(": it is not the key of the certificate")


def test_a_key_with_a_passphrase(authority: Authority) -> None:
    """Nobody is asked for the passphrase: there may be no terminal."""
    settings = authority.settings()
    line = _refusal({**settings, "TTP_TLS_KEY": authority.locked(settings["TTP_TLS_KEY"])})
    assert line.endswith("or the key has a passphrase")


def test_an_expired_certificate(authority: Authority) -> None:
    line = _refusal(authority.settings("old", days=-1))
    assert line.startswith("TTP_TLS_CERT is ")
    assert line.endswith(": certificate has expired")


def test_another_signer(authority: Authority, tmp_path: Path) -> None:
    other_path = str(Authority(tmp_path / "other").path)
    line = _refusal({**authority.settings(), "TTP_TLS_CA": other_path})
    assert f"it is not accepted with TTP_TLS_CA {other_path!r}: certificate " in line


# while a job trains


@pytest.fixture
def files(authority: Authority, tmp_path: Path) -> dict[str, str]:
    settings = authority.settings("first")
    return {name: str(shutil.copy(path, tmp_path / name)) for name, path in settings.items()}


def test_files_that_have_not_changed_are_not_read_again(files: dict[str, str]) -> None:
    loaded = credentials.load(config.load(files))
    assert loaded is not None
    contexts = loaded.contexts
    assert asyncio.run(loaded.newest()) is contexts


@pytest.mark.robustness(
    "B4",
    "a renewed certificate is there and its key is not yet",
    "the pair before is used, and one line says so",
)
def test_a_half_written_pair(
    authority: Authority, files: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "adaptor")
    loaded = credentials.load(config.load(files))
    assert loaded is not None
    contexts, renewed = loaded.contexts, authority.settings("second")
    shutil.copy(renewed["TTP_TLS_CERT"], files["TTP_TLS_CERT"])
    for _ in range(3):
        assert asyncio.run(loaded.newest()) is contexts
    (line,) = caplog.messages
    assert line.startswith("changed certificates cannot be used, those read before are: TTP_TLS_KEY is ")
    assert line.endswith(": it is not the key of the certificate")
    shutil.copy(renewed["TTP_TLS_KEY"], files["TTP_TLS_KEY"])
    renewed_contexts = asyncio.run(loaded.newest())
    assert renewed_contexts is not contexts
    assert asyncio.run(loaded.newest()) is renewed_contexts
    assert caplog.messages[1:] == [f"TTP_TLS_CERT {files['TTP_TLS_CERT']} has changed and was read again"]


@pytest.mark.parametrize("damage", ["noise", "nothing", "gone", "expired"])
def test_a_renewal_that_cannot_be_used(
    damage: str, authority: Authority, files: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    loaded = credentials.load(config.load(files))
    assert loaded is not None
    contexts, path = loaded.contexts, Path(files["TTP_TLS_CERT"])
    if damage == "expired":
        for name, expired in authority.settings("past", days=-1).items():
            shutil.copy(expired, files[name])
    elif damage == "gone":
        path.unlink()
    else:
        path.write_bytes(b"noise" if damage == "noise" else b"")
    for _ in range(2):
        assert asyncio.run(loaded.newest()) is contexts
    (line,) = caplog.messages
    assert line.startswith("changed certificates cannot be used, those read before are: TTP_TLS_")


def test_a_file_system_that_hangs(files: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading is given up after `READ_S`, and no second thread starts to wait."""
    monkeypatch.setattr(credentials, "READ_S", 0.05)
    loaded = credentials.load(config.load(files))
    assert loaded is not None
    path = Path(files["TTP_TLS_KEY"])
    path.unlink()
    os.mkfifo(path)  # opening a FIFO blocks until a writer comes

    async def twice() -> None:
        for _ in range(2):
            assert await loaded.newest() is contexts

    contexts = loaded.contexts
    asyncio.run(twice())
    (waiting,) = [thread for thread in threading.enumerate() if thread.name == "ttp-tls"]
    writer = os.open(
        path, os.O_WRONLY
    )  # returns when the thread opens the FIFO; its second open finds an empty file
    aside = path.with_suffix(".aside")
    aside.touch()
    aside.replace(path)  # opened again by the thread
    os.close(writer)
    waiting.join(LONG_S)
    assert not waiting.is_alive()
