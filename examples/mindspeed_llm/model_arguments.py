"""`python model_arguments.py MODEL`: the framework's arguments for a Qwen3, from Hugging Face's config.json.

They equal those of the framework's own examples/mcore/qwen3, which lists the arguments of each size.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

FIXED = (
    "--use-mcore-models --spec mindspeed_llm.tasks.models.spec.qwen3_spec layer_spec --qk-layernorm"
    " --group-query-attention --use-rotary-position-embeddings --position-embedding-type rope"
    " --disable-bias-linear --swiglu --normalization RMSNorm --make-vocab-size-divisible-by 1"
    " --hidden-dropout 0 --attention-dropout 0"
)
SIZES = {
    "--num-layers": "num_hidden_layers",
    "--hidden-size": "hidden_size",
    "--ffn-hidden-size": "intermediate_size",
    "--num-attention-heads": "num_attention_heads",
    "--num-query-groups": "num_key_value_heads",
    "--kv-channels": "head_dim",
    "--max-position-embeddings": "max_position_embeddings",
    "--padded-vocab-size": "vocab_size",
    "--norm-epsilon": "rms_norm_eps",
}


def arguments(config: dict[str, Any]) -> list[str]:
    """Return the arguments for the content of a config.json. Raises ValueError where it is no dense Qwen3."""
    if config.get("model_type") != "qwen3":
        raise ValueError(f"model_type is {config.get('model_type')!r}; this flow is written for 'qwen3'")
    arguments = FIXED.split()
    for option, key in SIZES.items():
        if key not in config:
            raise ValueError(f"config.json has no {key}")
        arguments += [option, f"{config[key]}"]
    rope = config.get("rope_parameters") or config  # its place since transformers 5
    if "rope_theta" not in rope:
        raise ValueError("config.json has no rope_theta")
    arguments += ["--rotary-base", str(int(rope["rope_theta"]))]
    return (
        arguments
        if config.get("tie_word_embeddings")
        else [*arguments, "--untie-embeddings-and-output-weights"]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="The framework's arguments for a Qwen3 of Hugging Face.")
    parser.add_argument("model", type=Path)
    path = parser.parse_args().model / "config.json"
    try:
        print(*arguments(json.loads(path.read_text(encoding="utf-8"))))
    except (ValueError, OSError) as error:
        sys.exit(f"model_arguments.py: {path}: {error}")


if __name__ == "__main__":
    main()
