"""The settings of the object store."""

from __future__ import annotations

import re
from dataclasses import dataclass

from adaptor.setting_values import NotShownError, Setting, number


def store_url(text: str) -> str:
    """Refuse credentials in the URL: messages show the URL. The rest is checked when the store is opened."""
    if "@" in text:
        raise NotShownError
    return text


@dataclass(frozen=True)
class Pull:
    """The objects below a URL, and their local folder."""

    url: str
    folder: str


def pulls(text: str) -> tuple[Pull, ...]:
    """Return the pulls of a text such as `s3://bucket/data=/cache/data`, separated by white space.

    The folder follows the last `=`: prefixes such as `date=2026` contain further ones.
    """
    parts = re.split(r"\s+(?=[^\s/=]*://)", text.strip()) if text.strip() else []
    if any("@" in re.sub("^[^/]*://", "", word).partition("/")[0] for word in parts):
        raise NotShownError
    pulls_found = []
    for word in parts:
        url, _, folder = word.rpartition("=")
        if "://" not in url or not folder or "://" in folder or not word.isprintable():
            raise ValueError
        pulls_found.append(Pull(url, folder))
    return tuple(pulls_found)


def rate(text: str) -> int:
    """Return the bytes per second of a text such as 200M."""
    match = re.fullmatch(r"([0-9]{1,12})([kKMG]?)", text.strip())
    if match is None:
        raise ValueError
    return int(match[1]) * {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9}[match[2]]


def endpoint(text: str) -> str:
    """Refuse credentials in the URL: messages show the URL."""
    if "@" in text:
        raise NotShownError
    if text and not re.fullmatch(r"https?://[^\s/?#]+(/[^\s?#]*)?", text):
        raise ValueError
    return text.rstrip("/")


def folders(text: str) -> tuple[str, ...]:
    """Return the folders of a text, one folder in each line."""
    return tuple(line.strip() for line in text.splitlines() if line.strip())


@dataclass(frozen=True)
class StoreSettings:
    """The settings of the object store (`Config.of`)."""

    store: str
    store_every: int
    store_keep: int
    store_rate: int
    store_also: tuple[str, ...]
    store_endpoint: str
    pull: tuple[Pull, ...]


SETTINGS = (
    Setting(
        "store",
        "TTP_STORE",
        "",
        "the URL of an object store, like s3://bucket/run7",
        store_url,
        "the checkpoints that are saved are also sent to this object store (s3://bucket/run7, obs://, gs://, "
        "az://, file://), beside the training",
        same_on_all_nodes=True,
        group="Object storage",
        needs_agent=True,
    ),
    Setting(
        "store_every",
        "TTP_STORE_EVERY",
        "1",
        "a number of steps from 1 to 1000000000",
        number(1, 10**9, int),
        "the smallest number of steps between two checkpoints that are sent to TTP_STORE; last words, and the"
        " newest one at the end of the job, are always sent",
        same_on_all_nodes=True,
        group="Object storage",
    ),
    Setting(
        "store_keep",
        "TTP_STORE_KEEP",
        "0",
        "a number from 0 to 1000000",
        number(0, 10**6, int),
        "how many checkpoints stay in TTP_STORE: older ones are removed; 0: all",
        same_on_all_nodes=True,
        group="Object storage",
    ),
    Setting(
        "store_rate",
        "TTP_STORE_RATE",
        "0",
        "0, or bytes in a second, like 200M",
        rate,
        "how many bytes in a second a node sends to TTP_STORE while the job trains, like 200M; 0: no limit",
        group="Object storage",
    ),
    Setting(
        "store_also",
        "TTP_STORE_ALSO",
        "",
        "a folder; several have line breaks between them",
        folders,
        "a folder with logs or other outputs of this node, whose files are also sent to TTP_STORE, while the"
        " job trains and at its end; may be given several times",
        repeats=True,
        group="Object storage",
    ),
    Setting(
        "store_endpoint",
        "TTP_STORE_ENDPOINT",
        "",
        "a URL like https://storage.example.com, without a user",
        endpoint,
        "where an object store (s3://, obs://, gs://, az://) answers, unless it is that of its provider",
        group="Object storage",
    ),
    Setting(
        "pull",
        "TTP_PULL",
        "",
        "URL=DIR, like s3://bucket/data=/cache/data; several have white space between them",
        pulls,
        "URL=DIR, like s3://bucket/data=/cache/data: before anything starts each node brings the objects"
        " below the URL to the folder DIR, but those that are there unchanged; may be given several times",
        repeats=True,
        group="Object storage",
    ),
)
