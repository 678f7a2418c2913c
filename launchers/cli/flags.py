"""The flags of ttprun and their help: `--ttp-*`, and all flags of the installed torch's torchrun.

The adaptor's flags are removed before torch's parser sees the rest, so that they make no abbreviation of a
torchrun flag ambiguous. Only flags before the script are the adaptor's; torch's parser finds the script.
`--help` prints groups of flags, the most used torchrun flags and exit codes; `--help-all` prints every flag.
"""

from __future__ import annotations

import argparse
import os
import shutil
import textwrap
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn, TypeVar

from adaptor import config, misspelt
from adaptor.errors import ConfigError
from adaptor.launchers.platforms.detect import STATIC_PORT
from adaptor.terminal import exit_code_of

# The core's settings; a setting of an optional part names its group itself.
GROUPS: Mapping[str, Sequence[str]] = {
    "After a fault": (
        *("TTP_ONLINE", "TTP_SPARES", "TTP_NO_PROGRESS", "TTP_FAILED_SAVE"),
        *("TTP_CORRUPTION", "TTP_OT", "TTP_GRACE", "TTP_HANG"),
    ),
    "What is protected": (
        "ENABLE_TTP",
        "TTP_REPLICA",
        "TTP_LOCAL_COPY",
        "TTP_HOST_COPY",
        "TTP_VERIFY_EVERY",
        "TTP_VERIFY_SAVES",
        "TTP_REPLAY_EVERY",
        "TTP_TRANSCRIPT",
        "TTP_DRILL_EVERY",
        "TTP_ALLOW_DRILL",
        "TTP_REQUIRE_PROTECTION",
    ),
    "Several nodes": (
        *("TTP_TLS_CERT", "TTP_TLS_KEY", "TTP_TLS_CA", "TTP_TLS"),
        *("TTP_PORT", "TTP_PLATFORM", "TTP_BATCH"),
    ),
    "For operators": ("TTP_LOG_PATH",),
    "Logs and recordings": ("TTP_LOG_LEVEL", "TTP_LOG_STDOUT", "TTP_LAYOUT_ONLY"),
    "Devices and interfaces": ("TTP_DEVICE", "TTP_ENGINE"),
}
# The torchrun flags that most jobs need.
TORCHS = (
    *("nnodes", "nproc_per_node", "node_rank", "master_addr"),
    *("rdzv_backend", "rdzv_endpoint", "max_restarts"),
)
SPARE_HELP = "wait, without --node-rank, to take the place of a node that is lost"
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
    """Prints the short help and exits."""

    def __init__(self, option_strings: Sequence[str], dest: str, **kwargs: object) -> None:
        super().__init__(
            option_strings, argparse.SUPPRESS, nargs=0, help="the flags that most jobs need, and exit codes"
        )

    def __call__(self, parser: argparse.ArgumentParser, *args: object) -> NoReturn:
        parser.exit(exit_code_of(lambda: print(short(parser)), "ttprun"))


class All(argparse.Action):
    """Prints the help of every flag and exits."""

    def __init__(self, option_strings: Sequence[str], dest: str, **kwargs: object) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, help="all flags, those of torchrun, too")

    def __call__(self, parser: argparse.ArgumentParser, *args: object) -> NoReturn:
        parser.exit(exit_code_of(lambda: print(parser.format_help(), end=""), "ttprun"))


def short(torchs: argparse.ArgumentParser) -> str:
    """Return the short help.

    Args:
        torchs: torch's parser, for the help of its flags.
    """
    width = min(100, shutil.get_terminal_size((100, 24)).columns)
    settings = {setting.variable: setting for setting in config.settings()}
    groups = {title: list(names) for title, names in GROUPS.items()}
    for variable, setting in settings.items():
        if setting.group:
            groups.setdefault(setting.group, []).append(variable)
    parts = [_EXAMPLES]
    for title, names in groups.items():
        rows = []
        for setting in (settings[name] for name in names):
            default = f" (default {setting.default})" if setting.default else ""
            rows.append(_row(setting.flag, f"{setting.help}{default}", width))
        if title == "Several nodes":
            rows.append(_row("--ttp-spare", SPARE_HELP, width))
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
    """Return one flag with its help."""
    indent = " " * 30
    lines = textwrap.wrap(help_text.rstrip("."), max(20, width - len(indent)))
    head = f"  {flag}".ljust(len(indent) - 1)
    if len(head) >= len(indent):
        return "\n".join([head, *(indent + line for line in lines)])
    return "\n".join([f"{head} {lines[0]}", *(indent + line for line in lines[1:])])


