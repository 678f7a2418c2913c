"""GPT-2 on Megatron-core's tensor-parallel layers.

    tokens -> embedding + positions -> blocks -> norm -> head -> logits
    [batch, length]                                                    [batch, length, vocabulary]

With tensor parallelism over t processes each of them has 1/t of the heads, of the wide layer of the MLP and
of the vocabulary. The layers of Megatron-core do the exchange: a column-parallel layer gives each process its
own columns of the result, a row-parallel layer takes these and sums up. With one process both are plain
linear layers.
"""

from __future__ import annotations

import math

import torch
from config import Config, ModelConfig
from megatron.core import parallel_state, tensor_parallel
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from registry import register
from torch import Tensor, nn
from torch.nn import functional

KeysAndValues = tuple[Tensor, Tensor]
"""Of all tokens so far, in one block: twice [batch, heads, length, head size]."""
Cache = list[KeysAndValues]
"""Those of each block."""


def megatron_config(config: Config) -> TransformerConfig:
    """Return the configuration of Megatron-core's layers, data parallelism and optimizer."""
    return TransformerConfig(
        num_layers=config.model.layers,
        hidden_size=config.model.hidden,
        num_attention_heads=config.model.heads,
        tensor_model_parallel_size=config.train.tensor_parallel,
        params_dtype=torch.float32,
        # The same numbers for each degree of tensor parallelism.
        use_cpu_initialization=True,
        bf16=config.train.precision == "bf16",
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
    )


def normal(deviation: float):
    """Return what fills a weight at the start."""
    return lambda weight: nn.init.normal_(weight, mean=0.0, std=deviation)


class Attention(nn.Module):
    """Each token looks at itself and at the tokens before it."""

    def __init__(self, config: ModelConfig, megatron: TransformerConfig) -> None:
        super().__init__()
        self.head_size = config.hidden // config.heads
        self.dropout = config.dropout
        # Query, key and value of the first head, then of the second, and so on: so a cut leaves heads whole.
        self.qkv = ColumnParallelLinear(
            config.hidden, 3 * config.hidden, config=megatron, init_method=normal(0.02), gather_output=False
        )
        # Two of these are added to the residual stream in each block: their sum keeps its size.
        self.out = RowParallelLinear(
            config.hidden,
            config.hidden,
            config=megatron,
            init_method=normal(0.02 / math.sqrt(2 * config.layers)),
            bias=True,
            input_is_parallel=True,
            skip_bias_add=False,
        )
        self.lora = Lora(config, megatron) if config.lora_rank else None

    def forward(self, x: Tensor, hidden: Tensor, past: KeysAndValues | None) -> tuple[Tensor, KeysAndValues]:
        """Return the result, [batch, length, hidden], and keys and values, those of the past included.

        Args:
            x: [batch, length, hidden].
            hidden: [batch, 1, length, past + length], True where a token must not look.
            past: keys and values of the tokens before, or None.
        """
        batch, length, _ = x.shape
        qkv, _ = self.qkv(x)
        if self.lora is not None:
            qkv = qkv + self.lora(x)
        # [batch, length, heads, 3 * size] -> three of [batch, heads, length, size]
        query, key, value = qkv.view(batch, length, -1, 3 * self.head_size).transpose(1, 2).chunk(3, dim=-1)
        if past is not None:
            key, value = torch.cat([past[0], key], dim=2), torch.cat([past[1], value], dim=2)
        # How well each query fits each key: [batch, heads, length, past + length]. A sum of `head_size`
        # products is about sqrt(head_size) in size: its quotient stays where softmax is no step.
        scores = query @ key.transpose(2, 3) / math.sqrt(self.head_size)
        # The least number in the place of minus infinity: a row that may look nowhere (a filling) is no NaN.
        scores = scores.float().masked_fill(hidden, torch.finfo(torch.float32).min)
        shares = scores.softmax(dim=-1).to(value.dtype)
        if self.training and self.dropout:
            # The heads of two processes must not lose the same places: each has random numbers of its own.
            with tensor_parallel.get_cuda_rng_tracker().fork():
                shares = functional.dropout(shares, self.dropout)
        mixed = (shares @ value).transpose(1, 2).reshape(batch, length, -1)
        return self.out(mixed)[0], (key, value)


class Lora(nn.Module):
    """A trained addition of low rank to a column-parallel layer whose own weights stay as they are."""

    def __init__(self, config: ModelConfig, megatron: TransformerConfig) -> None:
        super().__init__()
        self.scale = config.lora_alpha / config.lora_rank
        self.down = nn.Linear(config.hidden, config.lora_rank, bias=False)
        normal(0.02)(self.down.weight)
        # Zero at the start: the model begins as it was.
        self.up = ColumnParallelLinear(
            config.lora_rank,
            3 * config.hidden,
            config=megatron,
            init_method=nn.init.zeros_,
            bias=False,
            gather_output=False,
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.down(x))[0] * self.scale


