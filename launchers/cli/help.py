"""The help of `ttprun`: our flags in groups, the flags of torchrun that most jobs need, exit codes.

`ttprun --help-all` prints every flag of torchrun and the whole text of ours.
"""

from __future__ import annotations

import argparse
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from typing import NoReturn

from adaptor import config
from adaptor.operations.terminal import exit_code_of

GROUPS: Mapping[str, Sequence[str]] = {
    "After a fault": (
        "TTP_ONLINE",
        "TTP_SPARES",
        "TTP_NO_PROGRESS",
        "TTP_FAILED_SAVE",
        "TTP_OT",
        "TTP_GRACE",
        "TTP_HANG",
    ),
    "What is protected": (
        "ENABLE_TTP",
        "TTP_REPLICA",
        "TTP_LOCAL_COPY",
        "TTP_HOST_COPY",
        "TTP_REQUIRE_PROTECTION",
    ),
    "Several nodes": (
        "TTP_TLS_CERT",
        "TTP_TLS_KEY",
        "TTP_TLS_CA",
        "TTP_TLS",
        "TTP_PORT",
        "TTP_PLATFORM",
        "TTP_BATCH",
        "TTP_RESHAPE",
    ),
    "For operators": ("TTP_LOG_PATH", "TTP_SERVE", "TTP_SERVE_TOKEN", "TTP_NOTIFY", "TTP_NOTIFY_SECRET"),
    "Object storage": (
        "TTP_STORE",
        "TTP_STORE_EVERY",
        "TTP_STORE_KEEP",
        "TTP_STORE_RATE",
        "TTP_STORE_ALSO",
        "TTP_STORE_ENDPOINT",
        "TTP_PULL",
    ),
    "Logs and recordings": ("TTP_LOG_LEVEL", "TTP_LOG_STDOUT", "TTP_PROFILE", "TTP_DUMP", "TTP_LAYOUT_ONLY"),
    "Devices and interfaces": ("TTP_DEVICE", "TTP_ENGINE", "TTP_PROVIDE_MINDIO"),
}
# Of torchrun's, those that a job on one node or several needs.
TORCHS = (
    "nnodes",
    "nproc_per_node",
    "node_rank",
    "master_addr",
    "rdzv_backend",
    "rdzv_endpoint",
    "max_restarts",
)
SPARE = "wait, without --node-rank, to take the place of a node that is lost"
SUMMARY = "torchrun for a job that survives the death, the hang and the exceptions of its processes."
USAGE = "ttprun [flags] script.py [the script's arguments]"
_EXAMPLES = f"""\
usage: {USAGE}

{SUMMARY}

examples:
  ttprun --nproc-per-node 8 --max-restarts 3 pretrain_gpt.py ... --save checkpoints --load checkpoints
  ttprun --nnodes 2 --node-rank 0 --master-addr 10.0.0.1 --nproc-per-node 8 --ttp-tls-cert node0.pem \\
      --ttp-tls-key node0.key --ttp-tls-ca signer.pem pretrain_gpt.py ...
  ttprun --dry-run --nproc-per-node 8 pretrain_gpt.py ...   what protection takes and gives; nothing starts
  ttprun --dry-run --hosts racks.txt --nnodes 4 ...    ... and whether any 1 rack may be lost
  ttp status logs                                      what a job does now
"""
_CODES = """\
exit codes:
  0       every worker has come to its end
  2       refused before the first step; the line says why
  79      no progress: the same fault came again and again at the same step
  128+N   told to end by signal N, or signal N ended the rank that failed first
  other   that of the rank that failed first; 1 for an exception or a hang
"""


class Short(argparse.Action):
    """Prints the short help and ends."""

    def __init__(self, option_strings: Sequence[str], dest: str, **kwargs: object) -> None:
        super().__init__(
            option_strings, argparse.SUPPRESS, nargs=0, help="the flags that most jobs need, and exit codes"
        )

    def __call__(self, parser: argparse.ArgumentParser, *args: object) -> NoReturn:
        parser.exit(exit_code_of(lambda: print(short(parser)), "ttprun"))


class All(argparse.Action):
    """Prints the help of every flag and ends."""

    def __init__(self, option_strings: Sequence[str], dest: str, **kwargs: object) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, help="all flags, those of torchrun, too")

    def __call__(self, parser: argparse.ArgumentParser, *args: object) -> NoReturn:
        parser.exit(exit_code_of(lambda: print(parser.format_help(), end=""), "ttprun"))


def short(torchs: argparse.ArgumentParser) -> str:
    """Return the short help.

    Args:
        torchs: torch's parser, for the words of its flags.
    """
    width = min(100, shutil.get_terminal_size((100, 24)).columns)
    settings = {setting.variable: setting for setting in config.SETTINGS}
    parts = [_EXAMPLES]
    for title, names in GROUPS.items():
        rows = []
        for setting in (settings[name] for name in names):
            default = f" (default {setting.default})" if setting.default else ""
            rows.append(_row(setting.flag, f"{setting.help}{default}", width))
        if title == "Several nodes":
            rows.append(_row("--ttp-spare", SPARE, width))
        parts.append("\n".join([f"{title}:", *rows, ""]))
    help_by_dest = {action.dest: action for action in torchs._actions}
    rows = [
        _row(help_by_dest[name].option_strings[0], " ".join((help_by_dest[name].help or "").split()), width)
        for name in TORCHS
        if name in help_by_dest
    ]
    parts.append("\n".join(["torchrun's, the most used:", *rows, ""]))
    parts.append(_CODES)
    parts.append(
        "Each flag of ours wins over its variable (--ttp-hang: TTP_HANG; --ttp-enable: ENABLE_TTP).\n"
        "ttprun --help-all has every flag, with all values; ttprun --version prints versions.\n"
        "Settings: docs/settings.md."
    )
    return "\n".join(parts)


def _row(flag: str, help_text: str, width: int) -> str:
    """Return one flag with its words beside it."""
    indent = " " * 30
    lines = textwrap.wrap(help_text.rstrip("."), max(20, width - len(indent)))
    head = f"  {flag}".ljust(len(indent) - 1)
    if len(head) >= len(indent):
        return "\n".join([head, *(indent + line for line in lines)])
    return "\n".join([f"{head} {lines[0]}", *(indent + line for line in lines[1:])])
