"""Settings: a default, an environment variable, a flag, and one line for an invalid value."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptor import config, misspelt
from adaptor.config import Config
from adaptor.errors import ConfigError
from adaptor.operations.settings import HostPort, NoticeTarget
from adaptor.setting_values import Setting
from adaptor.store.settings import Pull

PAGE = Path(__file__).resolve().parents[2] / "docs" / "settings.md"
SETTINGS = config.settings()
DEFAULTS = Config(
    enabled=True,
    timeout_s=120.0,
    grace_s=25.0,
    hang_s=120.0,
    online_s=60.0,
    spares=1,
    no_progress=3,
    failed_save="continue",
    verify_saves=False,
    drill_every=0,
    allow_drill=False,
    port=8000,
    tls="mutual",
    tls_cert="",
    tls_key="",
    tls_ca="",
    device="",
    engine="builtin",
    replica="auto",
    local_copy=False,
    host_copy=None,
    require_protection=False,
    platform="auto",
    log_path="logs",
    log_level="INFO",
    log_stdout=False,
    layout_only="",
    verify_every=0,
    replay_every=0,
    transcript=False,
    corruption="replace",
    batch="keep",
    parts={
        "provide_mindio": False,
        "store": "",
        "store_every": 1,
        "store_keep": 0,
        "store_rate": 0,
        "store_also": (),
        "store_endpoint": "",
        "pull": (),
        "serve": None,
        "serve_token": "",
        "notify": None,
        "notify_secret": "",
        "profile": None,
        "dump": None,
        "reshape": None,
    },
)

GOOD: list[tuple[str, str, str, Any]] = [
    ("ENABLE_TTP", "False", "enabled", False),
    ("ENABLE_TTP", "0", "enabled", False),
    ("ENABLE_TTP", "true", "enabled", True),
    ("ENABLE_TTP", "1", "enabled", True),
    ("TTP_OT", "10", "timeout_s", 10.0),
    ("TTP_NO_PROGRESS", "0", "no_progress", 0),
    ("TTP_FAILED_SAVE", "stop", "failed_save", "stop"),
    ("TTP_VERIFY_SAVES", "True", "verify_saves", True),
    ("TTP_DRILL_EVERY", "100", "drill_every", 100),
    ("TTP_ALLOW_DRILL", "True", "allow_drill", True),
    ("TTP_OT", "3600", "timeout_s", 3600.0),
    ("TTP_OT", "12.5", "timeout_s", 12.5),
    ("TTP_PORT", "1", "port", 1),
    ("TTP_PORT", "65535", "port", 65535),
    ("TTP_TLS", "plain", "tls", "plain"),
    ("TTP_TLS", "mutual", "tls", "mutual"),
    ("TTP_DEVICE", "cpu", "device", "cpu"),
    ("TTP_DEVICE", "", "device", ""),
    ("TTP_ENGINE", "mindio", "engine", "mindio"),
    ("TTP_REPLICA", "none", "replica", "none"),
    ("TTP_REPLICA", "split", "replica", "split"),
    ("TTP_REPLICA", "mirror", "replica", "mirror"),
    ("TTP_LOCAL_COPY", "True", "local_copy", True),
    ("TTP_LOCAL_COPY", "0", "local_copy", False),
    ("TTP_HOST_COPY", "10", "host_copy", 10),
    ("TTP_HOST_COPY", "0", "host_copy", 0),
    ("TTP_VERIFY_EVERY", "auto", "verify_every", None),
    ("TTP_VERIFY_EVERY", "7", "verify_every", 7),
    ("TTP_CORRUPTION", "stop", "corruption", "stop"),
    ("TTP_REQUIRE_PROTECTION", "1", "require_protection", True),
    ("TTP_REQUIRE_PROTECTION", "false", "require_protection", False),
    ("TTP_GRACE", "1", "grace_s", 1.0),
    ("TTP_HANG", "0", "hang_s", 0.0),
    ("TTP_HANG", "1.5", "hang_s", 1.5),
    ("TTP_ONLINE", "0", "online_s", 0.0),
    ("TTP_ONLINE", "60", "online_s", 60.0),
    ("TTP_SPARES", "0", "spares", 0),
    ("TTP_SPARES", "64", "spares", 64),
    ("TTP_PROVIDE_MINDIO", "1", "provide_mindio", True),
    ("TTP_PROVIDE_MINDIO", "False", "provide_mindio", False),
    ("TTP_STORE", "s3://bucket/run7", "store", "s3://bucket/run7"),
    ("TTP_STORE_RATE", "200M", "store_rate", 200_000_000),
    ("TTP_STORE_ALSO", "logs\n /cache/my results \n", "store_also", ("logs", "/cache/my results")),
    ("TTP_STORE_EVERY", "2000", "store_every", 2000),
    ("TTP_STORE_ENDPOINT", "https://host:9000/", "store_endpoint", "https://host:9000"),
    ("TTP_STORE_ENDPOINT", "http://host:9000/account/", "store_endpoint", "http://host:9000/account"),
    ("TTP_PULL", "s3://bucket/data=/cache/data", "pull", (Pull("s3://bucket/data", "/cache/data"),)),
    (
        "TTP_PULL",
        "s3://b1/date=2026/x=my data\nobs://b2=d 2  file:///a b=c ",
        "pull",
        (Pull("s3://b1/date=2026/x", "my data"), Pull("obs://b2", "d 2"), Pull("file:///a b", "c")),
    ),
    ("TTP_LOG_PATH", "/var/log/job", "log_path", "/var/log/job"),
    ("TTP_LOG_LEVEL", "debug", "log_level", "DEBUG"),
    ("TTP_LOG_LEVEL", "ERROR", "log_level", "ERROR"),
    ("TTP_LOG_STDOUT", "True", "log_stdout", True),
    ("TTP_SERVE", "9470", "serve", HostPort("127.0.0.1", 9470)),
    ("TTP_SERVE", "0.0.0.0:9470", "serve", HostPort("0.0.0.0", 9470)),
    ("TTP_SERVE", "[::1]:9470", "serve", HostPort("::1", 9470)),
    ("TTP_NOTIFY", "https://a.b/c?d", "notify", NoticeTarget("json", "https://a.b/c?d")),
    ("TTP_NOTIFY", "slack:https://a.b/c", "notify", NoticeTarget("slack", "https://a.b/c")),
    ("TTP_NOTIFY", "exec:mail -s 'a job' me", "notify", NoticeTarget("exec", "mail -s 'a job' me")),
    ("TTP_NOTIFY", "file:/etc/targets", "notify", NoticeTarget("file", "/etc/targets")),
    ("TTP_NOTIFY_SECRET", "/etc/secret", "notify_secret", "/etc/secret"),
    ("TTP_SERVE_TOKEN", "/etc/token", "serve_token", "/etc/token"),
]

BAD = [
    ("TTP_VERIFY_EVERY", "-1"),
    ("TTP_VERIFY_EVERY", "often"),
    ("TTP_CORRUPTION", "ignore"),
    ("TTP_HOST_COPY", "-1"),
    ("TTP_HOST_COPY", "ten"),
    ("TTP_REQUIRE_PROTECTION", "yes"),
    ("ENABLE_TTP", "yes"),
    ("ENABLE_TTP", ""),
    ("ENABLE_TTP", "2"),
    ("TTP_OT", "9.9"),
    ("TTP_OT", "3601"),
    ("TTP_OT", "nan"),
    ("TTP_OT", "inf"),
    ("TTP_OT", "-120"),
    ("TTP_OT", "two minutes"),
    ("TTP_OT", ""),
    ("TTP_PORT", "0"),
    ("TTP_PORT", "65536"),
    ("TTP_PORT", "80.5"),
    ("TTP_TLS", "none"),
    ("TTP_REPLICA", "copy"),
    ("TTP_LOCAL_COPY", "os"),
    ("TTP_GRACE", "0"),
    ("TTP_HANG", "0.5"),
    ("TTP_ONLINE", "0.5"),
    ("TTP_ONLINE", "3601"),
    ("TTP_SPARES", "-1"),
    ("TTP_SPARES", "65"),
    ("TTP_HANG", "-1"),
    ("TTP_HANG", "never"),
    ("TTP_PLATFORM", "kubernetes"),
    ("TTP_STORE_ENDPOINT", "host:9000"),
    ("TTP_STORE_ENDPOINT", "https://host/path?signature=1"),
    ("TTP_PULL", "s3://bucket/data"),
    ("TTP_PULL", "s3://bucket/data="),
    ("TTP_PULL", "bucket/data=/cache"),
    ("TTP_PULL", "/cache=s3://bucket/data"),
    ("TTP_PULL", "s3://bucket/data=/cache s3://bucket/more"),
    ("TTP_STORE_RATE", "fast"),
    ("TTP_STORE_EVERY", "0"),
    ("TTP_LOG_PATH", ""),
    ("TTP_LOG_LEVEL", "LOUD"),
    ("TTP_LOG_STDOUT", "maybe"),
    ("TTP_NOTIFY", "exec:"),
    ("TTP_NOTIFY", "exec:say 'it"),
    ("TTP_NOTIFY", "file:"),
    ("TTP_NOTIFY", "slack"),
    ("TTP_SERVE", "0"),
    ("TTP_SERVE", "65536"),
    ("TTP_SERVE", "9470/tcp"),
    ("TTP_SERVE", "a host:9470"),
    ("TTP_SERVE", "localhost"),
    ("TTP_SERVE", "[::1:9470"),
    ("TTP_SERVE", "::1:9470"),
]


def _values(loaded: Config) -> dict[str, Any]:
    return {setting.field: loaded.value(setting) for setting in SETTINGS}


def test_defaults() -> None:
    assert config.load({}) == DEFAULTS
    assert {setting.field for setting in config.SETTINGS} | {"parts"} == set(Config.__dataclass_fields__)


@pytest.mark.parametrize(("variable", "text", "field", "value"), GOOD)
def test_a_variable_sets_its_field_alone(variable: str, text: str, field: str, value: Any) -> None:
    loaded, defaults = _values(config.load({variable: text})), _values(DEFAULTS)
    assert loaded[field] == value
    assert {name for name in loaded if loaded[name] != defaults[name]} <= {field}


@pytest.mark.parametrize(("variable", "text"), BAD)
def test_an_invalid_value_is_one_line(variable: str, text: str) -> None:
    setting = next(setting for setting in SETTINGS if setting.variable == variable)
    with pytest.raises(ConfigError) as caught:
        config.load({variable: text})
    line = str(caught.value)
    assert line == f"{variable} is {text!r}: it must be {setting.allowed}"
    assert "\n" not in line


@given(st.sampled_from(SETTINGS), st.text(st.characters(max_codepoint=0x3000), max_size=8))
def test_any_text_is_a_value_or_one_line(setting: Setting, text: str) -> None:
    try:
        config.load({setting.variable: text})
    except ConfigError as error:
        line = str(error)
    else:
        return
    assert line.startswith((f"{setting.variable} is ", f"{setting.variable} holds a text (not shown): "))
    assert len(line.splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("TTP_OTT", "TTP_OT"),
        ("TTP_HNAG", "TTP_HANG"),
        ("TTP_ENABLE", "ENABLE_TTP"),
        ("ttp_ot", "TTP_OT"),
        ("TTP_LOGPATH", "TTP_LOG_PATH"),
        ("TTP_LOCAL_COPYS", "TTP_LOCAL_COPY"),
        ("TTP_TLS_CRT", "TTP_TLS_CERT"),
        ("TTP_HOSTCOPY", "TTP_HOST_COPY"),
        ("ttp_requireprotection", "TTP_REQUIRE_PROTECTION"),
        ("TTP_STORERATE", "TTP_STORE_RATE"),
        ("TTP_TLSCERT", "TTP_TLS_CERT"),
    ],
)
def test_a_misspelt_variable_is_not_ignored(name: str, meant: str) -> None:
    with pytest.raises(ConfigError) as caught:
        misspelt.refuse({"TTP_GRACE": "9", name: "20"})
    assert str(caught.value) == f"{name} is set: there is no such setting; {meant} is one"


@pytest.mark.robustness(
    "C4", "a variable that holds a key is misspelt, or takes a path", "it is named, its value is not shown"
)
@pytest.mark.parametrize("name", ["TTP_TLS_KYE", "TTP_TLS_KEY", "TTP_TLS_CERT", "TTP_TLS_CA"])
def test_no_secret_is_shown(name: str) -> None:
    key = "-----BEGIN PRIVATE KEY-----\nMIIEvQIBADAN\n-----END PRIVATE KEY-----\n"
    read = misspelt.refuse if name == "TTP_TLS_KYE" else config.load
    with pytest.raises(ConfigError, match=name) as caught:
        read({**FILES, name: key})
    assert "MII" not in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("name", ["TTP_STORE", "TTP_STORE_ENDPOINT", "TTP_PULL"])
def test_credentials_in_a_url_are_not_shown(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name} holds a text \(not shown\)"):
        config.load({name: "https://user:word@host"})


def test_foreign_are_accepted() -> None:
    """Internal variables of a job, those of MindIO's SDK, and Kubernetes's for a service named ttp."""
    foreign = """TTP_AGENT TTP_BOARD TTP_BOARD_RANKS TTP_SCRATCH TTP_GENERATION TTP_IS_RESTART TTP_TEST_COLD
        TTP_LOG_MODE TTP_RETRY_TIMES TTP_NORMAL_ACTION_TIME_LIMIT TTP_STOP_CLEAN_BEFORE_DUMP
        TTP_ACCLINK_CHECK_PERIOD_HOURS TTP_SERVICE_HOST TTP_SERVICE_PORT TTP_PORT_8000_TCP
        TTP_PORT_8000_TCP_PORT HTTP_PORT HTTP_LOG_PATH ENABLE_HTTP"""
    misspelt.refuse(dict.fromkeys(foreign.split(), "1"))
    misspelt.refuse({setting.variable: "1" for setting in SETTINGS})


FILES = {"TTP_TLS_CERT": "c.pem", "TTP_TLS_KEY": "k.pem", "TTP_TLS_CA": "ca.pem"}


def test_certificates_are_given_as_a_whole() -> None:
    loaded = config.load(FILES)
    assert (loaded.tls_cert, loaded.tls_key, loaded.tls_ca) == ("c.pem", "k.pem", "ca.pem")
    for name in FILES:
        with pytest.raises(ConfigError) as caught:
            config.load({**FILES, name: ""})
        assert f"but {name} is not set: TLS needs all three of " in str(caught.value)


def test_certificates_and_plain_contradict_each_other() -> None:
    with pytest.raises(ConfigError, match=r"TTP_TLS is 'plain', but TTP_TLS_CERT is 'c.pem': leave out"):
        config.load({**FILES, "TTP_TLS": "plain"})


def test_only_the_builtin_engine_compares_holders() -> None:
    with pytest.raises(ConfigError, match="TTP_REPLAY_EVERY is 10, and TTP_VERIFY_EVERY is 0: "):
        config.load({"TTP_REPLAY_EVERY": "10"})
    with pytest.raises(ConfigError, match="TTP_TRANSCRIPT is set, and TTP_VERIFY_EVERY is 0: "):
        config.load({"TTP_TRANSCRIPT": "True"})
    assert config.load({"TTP_TRANSCRIPT": "True", "TTP_VERIFY_EVERY": "auto"}).transcript
    with pytest.raises(ConfigError, match="TTP_VERIFY_EVERY is set, and TTP_ENGINE is mindio: "):
        config.load({"TTP_VERIFY_EVERY": "auto", "TTP_ENGINE": "mindio"})


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("TTP_PROFILE", "steps=1-2"),
        ("TTP_DUMP", '{"steps": "1"}'),
        ("TTP_HOST_COPY", "5"),
        ("TTP_VERIFY_EVERY", "auto"),
    ],
)
def test_a_script_adapted_by_hand_has_no_patches(variable: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"^{variable} is set, and TTP_PROVIDE_MINDIO is True: "):
        config.load({"TTP_PROVIDE_MINDIO": "1", variable: value})
    config.load({variable: value})
    config.load({"TTP_PROVIDE_MINDIO": "1"})


def test_the_environment_is_read_when_nothing_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TTP_OT", "77")
    assert config.load().timeout_s == 77.0


def test_flags_have_the_names_of_their_variables() -> None:
    assert {setting.variable: setting.flag for setting in SETTINGS} == {
        "ENABLE_TTP": "--ttp-enable",
        "TTP_OT": "--ttp-ot",
        "TTP_GRACE": "--ttp-grace",
        "TTP_HANG": "--ttp-hang",
        "TTP_ONLINE": "--ttp-online",
        "TTP_SPARES": "--ttp-spares",
        "TTP_HOST_COPY": "--ttp-host-copy",
        "TTP_VERIFY_EVERY": "--ttp-verify-every",
        "TTP_REPLAY_EVERY": "--ttp-replay-every",
        "TTP_TRANSCRIPT": "--ttp-transcript",
        "TTP_CORRUPTION": "--ttp-corruption",
        "TTP_NO_PROGRESS": "--ttp-no-progress",
        "TTP_FAILED_SAVE": "--ttp-failed-save",
        "TTP_VERIFY_SAVES": "--ttp-verify-saves",
        "TTP_DRILL_EVERY": "--ttp-drill-every",
        "TTP_ALLOW_DRILL": "--ttp-allow-drill",
        "TTP_PORT": "--ttp-port",
        "TTP_TLS": "--ttp-tls",
        "TTP_TLS_CERT": "--ttp-tls-cert",
        "TTP_TLS_KEY": "--ttp-tls-key",
        "TTP_TLS_CA": "--ttp-tls-ca",
        "TTP_DEVICE": "--ttp-device",
        "TTP_ENGINE": "--ttp-engine",
        "TTP_REPLICA": "--ttp-replica",
        "TTP_LOCAL_COPY": "--ttp-local-copy",
        "TTP_REQUIRE_PROTECTION": "--ttp-require-protection",
        "TTP_PROVIDE_MINDIO": "--ttp-provide-mindio",
        "TTP_PLATFORM": "--ttp-platform",
        "TTP_STORE": "--ttp-store",
        "TTP_STORE_EVERY": "--ttp-store-every",
        "TTP_STORE_KEEP": "--ttp-store-keep",
        "TTP_STORE_RATE": "--ttp-store-rate",
        "TTP_STORE_ALSO": "--ttp-store-also",
        "TTP_STORE_ENDPOINT": "--ttp-store-endpoint",
        "TTP_PULL": "--ttp-pull",
        "TTP_LOG_PATH": "--ttp-log-path",
        "TTP_LOG_LEVEL": "--ttp-log-level",
        "TTP_LOG_STDOUT": "--ttp-log-stdout",
        "TTP_SERVE": "--ttp-serve",
        "TTP_SERVE_TOKEN": "--ttp-serve-token",
        "TTP_NOTIFY": "--ttp-notify",
        "TTP_NOTIFY_SECRET": "--ttp-notify-secret",
        "TTP_PROFILE": "--ttp-profile",
        "TTP_DUMP": "--ttp-dump",
        "TTP_LAYOUT_ONLY": "--ttp-layout-only",
        "TTP_BATCH": "--ttp-batch",
        "TTP_RESHAPE": "--ttp-reshape",
    }


@pytest.mark.parametrize("name", ["TTP_HANG", "TTP_ONLINE", "TTP_NO_PROGRESS"])
def test_the_page_and_the_help_agree_on_limits(name: str) -> None:
    help_text = next(setting.help for setting in SETTINGS if setting.variable == name)
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith(f"| `{name}`")]
    readme = PAGE.parents[1] / "README.md"
    rows += [line for line in readme.read_text().splitlines() if line.startswith(f"| `{name}`")]
    assert rows
    for row in rows:
        assert help_text in re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", row), "links aside"


def test_the_page_has_every_setting_with_its_flag_and_default() -> None:
    rows = [
        [cell.strip().strip("`") for cell in line.split("|")[1:4]]
        for line in PAGE.read_text().splitlines()
        if line.startswith("| `")
    ]
    assert sorted(rows) == sorted([setting.variable, setting.flag, setting.default] for setting in SETTINGS)


def test_the_page_has_the_settings_that_must_be_the_same_on_all_nodes() -> None:
    (listed,) = re.findall(r"same on all nodes, or no worker starts: (.*?)\n\(", PAGE.read_text(), re.DOTALL)
    assert set(re.findall(r"`(\w+)`", listed)) == {s.variable for s in SETTINGS if s.same_on_all_nodes}


def test_settings_that_may_differ_between_nodes() -> None:
    """Settings for collective decisions must be equal, or the nodes would wait for each other."""
    node_variables = (
        "ENABLE_TTP TTP_GRACE TTP_SPARES TTP_PORT TTP_TLS TTP_TLS_CERT TTP_TLS_KEY TTP_TLS_CA TTP_PLATFORM"
        " TTP_LOG_PATH TTP_LOG_LEVEL TTP_LOG_STDOUT TTP_SERVE TTP_SERVE_TOKEN TTP_NOTIFY TTP_NOTIFY_SECRET"
        " TTP_STORE_RATE TTP_STORE_ALSO TTP_STORE_ENDPOINT TTP_PULL TTP_PROFILE TTP_DUMP"
    )
    assert [s.variable for s in SETTINGS if not s.same_on_all_nodes] == node_variables.split()
