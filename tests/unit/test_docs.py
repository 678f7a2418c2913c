"""Commands on the pages in docs/ work, and quoted code exists."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

import adaptor
from adaptor import config
from adaptor.launchers.cli import flags
from adaptor.launchers.control import credentials
from adaptor.launchers.control.agent_connections import (
    AgentListener,
    RejectedConnections,
    connect,
    read_hello,
)
from adaptor.launchers.control.credentials import Tls
from adaptor.protocol import wire
from adaptor.protocol.messages import AgentHello
from tests.ports import free_port
from tests.unit.threads import LONG_S
from tests.waiting import captured

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    *sorted(ROOT.glob("docs/**/*.md")),
]
SEVERAL_NODES = ROOT / "docs/several_nodes.md"


def _blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith(("https://", "http://")):
            continue
        name, _, anchor = target.partition("#")
        path = page.parent / name if name else page
        assert path.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
            assert anchor in map(_anchor, headings), target


def test_every_page_is_linked_from_another_one() -> None:
    linked = {
        (page.parent / target.partition("#")[0]).resolve()
        for page in PAGES
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text())
        if not target.startswith(("http", "#"))
    }
    assert {page.name for page in ROOT.glob("docs/**/*.md") if page not in linked} == set()


def test_the_index_names_no_file_that_is_gone() -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    named = set(re.findall(r"`(?:[\w/]+/)?(\w+\.py)`", text))
    folders = ("adaptor", "launchers", "patches", "tests")
    assert named - {path.name for folder in folders for path in (ROOT / folder).rglob("*.py")} == set()
    paths = set(re.findall(r"`((?:adaptor|launchers|patches|tests)/[\w/]+\.py)`", text))
    assert {path for path in paths if not (ROOT / path).is_file()} == set()


def test_the_training_loop_is_that_of_the_example() -> None:
    example = (ROOT / "examples/megatron_core/pretrain.py").read_text()
    blocks = _blocks(ROOT / "docs/training_loops.md", "python")
    assert blocks
    assert [block for block in blocks if block not in example] == []


def _commands() -> list[tuple[dict[str, str], list[str]]]:
    """Return the variables and the ttprun arguments of both nodes' commands."""
    text = "\n".join(_blocks(SEVERAL_NODES, "bash"))
    commands = []
    for line in re.findall(r"^\S+ ttprun .*$", text.replace("\\\n", " "), re.MULTILINE):
        variable, _, *arguments = shlex.split(line)
        name, _, value = variable.partition("=")
        commands.append(({name: value}, arguments))
    return commands


def test_the_commands_of_several_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Node 0 of two, its spare node, and a node of an elastic job."""
    commands = _commands()
    for node, (variables, arguments) in zip((0, 2, 3), commands, strict=True):
        for setting in config.settings():
            monkeypatch.setenv(setting.variable, "")
            monkeypatch.delenv(setting.variable)
        arguments, is_spare = flags.without(flags.SPARE, arguments)
        assert is_spare is (node == 2)
        parsed = flags.parse(arguments)
        flags.require_sense(parsed)
        settings = config.load()
        assert variables.keys() == {"GLOO_SOCKET_IFNAME"}
        if node == 3:
            assert (parsed.nnodes, parsed.rdzv_backend) == ("3:4", "c10d")
            continue
        rank = 0 if is_spare else node
        assert (parsed.nnodes, parsed.node_rank, parsed.max_restarts) == ("2", rank, 3)
        assert parsed.training_script == "pretrain_gpt.py"
        assert (settings.tls_cert, settings.tls_key) == (f"node{node}.pem", f"node{node}.key")


def test_the_certificates_let_two_nodes_meet(tmp_path: Path) -> None:
    """Made as on the page; one node listens, the other connects."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl program to make certificates with")
    (commands,) = [block for block in _blocks(SEVERAL_NODES, "bash") if block.startswith("openssl")]
    subprocess.run(["bash", "-euc", commands], cwd=tmp_path, check=True, capture_output=True)

    def of(node: int) -> Tls:
        files = {"CERT": f"node{node}.pem", "KEY": f"node{node}.key", "CA": "signer.pem"}
        loaded = credentials.load(
            config.load({f"TTP_TLS_{end}": str(tmp_path / name) for end, name in files.items()})
        )
        assert loaded is not None
        return loaded

    async def meet() -> None:
        came: list[AgentHello] = []

        async def welcome(
            hello: AgentHello, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
        ) -> None:
            came.append(hello)
            writer.write(b"welcome")
            await reader.read()

        rejected = RejectedConnections("the listener of the test")
        listener = AgentListener(secret, of(0), rejected, welcome, read_hello)
        try:
            port = listener.listen("127.0.0.1", free_port())
            reader, writer = await connect("127.0.0.1", port, secret, of(1))
            assert writer.get_extra_info("ssl_object").version() == "TLSv1.3"
            writer.write(wire.frame(AgentHello(1, (1,))))
            assert await reader.readexactly(7) == b"welcome"
            assert came == [AgentHello(1, (1,))]
            writer.close()
        finally:
            await listener.close()
            rejected.close()

    secret = os.urandom(32)
    asyncio.run(asyncio.wait_for(meet(), LONG_S))


