"""Settings of a run, from a YAML file in `configs/`. Unknown keys and values of other types are refused."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

import yaml
from registry import unknown

HERE = Path(__file__).parent / "configs"
Section = TypeVar("Section")


@dataclass(frozen=True)
class ModelConfig:
    """The size and kind of the model.

    Attributes:
        name: as registered.
        vocabulary: rows of the embedding: the tokens of the tokenizer, or more of them where tensor
            parallelism needs a multiple.
        context: the longest text that the model sees, in tokens.
        lora_rank: width of the trained addition to the attention's input; 0: all weights are trained.
    """

    name: str = "gpt2"
    vocabulary: int = 50257
    context: int = 1024
    hidden: int = 768
    layers: int = 12
    heads: int = 12
    dropout: float = 0.1
    lora_rank: int = 0
    lora_alpha: float = 16.0

    @property
    def parameters(self) -> int:
        """Return how many numbers the model has; the head has none of its own."""
        block = 12 * self.hidden**2 + 13 * self.hidden + 4 * self.lora_rank * self.hidden
        return (self.vocabulary + self.context) * self.hidden + self.layers * block + 2 * self.hidden


@dataclass(frozen=True)
class TrainConfig:
    """How the model is trained.

    Attributes:
        batch: blocks of each process in a step.
        evaluate_every: steps between two evaluations on the validation text.
        save_every: steps between two regular saves; 0: only after the last step, and last words.
        precision: bf16 or fp32.
        tensor_parallel: processes that share one copy of the model.
    """

    steps: int = 1000
    batch: int = 8
    learning_rate: float = 6e-4
    least_learning_rate: float = 6e-5
    warmup: int = 100
    weight_decay: float = 0.1
    clip: float = 1.0
    seed: int = 1234
    evaluate_every: int = 100
    save_every: int = 0
    precision: str = "bf16"
    tensor_parallel: int = 1


@dataclass(frozen=True)
class Config:
    """A whole configuration file."""

    model: ModelConfig = field(default_factory=ModelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)


def load(name: str | Path) -> Config:
    """Read the YAML file with this path, or with this name in `configs/`.

    Raises ValueError for an unknown key or value, in one line with its name.
    """
    path = Path(name) if Path(name).suffix else HERE / f"{name}.yaml"
    if not path.is_file():
        if Path(name).suffix:
            raise ValueError(f"{path}: there is no such file")
        raise ValueError(unknown("configuration", str(name), [file.stem for file in HERE.glob("*.yaml")]))
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is no YAML: {' '.join(str(error).split())}") from None
    try:
        sections = _require_keys(Config, content or {})
        config = Config(
            _section(ModelConfig, sections.get("model")), _section(TrainConfig, sections.get("train"))
        )
        _require_consistent(config)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return config


def _require_keys(section: type, content: Any) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise ValueError(f"{content!r} is where keys and values belong")
    known_keys = [entry.name for entry in fields(section)]
    for key in content:
        if key not in known_keys:
            raise ValueError(unknown("key", str(key), known_keys))
    return content


def _section(section: type[Section], content: Any) -> Section:
    values = {}
    for key, value in _require_keys(section, content or {}).items():
        kind = type(getattr(section(), key))
        # 1 is a fine float; True is no number; 6e-4 is text to YAML, which wants 6.0e-4.
        if kind is float and not isinstance(value, bool) and isinstance(value, int | str):
            try:
                value = float(value)
            except ValueError:
                pass
        if type(value) is not kind:
            raise ValueError(f"{key} is {value!r}, it must be a {kind.__name__}")
        values[key] = value
    return section(**values)


def _require_consistent(config: Config) -> None:
    model, train = config.model, config.train
    for section in (model, train):
        for entry in fields(section):
            value = getattr(section, entry.name)
            least = 0 if entry.name in ("lora_rank", "save_every", "warmup", "seed") else 1
            if isinstance(value, int) and value < least:
                raise ValueError(f"{entry.name} is {value}, it must be {least} or more")
    if model.hidden % model.heads:
        raise ValueError(f"hidden is {model.hidden}, it must be a multiple of heads, {model.heads}")
    if not 0 <= model.dropout < 1:
        raise ValueError(f"dropout is {model.dropout}, it must be 0 or more and below 1")
    if train.precision not in ("bf16", "fp32"):
        raise ValueError(f"precision is {train.precision!r}, it must be bf16 or fp32")
    for key in ("heads", "vocabulary"):
        if getattr(model, key) % train.tensor_parallel:
            raise ValueError(
                f"{key} is {getattr(model, key)}, it must be a multiple of tensor_parallel, "
                f"{train.tensor_parallel}"
            )
