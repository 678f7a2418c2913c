"""examples/modellink/ttprun_llama.sh uses valid options of ttprun and ModelLink."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from adaptor import config
from adaptor.launchers.cli import flags

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "modellink" / "ttprun_llama.sh"
# Every option of ModelLink's parser at af1347 with its number of values, recorded from `parse_args`.
OPTIONS = ROOT / "tests" / "frameworks" / "modellink_options.json"
GIVEN = {
    "MODELLINK": "here",
    "DATA": "/data/llama_text_document",
    "TOKENIZER": "/data/llama",
    "SAVE": "/save",
}
Shell = Callable[..., tuple[list[str], dict[str, str]]]


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    """Run the script with a ttprun that records its arguments."""
    (tmp_path / "here").mkdir()
    ttprun = tmp_path / "ttprun"
    recorder = (
        "import json, os, sys; json.dump([sys.argv[1:], dict(os.environ)], open(os.environ['SEEN'], 'w'))"
    )
    ttprun.write_text(f"#!{sys.executable}\n{recorder}\n")
    ttprun.chmod(0o755)

    def run(**variables: str) -> tuple[list[str], dict[str, str]]:
        settings = {name: value for name, value in os.environ.items() if not name.startswith("TTP_")}
        environ = {**settings, **GIVEN, "SEEN": str(tmp_path / "seen"), **variables}
        environ["PATH"] = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
        completed = subprocess.run(
            ["bash", SCRIPT], env=environ, cwd=tmp_path, capture_output=True, check=False
        )
        assert completed.returncode == 0, completed.stderr.decode()
        arguments, environment = json.loads((tmp_path / "seen").read_text())
        return arguments, environment

    return run


def _parsed(
    recorded: tuple[list[str], dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> tuple[argparse.Namespace, argparse.Namespace, config.Config]:
    """Return ttprun's parsed arguments, ModelLink's parsed arguments, and the settings."""
    arguments, environ = recorded
    for setting in config.settings():  # the flags set variables, which monkeypatch restores
        monkeypatch.setenv(setting.variable, environ.get(setting.variable, setting.default))
    launched = flags.parse(arguments)
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for option, values in json.loads(OPTIONS.read_text()).items():
        if option in ("-h", "--help"):
            continue
        if values == 0:
            parser.add_argument(option, action="store_true")
        else:
            parser.add_argument(option, nargs=None if values == 1 else values)
    parser.add_argument("--local-copy-os", action="store_true")  # the adaptor's
    return launched, parser.parse_args(launched.training_script_args), config.load()


def test_one_node(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    launched, training, settings = _parsed(shell(), monkeypatch)
    assert (launched.nproc_per_node, launched.nnodes, launched.max_restarts) == ("8", "1", 100)
    assert (launched.master_addr, launched.master_port) == ("127.0.0.1", 6000)
    assert launched.training_script == "pretrain_llama.py"
    assert (settings.enabled, settings.timeout_s, settings.port) == (True, 360, 8000)
    assert (training.use_distributed_optimizer, training.save, training.load) == (True, "/save", None)
    assert (training.local_copy_os, training.use_flash_attn, training.deepspeed) == (False, False, False)


def test_several_nodes_with_all_settings(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = {
        "NPUS_PER_NODE": "7",
        "GLOBAL_BATCH": "56",
        "NNODES": "2",
        "NODE_RANK": "1",
        "MASTER_ADDR": "10.0.0.1",
        "GLOO_SOCKET_IFNAME": "enp189s0f0",
        "TTP_OT": "120",
        "LOCAL_COPY": "1",
        "ATLAS_800T_A2": "1",
        "LOAD": "/weights",
    }
    recorded = shell(**chosen)
    launched, training, settings = _parsed(recorded, monkeypatch)
    assert (launched.nproc_per_node, launched.nnodes, launched.node_rank) == ("7", "2", 1)
    assert (launched.master_addr, recorded[1]["GLOO_SOCKET_IFNAME"]) == ("10.0.0.1", "enp189s0f0")
    assert settings.timeout_s == 120
    assert training.local_copy_os
    assert training.use_flash_attn
    assert (training.load, training.no_load_optim) == ("/weights", True)
    assert int(training.global_batch_size) % (int(training.micro_batch_size) * 7 * 2) == 0


def test_started_again_it_goes_on(shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From whatever it began: optimizer and random states are loaded, too."""
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    recorded = shell(SAVE=str(tmp_path), LOAD="/weights")
    _, training, _ = _parsed(recorded, monkeypatch)
    assert training.load == training.save == str(tmp_path)
    assert (training.no_load_optim, training.no_load_rng) == (False, False)


@pytest.mark.parametrize(("chosen", "tls"), [({}, "mutual"), ({"TTP_TLS": "plain"}, "plain")])
def test_only_the_user_trusts_the_network(
    chosen: dict[str, str], tls: str, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    several = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1", "GLOO_SOCKET_IFNAME": "enp189s0f0"}
    _, _, settings = _parsed(shell(**several, **chosen), monkeypatch)
    assert (settings.tls, settings.tls_cert) == (tls, "")


def test_certificates_are_used_where_there_are_some(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {f"TTP_TLS_{name}": f"{name}.pem" for name in ("CERT", "KEY", "CA")}
    _, _, settings = _parsed(shell(**files), monkeypatch)
    assert settings.tls == "mutual"


def test_the_plain_framework_gets_no_argument_of_ours(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    _, training, settings = _parsed(shell(LOCAL_COPY="1", ENABLE_TTP="False"), monkeypatch)
    assert (settings.enabled, training.local_copy_os) == (False, False)


@pytest.mark.parametrize("missing", ["NODE_RANK", "MASTER_ADDR", "GLOO_SOCKET_IFNAME"])
def test_several_nodes_want_to_know(missing: str, shell: Shell) -> None:
    recorded = {"NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1", "GLOO_SOCKET_IFNAME": "enp189s0f0", missing: ""}
    with pytest.raises(AssertionError, match=f" {missing}: "):
        shell(NNODES="2", **recorded)