T = TypeVar("T")

_PREFIX = "--ttp"
DRY_RUN = "--dry-run"
HOSTS = "--hosts"
SPARE = "--ttp-spare"
VERSION = "--version"
_COUNT = "a number of processes from 1 on, or auto, cpu, gpu and the like where this machine has them"
_NODES = "a number of nodes from 1 on, or MIN:MAX"
_STREAMS = "0, 1, 2 or 3, or that for some of the ranks of this node, as 0:3,1:1"
_ID = "up to 246 bytes without '/': torch names a folder by it"
_ID_BYTES = 255 - len("_12345678")  # of a file name; torch appends a unique suffix
_SHOWN = 80  # characters of a value in a line that refuses it
_ALL_FLAGS = "ttprun --help-all has all of them"
_ANY = "0"  # an argument that parsers accept as a script, or as the value of a flag


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parse `arguments` with torch's parser; put the adaptor's flags into the environment.

    Workers read the environment. Raises ConfigError for a flag that is unknown, or has no value.
    """
    own_parser, torchs = _ours(), _torchs()
    torchs.formatter_class = argparse.RawDescriptionHelpFormatter  # the epilog has its lines already
    torchs.epilog = own_parser.format_help()
    own_arguments, remaining_arguments = _split(arguments, torchs)
    _require_known(own_arguments)
    try:
        values_given = vars(own_parser.parse_args(own_arguments))
    except argparse.ArgumentError as error:
        raise ConfigError(str(error)) from None
    parsed, unknown = torchs.parse_known_args(remaining_arguments)
    if unknown:
        raise _no_flag(unknown[0])
    os.environ.update(
        {
            variable: value if isinstance(value, str) else "\n".join(value)
            for variable, value in values_given.items()
            if value is not None
        }
    )
    return parsed


def without(flag: str, arguments: list[str]) -> tuple[list[str], bool]:
    """Return the arguments without `flag`, which takes no value, and whether ttprun's own flags had it."""
    place = _place_of(flag, arguments)
    if place is None or arguments[place] != flag:
        return arguments, False
    return [*arguments[:place], *arguments[place + 1 :]], True


def take_hosts(arguments: list[str]) -> tuple[list[str], str | None]:
    """Return the arguments without `--hosts FILE`, and FILE, if among ttprun's own flags.

    Raises:
        ConfigError: FILE is missing.
    """
    place = _place_of(HOSTS, arguments)
    if place is None:
        return arguments, None
    _, equals, path = arguments[place].partition("=")
    next_index = place + 1 if equals else place + 2
    if next_index > len(arguments) or not (path := path if equals else arguments[place + 1]):
        raise ConfigError(f"{HOSTS}: name a file with a line 'HOST RACK' for each node")
    return [*arguments[:place], *arguments[next_index:]], path


def _place_of(flag: str, arguments: list[str]) -> int | None:
    """Return the index of `flag`, or of `flag=value`, before the script; None without it."""
    torchs = _torchs()
    for place, argument in enumerate(arguments):
        if argument == "--":
            break
        if argument.partition("=")[0] == flag:
            before = [argument for argument in arguments[:place] if argument not in (DRY_RUN, SPARE)]
            return place if _comes_before_the_script(_split(before, torchs)[1], torchs) else None
    return None


def given_names(arguments: list[str]) -> set[str]:
    """Return the names in torch's namespace set by flags among `arguments`, without defaults."""
    torchs = _torchs()
    unset = object()
    names = [action.dest for action in torchs._actions if action.option_strings]
    parsed_flags = torchs.parse_args(
        _split(arguments, torchs)[1], argparse.Namespace(**dict.fromkeys(names, unset))
    )
    return {name for name in names if getattr(parsed_flags, name, unset) is not unset}