def pages_of_the_site() -> set[str]:
    """Return the pages that `make docs` copies: tracked pages without tests and raw results."""
    command = ["git", "ls-files", "*.md", ":!tests", ":!benchmarks/results"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return set(listed.stdout.split())


def test_each_page_has_a_place_in_the_site() -> None:
    """A new page needs a line in the `nav` of mkdocs.yml."""
    places = re.findall(r"^      - (?:.*: )?(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert len(places) == len(set(places))
    assert set(places) == pages_of_the_site()


def test_a_version_is_the_same_everywhere() -> None:
    (version,) = re.findall(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert adaptor.__version__ == version
    assert re.findall(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE) == [version]
    (released,) = re.findall(r"^date-released: (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    headings = re.findall(r"^## \[(.*)\](?: - (.*))?$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[:2] == [("Unreleased", ""), (version, released)]


def test_the_memory_of_usual_layouts() -> None:
    """docs/is_it_for_me.md calculates with the formulas of docs/costs.md."""
    text = (ROOT / "docs/is_it_for_me.md").read_text()
    row = re.compile(r"^\| (\d+)B \| TP(\d+) PP(\d+), d = (\d+) \| ([\d,]+) \| (.*) \|$", re.MULTILINE)
    rows = row.findall(text)
    assert len(rows) >= 6
    for billions, *sizes, ranks, figures in rows:
        tp, pp, d = map(int, sizes)
        parameter_gb = int(billions) / (tp * pp)  # GB of one byte for each parameter of the rank
        expected = [
            6 * parameter_gb + 12 * parameter_gb / d,
            12 * parameter_gb / d,
            16 * parameter_gb / d,
            24 * parameter_gb / d,
        ]
        assert int(ranks.replace(",", "")) == tp * pp * d
        assert figures.split(" | ") == [f"{gigabytes:.1f}" for gigabytes in expected]
    costs = (ROOT / "docs/costs.md").read_text()
    assert all(formula in costs for formula in ("12·N/d", "16·N/d", "24·N/d"))


def test_nothing_tells_a_user_to_install_the_adaptor_from_an_index() -> None:
    """The adaptor is on no index, and anybody may register its name there."""
    by_name = r"(^|[^/\w])(ttp-adaptor\[|(install|add)( -[^ ]+)* +['\"]?(ttp-)?adaptor([^/\w]|$))"
    files = [":!pyproject.toml", ":!tests/unit/test_docs.py"]
    search = ["git", "grep", "-nIPi", by_name, "--", *files]
    hits = captured(search, cwd=ROOT)
    assert (hits.returncode, hits.stdout) == (1, "")