class Mlp(nn.Module):
    """Four times as wide in the middle."""

    def __init__(self, config: ModelConfig, megatron: TransformerConfig) -> None:
        super().__init__()
        wide = 4 * config.hidden
        self.wide = ColumnParallelLinear(
            config.hidden, wide, config=megatron, init_method=normal(0.02), gather_output=False
        )
        self.out = RowParallelLinear(
            wide,
            config.hidden,
            config=megatron,
            init_method=normal(0.02 / math.sqrt(2 * config.layers)),
            bias=True,
            input_is_parallel=True,
            skip_bias_add=False,
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.out(functional.gelu(self.wide(x)[0], approximate="tanh"))[0]


class Block(nn.Module):
    """Attention and MLP, each behind a norm, each added to what came in."""

    def __init__(self, config: ModelConfig, megatron: TransformerConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.hidden)
        self.attention = Attention(config, megatron)
        self.norm2 = nn.LayerNorm(config.hidden)
        self.mlp = Mlp(config, megatron)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, hidden: Tensor, past: KeysAndValues | None) -> tuple[Tensor, KeysAndValues]:
        mixed, kept = self.attention(self.norm1(x), hidden, past)
        x = x + self.dropout(mixed)
        return x + self.dropout(self.mlp(self.norm2(x))), kept


@register("model", "gpt2")
class GPT2(MegatronModule):
    """The whole model. `config` is Megatron-core's, `shape` ours."""

    def __init__(self, config: Config) -> None:
        super().__init__(megatron_config(config))
        self.shape = config.model
        self.tokens = VocabParallelEmbedding(
            config.model.vocabulary, config.model.hidden, init_method=normal(0.02), config=self.config
        )
        self.positions = nn.Embedding(config.model.context, config.model.hidden)
        normal(0.01)(self.positions.weight)
        self.dropout = nn.Dropout(config.model.dropout)
        self.blocks = nn.ModuleList(Block(config.model, self.config) for _ in range(config.model.layers))
        self.norm = nn.LayerNorm(config.model.hidden)
        if config.model.lora_rank:  # only the additions are trained
            for name, weight in self.named_parameters():
                weight.requires_grad_(".lora." in name)

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Tensor:
        """Return logits, [batch, length, vocabulary]; with `labels` each token's loss, [batch, length]."""
        logits = self.part_of_logits(*self.hidden_states(tokens)[:1])
        if labels is not None:
            return tensor_parallel.vocab_parallel_cross_entropy(logits.float(), labels)
        return tensor_parallel.gather_from_tensor_model_parallel_region(logits)

    def step(self, tokens: Tensor, padding: Tensor | None, cache: Cache | None) -> tuple[Tensor, Cache]:
        """Add new tokens to those in the cache; return the logits after the last token, and the longer cache.

        Args:
            tokens: [batch, new].
            padding: [batch], the number of filled places at the left of each row.
            cache: the result of the step before; None: the tokens are the first.
        """
        states, cache = self.hidden_states(tokens, padding, cache)
        logits = self.part_of_logits(states[:, -1:])
        return tensor_parallel.gather_from_tensor_model_parallel_region(logits)[:, 0], cache

    def hidden_states(
        self, tokens: Tensor, padding: Tensor | None = None, cache: Cache | None = None
    ) -> tuple[Tensor, Cache]:
        """Return the states after the last norm, [batch, new, hidden], and the cache; as in `step`."""
        past = cache[0][0].shape[2] if cache else 0
        length = past + tokens.shape[1]
        places = torch.arange(length, device=tokens.device)
        # [1, 1, new, length]: True where the place that is looked at lies behind the token that looks.
        hidden = places[None, None, None] > places[past:, None]
        position = places[None, past:]
        if padding is not None:
            hidden = hidden | (places < padding[:, None, None, None])
            # A row that fills the context has ended; where others go on, what is computed for it is not used.
            position = (position - padding[:, None]).clamp(0, self.shape.context - 1)
        x = self.dropout(self.tokens(tokens) + self.positions(position))
        kept = []
        for n, block in enumerate(self.blocks):
            x, keys_and_values = block(x, hidden, cache[n] if cache else None)
            kept.append(keys_and_values)
        return self.norm(x), kept

    def part_of_logits(self, states: Tensor) -> Tensor:
        """Return the logits of this process's part of the vocabulary. The head is the embedding: tied."""
        # Forward this does nothing; backward it sums up what the parts of the vocabulary say of the states.
        states = tensor_parallel.copy_to_tensor_model_parallel_region(states)
        return functional.linear(states, self.tokens.weight)


def initialize_alone() -> None:
    """Make the groups that Megatron-core's layers ask for, in a process alone: no port, no launcher."""
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group(
            "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
        )
        parallel_state.initialize_model_parallel()


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