def parts_of(arguments: Sequence[str]) -> tuple[list[list[str]], argparse.Namespace, list[str]]:
    """Return the adaptor's flags, each with its value; the parsed flags of torch; and all other arguments."""
    torchs = _torchs()
    own_arguments, remaining_arguments = _split(list(arguments), torchs)
    pairs: list[list[str]] = []
    while own_arguments:
        takes = 1 if "=" in own_arguments[0] else 2
        pairs.append(own_arguments[:takes])
        del own_arguments[:takes]
    return pairs, torchs.parse_known_args(remaining_arguments)[0], remaining_arguments


def after_script(parsed: argparse.Namespace) -> list[str]:
    """Return the adaptor's flags among the arguments of the script, which get no meaning there."""
    known_flags = [SPARE, *(setting.flag for setting in config.settings())]
    names = [argument.partition("=")[0] for argument in parsed.training_script_args]
    return [name for name in names if name in known_flags]


def script_option(arguments: Sequence[str], name: str) -> str | None:
    """Return the last value of an option of a script, as argparse does; None without the option."""
    value_text = None
    for number, argument in enumerate(arguments):
        if argument == name and number + 1 < len(arguments):
            value_text = arguments[number + 1]
        elif argument.startswith(f"{name}="):
            value_text = argument.partition("=")[2]
    return value_text


def require_sense(parsed: argparse.Namespace) -> None:
    """Refuse flags for which torch would print a traceback. Raises ConfigError for a wrong value."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing import Std

    def nodes(text: str) -> bool:
        low, high = run.parse_min_max_nnodes(text)
        return bool(0 < low <= high)

    def streams(text: str) -> bool:
        return Std.from_str(text) is not None

    _require("nnodes", parsed.nnodes, nodes, _NODES)
    _require("nproc-per-node", parsed.nproc_per_node, lambda n: run.determine_local_world_size(n) > 0, _COUNT)
    _require("max-restarts", parsed.max_restarts, lambda count: count >= 0, "a number from 0 on")
    _require("monitor-interval", parsed.monitor_interval, _is_pause, "a number of seconds above 0")
    _require("redirects", parsed.redirects, streams, _STREAMS)
    _require("tee", parsed.tee, streams, _STREAMS)
    if not parsed.standalone:  # otherwise torch makes an id
        _require("rdzv-id", parsed.rdzv_id, _names_a_folder, _ID)
    fewest_nodes, most_nodes = run.parse_min_max_nnodes(parsed.nnodes)
    if parsed.standalone and fewest_nodes > 1:
        raise ConfigError(f"--nnodes is {parsed.nnodes}: with --standalone no other node can come")
    if (
        most_nodes > 1 and parsed.rdzv_backend == "static" and not parsed.standalone
    ):  # else nobody asks for it
        _require("node-rank", parsed.node_rank, range(most_nodes).__contains__, f"from 0 to {most_nodes - 1}")


def _names_a_folder(text: str) -> bool:
    return "/" not in text and len(os.fsencode(text)) <= _ID_BYTES


def _is_pause(seconds: float) -> bool:
    """Return whether a thread may sleep for `seconds`."""
    return 0 < seconds <= threading.TIMEOUT_MAX


def _require(flag: str, value: T, makes_sense: Callable[[T], bool], allowed: str) -> None:
    try:
        sense = makes_sense(value)
    except (ValueError, RuntimeError):  # raised by torch for wrong text
        sense = False
    if not sense:
        raise ConfigError(f"--{flag} is {_shortened(repr(value))}: it must be {allowed}")


def _shortened(value: str) -> str:
    return value if len(value) <= _SHOWN else f"{value[:_SHOWN]}... ({len(value)} characters)"


def _torchs() -> argparse.ArgumentParser:
    """Return torch's parser, with the adaptor's help."""
    from torch.distributed.run import get_args_parser

    torchs = argparse.ArgumentParser(
        prog="ttprun",
        usage=USAGE,  # torch's usage lists all flags, with each error
        description=SUMMARY,
        parents=[get_args_parser()],
        add_help=False,
        conflict_handler="resolve",  # torch's parser has -h
    )
    torchs.add_argument("-h", "--help", action=Short)
    torchs.add_argument("--help-all", action=All)
    return torchs


def whole_parser() -> argparse.ArgumentParser:
    """Return a parser with torch's flags and the adaptor's, for completion only."""
    combined_parser = argparse.ArgumentParser(
        prog="ttprun", parents=[_torchs(), _ours()], add_help=False, conflict_handler="resolve"
    )
    combined_parser.add_argument(DRY_RUN, action="store_true", help="say what protection takes and gives")
    combined_parser.add_argument(HOSTS, help="with --dry-run: a file with a line 'HOST RACK' for each node")
    combined_parser.add_argument(SPARE, action="store_true", help=SPARE_HELP)
    combined_parser.add_argument(
        VERSION, action="store_true", help="print the versions of the adaptor and of torch"
    )
    return combined_parser


def _ours() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        usage=argparse.SUPPRESS, add_help=False, allow_abbrev=False, exit_on_error=False
    )
    group = parser.add_argument_group("ttp", "fault tolerance; each flag wins over its environment variable")
    for setting in config.settings():
        group.add_argument(
            setting.flag,
            action="append" if setting.repeats else "store",
            dest=setting.variable,
            metavar=setting.variable,
            help=f"{setting.help}; {setting.allowed} (default {setting.default or 'none'})",
        )
    group.add_argument(SPARE, action="store_true", dest=argparse.SUPPRESS, help=SPARE_HELP)
    return parser


def _split(arguments: list[str], torchs: argparse.ArgumentParser) -> tuple[list[str], list[str]]:
    """Return the adaptor's flags before the script, each with its value, and all other arguments."""
    adaptor_arguments: list[str] = []
    own_arguments: list[str] = []
    remaining_arguments = list(arguments)
    while remaining_arguments and remaining_arguments[0] != "--":  # no flags after it
        if not remaining_arguments[0].startswith(_PREFIX):
            own_arguments.append(remaining_arguments.pop(0))
            continue
        if not _comes_before_the_script(own_arguments, torchs):
            break
        takes = 1 if "=" in remaining_arguments[0] else 2
        adaptor_arguments += remaining_arguments[:takes]
        del remaining_arguments[:takes]
    return adaptor_arguments, own_arguments + remaining_arguments


