"""The settings of the object store, the parser of its URLs, and the orders to the uploader of a node."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import msgspec

from adaptor.errors import StoreError
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


SCHEMES = ("s3", "obs", "gs", "az", "file")
_PROVIDERS = {
    "s3": "S3",
    "obs": "Huawei OBS",
    "gs": "Google Cloud Storage",
    "az": "Azure Blob Storage",
    "file": "a folder",
}
# The strictest names of all providers have these characters; Azure allows fewer.
_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,62}")


@dataclass(frozen=True)
class Address:
    """A place in an object store.

    Attributes:
        scheme: one of SCHEMES
        bucket: the bucket; of Azure the container; of file:// empty
        prefix: with `/` between its parts; of file:// the absolute path of the folder
    """

    scheme: str
    bucket: str
    prefix: str

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}" + (f"/{self.prefix.lstrip('/')}" if self.prefix else "")

    @property
    def provider(self) -> str:
        """Return the kind of store, for a message."""
        return _PROVIDERS[self.scheme]


def parse(url: str) -> Address:
    """Return the address of a URL.

    Raises:
        StoreError: the URL names no store.
    """
    scheme, separator, remainder = url.partition("://")
    if not separator:
        raise StoreError(f"{_shown(url)}: is no URL of a store; it must be like s3://bucket/run7")
    if scheme not in SCHEMES:
        raise StoreError(f"{_shown(url)}: {scheme}:// is no store that is known; {_known()} are")
    host, _, path = remainder.partition("/")
    if "@" in host or ("?" in remainder and scheme != "file"):
        raise StoreError(
            f"{_shown(url)}: holds credentials or options; leave them out, they are read from the environment"
        )
    if scheme == "file":
        if host:
            raise StoreError(f"{_shown(url)}: a folder is named with three slashes, file:///folder")
        if not path.strip("/"):
            raise StoreError(f"{_shown(url)}: names no folder; it must be like file:///folder/run7")
        return Address(scheme, "", str(Path("/", path)))
    if not _BUCKET.fullmatch(host):
        raise StoreError(
            f"{_shown(url)}: {host!r} is no name of a bucket; it has 2 to 63 of the characters a-z 0-9 . _ -"
        )
    parts = [part for part in path.split("/") if part]
    if any(part in (".", "..") or not part.isprintable() for part in parts):
        raise StoreError(f"{_shown(url)}: a part of the path is . or .., or cannot be printed")
    return Address(scheme, host, "/".join(parts))


def _known() -> str:
    *first_schemes, last = (f"{scheme}://" for scheme in SCHEMES)
    return f"{', '.join(first_schemes)} and {last}"


def _shown(url: str) -> str:
    """Return a URL without possible secrets, as a printable line."""
    plain = "".join(character if character.isprintable() else "?" for character in url)
    return re.sub(r"://[^/]*@", "://...@", plain.partition("?")[0])


class UploadSettings(msgspec.Struct, frozen=True):
    """The work of an uploader of checkpoints.

    Attributes:
        every: the smallest number of steps between two sent checkpoints
        keep: the number of complete checkpoints that stay in the store; 0: all
        rate: bytes per second of this node, while the job trains; 0: no limit
        node: the number of this node
        nodes: the number of nodes of the job
    """

    url: str
    endpoint: str
    save: str
    every: int
    keep: int
    rate: int
    node: int = 0
    nodes: int = 1

    def push_command(self, step: int | None = None) -> str:
        """Return the command line that sends a checkpoint of the save folder by hand.

        Args:
            step: of the checkpoint; None: the newest.
        """
        endpoint = [f"TTP_STORE_ENDPOINT={shlex.quote(self.endpoint)}"] if self.endpoint else []
        step_options = [] if step is None else ["--step", str(step)]
        command_words = ["ttp", "store", "push", self.url, self.save, *step_options]
        return " ".join([*endpoint, *map(shlex.quote, command_words)])


class OutputSettings(msgspec.Struct, frozen=True):
    """The work of an uploader of files that are no checkpoints.

    Attributes:
        folders: the folders of this node to send
        rate: bytes per second of this node, while the job trains; 0: no limit
        node: the number of this node
    """

    url: str
    endpoint: str
    folders: tuple[str, ...]
    rate: int
    node: int = 0


class End(msgspec.Struct, frozen=True):
    """The job has ended: send the remaining files within so many seconds; None: without limit."""

    within_s: float | None
