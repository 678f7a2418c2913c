"""The settings of the core, and those of optional parts and plug-ins; read once into one frozen `Config`.

Every setting is an environment variable and a `ttprun` flag; the flag wins. `ttprun` writes its flags into
the environment of the workers, so all processes read the same values.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar, cast

from adaptor import plug_ins
from adaptor.errors import ConfigError
from adaptor.setting_values import (
    TRUTH,
    NotShownError,
    Setting,
    auto_or,
    folder,
    new_file,
    number,
    one_of,
    path,
    require_one_kind_of_connection,
    zero_or,
)

T = TypeVar("T")


@dataclass(frozen=True)
class Config:
    """The user's settings. Times are seconds.

    Attributes:
        parts: the settings of optional parts and plug-ins, by field
    """

    enabled: bool
    timeout_s: float
    grace_s: float
    hang_s: float
    online_s: float
    spares: int
    no_progress: int
    failed_save: str
    verify_saves: bool
    drill_every: int
    allow_drill: bool
    port: int
    tls: str
    tls_cert: str
    tls_key: str
    tls_ca: str
    device: str
    engine: str
    replica: str
    local_copy: bool
    host_copy: int | None  # None: auto
    verify_every: int | None  # None: auto
    replay_every: int
    transcript: bool
    corruption: str
    require_protection: bool
    platform: str
    log_path: str
    log_level: str
    log_stdout: bool
    layout_only: str
    batch: str
    parts: Mapping[str, object] = field(default_factory=dict)

    def of(self, kind: type[T]) -> T:
        """Return the settings of an optional part: `kind` is a dataclass with some of its fields."""
        return kind(**{of_part.name: self.parts[of_part.name] for of_part in fields(cast(Any, kind))})

    def value(self, setting: Setting) -> object:
        """Return the value of `setting`."""
        return self.parts[setting.field] if setting.field in self.parts else getattr(self, setting.field)


_PEM = "the path of a PEM file"

SETTINGS = (
    Setting(
        "enabled",
        "ENABLE_TTP",
        "True",
        *TRUTH,
        "False is plain torchrun and the plain framework",
    ),
    Setting(
        "timeout_s",
        "TTP_OT",
        "120",
        "a number of seconds from 10 to 3600",
        number(10, 3600, float),
        "how long an incident may last, besides the time in which the save makes progress",
        same_on_all_nodes=True,
    ),
    Setting(
        "grace_s",
        "TTP_GRACE",
        "25",
        "a number of seconds from 1 to 3600",
        number(1, 3600, float),
        "how long a save may take after ttprun was told to end (SIGTERM, Ctrl-C); ttprun ends after that",
    ),
    Setting(
        "hang_s",
        "TTP_HANG",
        "120",
        "0, or a number of seconds from 1 to 86400",
        zero_or(number(1, 86400, float)),
        "a step that takes longer than these seconds, and longer than 3 times the slowest recent step, is a"
        " hang (the first steps of a process may take 15 times as long); 0: never",
        same_on_all_nodes=True,
    ),
    Setting(
        "online_s",
        "TTP_ONLINE",
        "60",
        "0, or a number of seconds from 1 to 3600",
        zero_or(number(1, 3600, float)),
        "online recovery: after a fault only the failed ranks are replaced and the job goes on without a"
        " restart; the limit of the time without progress in seconds, at most half of TTP_OT; 0: all ranks"
        " are started again",
        same_on_all_nodes=True,
    ),
    Setting(
        "spares",
        "TTP_SPARES",
        "1",
        "a number from 0 to 64",
        number(0, 64, int),
        "the number of processes on each node that wait, with everything imported, to take the place of a"
        " rank that fails (TTP_ONLINE), or to be forked into all workers at a restart; each takes the host"
        " memory of its imports",
    ),
    Setting(
        "no_progress",
        "TTP_NO_PROGRESS",
        "3",
        "a number from 0 to 1000",
        number(0, 1000, int),
        "the job ends, with exit code 79, when the same fault comes this many times at the same step without"
        " a newer checkpoint; 0: never",
        same_on_all_nodes=True,
    ),
    Setting(
        "failed_save",
        "TTP_FAILED_SAVE",
        "continue",
        *one_of("continue", "stop"),
        "continue: where a save of Megatron-LM fails, training goes on and saves later; stop: it is a fault",
        same_on_all_nodes=True,
    ),
    Setting(
        "verify_saves",
        "TTP_VERIFY_SAVES",
        "False",
        *TRUTH,
        "True: what is saved is compared with the state in memory on which its holders agree, before it gets"
        " its name, and what is loaded from it later, too",
        same_on_all_nodes=True,
    ),
    Setting(
        "drill_every",
        "TTP_DRILL_EVERY",
        "0",
        "a number of steps from 0 to 1000000000",
        number(0, 10**9, int),
        "every so many steps the running job tests whether the step could be saved if one rank died,"
        " each time another rank; nothing is written; 0: never",
        same_on_all_nodes=True,
        needs_agent=True,
    ),
    Setting(
        "allow_drill",
        "TTP_ALLOW_DRILL",
        "False",
        *TRUTH,
        "True: `ttp drill`, called by the user of the job, ends a rank on purpose, and the job recovers",
        same_on_all_nodes=True,
        needs_agent=True,
    ),
    Setting(
        "port",
        "TTP_PORT",
        "8000",
        "a port from 1 to 65535",
        number(1, 65535, int),
        "the port at which the controller listens for other nodes; if it is taken, the next free one",
    ),
    Setting(
        "tls",
        "TTP_TLS",
        "mutual",
        *one_of("mutual", "plain"),
        "agents on several machines speak TLS 1.3, both with certificates; plain: unencrypted, inside "
        "a trusted network",
    ),
    Setting("tls_cert", "TTP_TLS_CERT", "", _PEM, path, "the certificate of this node"),
    Setting(
        "tls_key", "TTP_TLS_KEY", "", _PEM, path, "the private key of TTP_TLS_CERT, without a passphrase"
    ),
    Setting(
        "tls_ca", "TTP_TLS_CA", "", _PEM, path, "the certificate of the signer of all nodes' certificates"
    ),
    Setting(
        "device",
        "TTP_DEVICE",
        "",
        "cpu, a device of a plug-in, or nothing for the accelerator that the framework finds",
        str,
        "cpu runs the framework's torch.cuda calls on the CPU and its collectives on gloo",
        same_on_all_nodes=True,
    ),
    Setting(
        "engine",
        "TTP_ENGINE",
        "builtin",
        "builtin, mindio or an engine of a plug-in",
        str,
        "what notices faults and chooses what is saved; mindio: the installed mindio_ttp, see docs/mindio.md",
        same_on_all_nodes=True,
    ),
    Setting(
        "replica",
        "TTP_REPLICA",
        "auto",
        *one_of("auto", "split", "mirror", "none"),
        "where second copies of optimizer shards live; auto is split with an even data-parallel size, where "
        "the framework has optimizer instances, else mirror",
        same_on_all_nodes=True,
    ),
    Setting(
        "local_copy",
        "TTP_LOCAL_COPY",
        "False",
        *TRUTH,
        "True: each rank copies its optimizer state before an update, in place of a barrier of all ranks",
        same_on_all_nodes=True,
    ),
    Setting(
        "host_copy",
        "TTP_HOST_COPY",
        "auto",
        "auto, or a number of steps from 0 to 1000000000",
        auto_or(number(0, 10**9, int)),
        "every so many steps each rank copies its state to memory of its host, beside the next step; where"
        " all holders of a shard are lost, the next start goes on from the newest copy; auto: where a shard"
        " has one holder alone, at least every 50 steps; 0: never",
        same_on_all_nodes=True,
        needs_agent=True,
    ),
    Setting(
        "verify_every",
        "TTP_VERIFY_EVERY",
        "0",
        "auto, or a number of steps from 0 to 1000000000",
        auto_or(number(0, 10**9, int)),
        "every so many steps the holders of each shard compare checksums of it before the next update; auto:"
        " as often as half a percent of the time allows; 0: never",
        same_on_all_nodes=True,
    ),
    Setting(
        "replay_every",
        "TTP_REPLAY_EVERY",
        "0",
        "a number of steps from 0 to 1000000000",
        number(0, 10**9, int),
        "every so many steps each model replica repeats the first micro-batch of another replica, and the"
        " gradients are compared before the update; with TTP_VERIFY_EVERY; 0: never",
        same_on_all_nodes=True,
    ),
    Setting(
        "transcript",
        "TTP_TRANSCRIPT",
        "False",
        *TRUTH,
        "True: the checksums of each verified step go to transcript.jsonl of the job, for `ttp replay`; with"
        " TTP_VERIFY_EVERY",
        same_on_all_nodes=True,
    ),
    Setting(
        "corruption",
        "TTP_CORRUPTION",
        "replace",
        *one_of("replace", "stop", "report"),
        "where holders differ (TTP_VERIFY_EVERY): replace: the job goes back to the step on which they"
        " agreed, without the rank that is wrong; stop: it ends; report: a line says so",
        same_on_all_nodes=True,
    ),
    Setting(
        "require_protection",
        "TTP_REQUIRE_PROTECTION",
        "False",
        *TRUTH,
        "True: a script that trains without being protected is ended, before its first update where that is"
        " known by then; False: one line warns",
        same_on_all_nodes=True,
    ),
    Setting(
        "platform",
        "TTP_PLATFORM",
        "auto",
        *one_of("auto", "none", "modelarts", "ascend", "volcano", "ranktable", "slurm", "openmpi"),
        "where ttprun reads the number of nodes, the rank of this node, the processes per node and the "
        "rendezvous address, unless flags give them; auto: from the platform that started it; none: nowhere",
    ),
    Setting(
        "log_path",
        "TTP_LOG_PATH",
        "logs",
        "a folder",
        folder,
        "where logs go, and what operators read of each job",
    ),
    Setting(
        "log_level",
        "TTP_LOG_LEVEL",
        "INFO",
        "DEBUG, INFO, WARNING or ERROR",
        lambda text: one_of("DEBUG", "INFO", "WARNING", "ERROR")[1](text.upper()),
        "the least severe messages that are written to the log file",
    ),
    Setting("log_stdout", "TTP_LOG_STDOUT", "0", *TRUTH, "the log goes to stdout, too"),
    Setting(
        "layout_only",
        "TTP_LAYOUT_ONLY",
        "",
        "a file in a folder that is there",
        new_file,
        "a file: the job builds its model and its optimizer, writes there what each rank has of them, and"
        " ends before its first step; `python -m adaptor transform --layout` reads it",
        same_on_all_nodes=True,
    ),
    Setting(
        "batch",
        "TTP_BATCH",
        "keep",
        *one_of("keep", "nearest"),
        "with --nnodes MIN:MAX: what happens if the nodes that are there cannot divide the global batch;"
        " keep: the job saves and ends; nearest: it takes the nearest size that they can divide (needs"
        " --train-samples)",
        same_on_all_nodes=True,
    ),
)


def settings() -> tuple[Setting, ...]:
    """Return all settings: those of the core, then those of optional parts and plug-ins."""
    added = [cast("tuple[Setting, ...]", settings) for settings in plug_ins.load_all(plug_ins.SETTINGS)]
    return SETTINGS + tuple(setting for part in added for setting in part)


def load(environ: Mapping[str, str] | None = None) -> Config:
    """Read all settings.

    Raises:
        ConfigError: a value makes no sense; the message names the variable, the value and the allowed values.
        StartError: a plug-in that adds settings cannot be loaded.
    """
    source = os.environ if environ is None else environ
    values: dict[str, Any] = {}
    all_settings = settings()
    for setting in all_settings:
        text = source.get(setting.variable, setting.default)
        try:
            values[setting.field] = setting.parse(text)
        except NotShownError:
            raise ConfigError(
                f"{setting.variable} holds a text (not shown): it must be {setting.allowed}"
            ) from None
        except ValueError:
            raise ConfigError(f"{setting.variable} is {text!r}: it must be {setting.allowed}") from None
    own_values = {setting.field: values.pop(setting.field) for setting in SETTINGS}
    config = Config(**own_values, parts=values)
    require_one_kind_of_connection(
        config.tls,
        {"TTP_TLS_CERT": config.tls_cert, "TTP_TLS_KEY": config.tls_key, "TTP_TLS_CA": config.tls_ca},
    )
    if config.verify_every != 0 and config.engine != "builtin":
        raise ConfigError(
            f"TTP_VERIFY_EVERY is set, and TTP_ENGINE is {config.engine}: only the engine builtin compares"
            " the holders of the state; leave out one of them"
        )
    if config.replay_every and config.verify_every == 0:
        raise ConfigError(
            f"TTP_REPLAY_EVERY is {config.replay_every}, and TTP_VERIFY_EVERY is 0: micro-batches are only"
            " repeated in a job whose holders compare their state; set both"
        )
    if config.transcript and config.verify_every == 0:
        raise ConfigError(
            "TTP_TRANSCRIPT is set, and TTP_VERIFY_EVERY is 0: the transcript has verified steps; set both"
        )
    for setting in all_settings:
        if setting.require is not None:
            setting.require(config)
    return config
