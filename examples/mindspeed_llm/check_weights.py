"""`python check_weights.py MODEL`: is a downloaded Hugging Face model whole?

The conversion finds out late, or not at all, that a shard is truncated, is a Git LFS pointer, or belongs to
another model. Only headers are read here, so a model of any size takes a second.
"""

from __future__ import annotations

import argparse
import json
import math
import struct
import sys
import zipfile
from pathlib import Path
from typing import Any

# Bytes of an element, by safetensors' names; those of F8 have several.
SIZES = {"BOOL": 1, "U8": 1, "I8": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2}
SIZES |= {"U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8}
LFS = b"version https://git-lfs"
AGAIN = "download it again"


def read_header(path: Path) -> dict[str, dict[str, Any]]:
    """Return the tensors of a safetensors file (`dtype`, `shape`, `data_offsets`), checked against its size.

    Raises ValueError.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(len(LFS))
        if start == LFS:
            raise ValueError(
                f"{path} is a Git LFS pointer of {size} bytes, not the weights: run git lfs pull"
            )
        if len(start) < 8:
            raise ValueError(f"{path} has {size} bytes, too few for a safetensors file: {AGAIN}")
        (length,) = struct.unpack("<Q", start[:8])
        if length > size - 8:
            raise ValueError(f"{path} is truncated: {size} bytes, its header alone says {length}: {AGAIN}")
        file.seek(8)
        try:
            header = json.loads(file.read(length))
            tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
            ends = [_end(path, name, entry) for name, entry in tensors.items()]
        except (ValueError, AttributeError, KeyError, TypeError) as error:
            if str(error).startswith(str(path)):
                raise
            raise ValueError(f"{path} has a header that is not safetensors': {AGAIN}") from None
    expected = 8 + length + max(ends, default=0)
    if size != expected:
        problem = "is truncated" if size < expected else "is too long"
        raise ValueError(f"{path} {problem}: {size} bytes, its header says {expected}: {AGAIN}")
    return tensors


def _end(path: Path, name: str, entry: dict[str, Any]) -> int:
    begin, end = entry["data_offsets"]
    element = SIZES.get(entry["dtype"], 1 if entry["dtype"].startswith("F8") else 0)
    if element and end - begin != math.prod(entry["shape"]) * element:
        raise ValueError(
            f"{path}: {name} has {end - begin} bytes for {entry['dtype']} {entry['shape']}: {AGAIN}"
        )
    return int(end)


def check(model: Path) -> str:
    """Check config, index and weights of a folder; return a line about them. Raises ValueError."""
    config = _read_json(model / "config.json")
    index = model / "model.safetensors.index.json"
    single = sorted(model.glob("model*.safetensors"))
    if index.is_file():
        names, size, files = _check_index(index)
    elif len(single) == 1:
        header = read_header(single[0])
        names, files = set(header), 1
        size = sum(entry["data_offsets"][1] - entry["data_offsets"][0] for entry in header.values())
    elif single:
        raise ValueError(f"{model} has {len(single)} safetensors files and no {index.name}: {AGAIN}")
    else:
        return _check_bin(model)
    _check_layers(model, names, config)
    return f"{model}: {len(names)} tensors in {files} files, {size} bytes, whole"


def _check_index(index: Path) -> tuple[set[str], int, int]:
    """Return the names of the tensors, their bytes, the number of files."""
    content = _read_json(index)
    mapped = content.get("weight_map")
    if not isinstance(mapped, dict) or not mapped:
        raise ValueError(f"{index} has no weight_map: {AGAIN}")
    files = sorted(set(mapped.values()))
    missing = [name for name in files if not (index.parent / name).is_file()]
    if missing:
        raise ValueError(f"{index} names {missing[0]} ({len(missing)} of {len(files)} missing): download it")
    size = 0
    for name in files:
        header = read_header(index.parent / name)
        size += sum(entry["data_offsets"][1] - entry["data_offsets"][0] for entry in header.values())
        tensors_of_file = {tensor for tensor, file in mapped.items() if file == name}
        for tensor in sorted(tensors_of_file ^ set(header)):
            place = "the index only" if tensor in tensors_of_file else "the file only"
            raise ValueError(
                f"{index.parent / name}: {tensor} is in {place}; index and file are of two models"
            )
    total = content.get("metadata", {}).get("total_size", size)
    if total != size:
        raise ValueError(f"{index} says total_size {total}, the files have {size}: {AGAIN}")
    return set(mapped), size, len(files)


def _check_layers(model: Path, names: set[str], config: dict[str, Any]) -> None:
    layers = config.get("num_hidden_layers")
    present_layers = {int(name.split(".")[2]) for name in names if name.startswith("model.layers.")}
    if isinstance(layers, int) and present_layers != set(range(layers)):
        odd = min(present_layers ^ set(range(layers)))
        problem = "has no tensor" if odd < layers else "is one too many"
        raise ValueError(f"{model}: layer {odd} {problem}; config.json says num_hidden_layers {layers}")


def _check_bin(model: Path) -> str:
    """The older format: every file of the index, each a whole zip archive."""
    index = model / "pytorch_model.bin.index.json"
    mapped = _read_json(index).get("weight_map", {}) if index.is_file() else {}
    files = sorted({model / name for name in mapped.values()}) or sorted(model.glob("pytorch_model*.bin"))
    if not files:
        raise ValueError(f"{model} has neither model*.safetensors nor pytorch_model*.bin: {AGAIN}")
    for file in files:
        if not file.is_file():
            raise ValueError(f"{index} names {file.name}, which is missing: download it")
        if not zipfile.is_zipfile(file):
            raise ValueError(f"{file} is truncated or no checkpoint of torch: {AGAIN}")
    return f"{model}: {len(files)} files, each with its end"


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path} is missing: {path.parent} is no model of Hugging Face") from None
    except ValueError:
        raise ValueError(f"{path} is no JSON (truncated?): {AGAIN}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} has no JSON object: {AGAIN}")
    return content


def main() -> None:
    parser = argparse.ArgumentParser(description="Is a downloaded Hugging Face model whole?")
    parser.add_argument("model", type=Path)
    try:
        print(check(parser.parse_args().model))
    except (ValueError, OSError) as error:
        sys.exit(f"check_weights.py: {error}")


if __name__ == "__main__":
    main()