def _comes_before_the_script(arguments_before: list[str], torchs: argparse.ArgumentParser) -> bool:
    """Return whether the next argument could still be the script, so that a flag belongs to ttprun."""
    parsed, _ = torchs.parse_known_args([*arguments_before, _ANY, _ANY])
    return [parsed.training_script, *parsed.training_script_args] == [_ANY, _ANY]


def _require_known(own_arguments: list[str]) -> None:
    known_flags = [setting.flag for setting in config.settings()]
    for argument in own_arguments:
        if argument.startswith(_PREFIX) and argument.partition("=")[0] not in known_flags:
            raise _no_flag(argument)


def _no_flag(argument: str) -> ConfigError:
    """Return the refusal of an unknown flag, with the likely flag."""
    flag = argument.partition("=")[0]
    known_flags = [
        name for action in whole_parser()._actions for name in action.option_strings if "_" not in name
    ]
    meant = misspelt.flag_meant(flag, known_flags)
    return ConfigError(f"there is no flag {flag}: " + (f"{meant} is one" if meant else _ALL_FLAGS))


def rendezvous_of(parsed: argparse.Namespace) -> str:
    """Return HOST:PORT of the rendezvous; torch takes --master-addr and --master-port as the default."""
    return parsed.rdzv_endpoint or f"{parsed.master_addr}:{parsed.master_port or STATIC_PORT}"


def may_have_spares(parsed: argparse.Namespace) -> bool:
    """Return whether the job may have spare nodes: several nodes, their number fixed with --node-rank."""
    from torch.distributed import run

    fewest, most_nodes = run.parse_min_max_nnodes(parsed.nnodes)
    may_meet = parsed.rdzv_backend == "c10d" or (parsed.rdzv_backend == "static" and fewest == most_nodes)
    return bool(may_meet and not parsed.standalone and most_nodes > 1)
