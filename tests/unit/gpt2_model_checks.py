"""Checks of the model of examples/gpt2_from_scratch, and of its generation, measures and conversion.

The checks import Megatron-core, so `test_gpt2_model.py` runs them in a new process. The references from
transformers were recorded by `tests/frameworks/by_hand_gpt2.py`.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.gpt2_example import module

config, data, tokenizer, model = (module(name) for name in ("config", "data", "tokenizer", "model"))
checkpoint, generate, evaluate, convert = (
    module(name) for name in ("checkpoint", "generate", "evaluate", "convert")
)
from megatron.core.datasets.indexed_dataset import IndexedDataset  # noqa: E402

REFERENCE = Path(__file__).with_name("gpt2_reference.json")
VOCABULARY, CONTEXT = 300, 32
SHAPE = config.ModelConfig(vocabulary=VOCABULARY, context=CONTEXT, hidden=48, layers=3, heads=4)
TEXT = "the cat sat on the mat, and the dog sat on the cat. " * 4


def numbers(count: int, start: int) -> torch.Tensor:
    """Return `count` numbers between -0.5 and 0.5 that look random and are the same everywhere."""
    at = torch.arange(start, start + count)
    return ((at * at * 2654435761 + at * 40503) % 2**32).double() / 2**32 - 0.5


def filled() -> Any:
    """Return a model with large weights, so that logits differ much."""
    model.initialize_alone()
    gpt2 = model.GPT2(config.Config(model=SHAPE))
    with torch.no_grad():
        for n, (name, weight) in enumerate(gpt2.named_parameters()):
            weight.copy_(numbers(weight.numel(), 7919 * n).view(weight.shape))
            if "norm" in name and name.endswith("weight"):
                weight += 1
    return gpt2.eval()


def drawn(*shape: int) -> torch.Tensor:
    """Return tokens, the same everywhere."""
    return ((numbers(torch.Size(shape).numel(), 5) + 0.5) * 279).long().view(shape) + 1


def samples(folder: Path) -> Any:
    """Return a text of 5 blocks."""
    data.write_tokens(folder / "text", [drawn(1, 5 * CONTEXT + 9)[0].tolist()], VOCABULARY)
    return data.Blocks(folder / "text", CONTEXT, VOCABULARY)


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model in Hugging Face's form, with a tokenizer."""
    folder = tmp_path_factory.mktemp("hf")
    bpe = tokenizer.train([TEXT], VOCABULARY)
    bpe.save(folder)
    settings = config.Config(model=SHAPE)
    state = {"model": filled().state_dict(), "about": checkpoint.about(settings, bpe.digest)}
    checkpoint.write(folder / "first", 3, state)
    checkpoint.publish(folder / "first", 3)
    convert.export(folder / "first", folder / "hf", folder)
    return folder / "hf"


@pytest.fixture(scope="module")
def imported(hf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    convert.import_(hf, folder)
    return folder


@pytest.fixture(scope="module")
def bpe(hf: Path) -> Any:
    return tokenizer.Tokenizer.load(hf)


@pytest.fixture(scope="module")
def imported_model(imported: Path, bpe: Any) -> Any:
    return checkpoint.load(imported, bpe)


class TestWhatTransformersCompute:
    """As recorded."""

    RECORDED = json.loads(REFERENCE.read_text())

    def test_the_logits(self, imported_model: Any) -> None:
        with torch.no_grad():
            logits = imported_model(drawn(3, CONTEXT))[:, :: CONTEXT - 1]
        torch.testing.assert_close(logits, torch.tensor(self.RECORDED["logits"]), rtol=0, atol=1e-4)

    def test_the_greedy_text(self, imported_model: Any) -> None:
        assert generate.complete(imported_model, drawn(2, 6).tolist(), new=20) == self.RECORDED["greedy"]

    def test_the_perplexity(self, imported_model: Any, tmp_path: Path) -> None:
        measured = evaluate.perplexity(imported_model, samples(tmp_path))
        assert (measured["blocks"], measured["tokens"]) == (5, 5 * CONTEXT)
        assert measured["perplexity"] == pytest.approx(self.RECORDED["perplexity"], rel=1e-5)
        assert measured["low"] < measured["perplexity"] < measured["high"]


class TestConversion:
    def test_there_and_back_is_bitwise(self, imported: Path) -> None:
        weights, _, _ = checkpoint.read(imported)
        first = {name: value for name, value in filled().state_dict().items() if value is not None}
        assert weights.keys() == first.keys()
        assert all(torch.equal(weights[name], value) for name, value in first.items())

    def test_additions_of_lora_are_merged(self, imported_model: Any, imported: Path) -> None:
        weights, read, _ = checkpoint.read(imported)
        shape = dataclasses.replace(read.model, lora_rank=2, lora_alpha=8.0)
        adapted = model.GPT2(dataclasses.replace(read, model=shape)).eval()
        adapted.load_state_dict(weights, strict=False)
        assert {name for name, weight in adapted.named_parameters() if weight.requires_grad} == {
            f"blocks.{layer}.attention.lora.{part}.weight" for layer in range(3) for part in ("up", "down")
        }
        tokens = drawn(2, 9)
        with torch.no_grad():
            assert torch.equal(adapted(tokens), imported_model(tokens))
            for block in adapted.blocks:
                torch.nn.init.normal_(block.attention.lora.up.weight, std=0.3)
            state = {name: value for name, value in adapted.state_dict().items() if value is not None}
            merged = model.GPT2(read).eval()
            merged.load_state_dict(convert.from_hf(convert.to_hf(state, shape), read.model))
            assert not torch.allclose(adapted(tokens), imported_model(tokens), atol=1e-2)
            torch.testing.assert_close(adapted(tokens), merged(tokens), rtol=0, atol=1e-4)


class TestGeneration:
    PROMPTS = ([5, 6, 7, 8, 9, 10, 11], [12], [13, 14, 15])

    @pytest.mark.parametrize(
        "sampling",
        [generate.Sampling(), generate.Sampling(0.9, top_k=30, top_p=0.95, repetition_penalty=1.3)],
        ids=["greedy", "drawn"],
    )
    def test_with_a_cache_and_without(self, sampling: Any, imported_model: Any) -> None:
        rows = [
            generate.complete(imported_model, self.PROMPTS, new=18, sampling=sampling, cached=cached)
            for cached in (True, False)
        ]
        assert rows[0] == rows[1]

    def test_a_row_of_a_batch_is_as_if_alone(self, imported_model: Any) -> None:
        """Also with a penalty: the guide counts the tokens of all rows in the first one's list."""
        sampling = generate.Sampling(repetition_penalty=1.4)
        together = generate.complete(imported_model, self.PROMPTS, new=15, sampling=sampling)
        alone = [
            generate.complete(imported_model, [prompt], new=15, sampling=sampling)[0]
            for prompt in self.PROMPTS
        ]
        assert together == alone

    def test_the_end_of_text_in_a_prompt_is_kept(self, imported_model: Any) -> None:
        """The guide takes the token for filling, and cuts the prompt there."""
        for prompt in ([5, 0, 6, 0], [0], [0, 0, 7]):
            rows = generate.complete(imported_model, [prompt, [8] * 9], new=5)
            assert rows[0][: len(prompt)] == prompt
            assert rows[0] == generate.complete(imported_model, [prompt], new=5)[0]

    def test_a_row_ends_behind_the_end_and_others_go_on(self, imported_model: Any) -> None:
        free = generate.complete(imported_model, self.PROMPTS, new=10)
        end = free[0][len(self.PROMPTS[0]) + 2]
        rows = generate.complete(imported_model, self.PROMPTS, new=10, end=end)
        for row, full_row, prompt in zip(rows, free, self.PROMPTS, strict=True):
            stop = full_row.index(end, len(prompt)) + 1 if end in full_row[len(prompt) :] else len(full_row)
            assert row == full_row[:stop]

    def test_the_context_is_filled_and_not_left(self, imported_model: Any) -> None:
        long_prompt, short = [7] * (CONTEXT - 2), [8]
        rows = generate.complete(imported_model, [long_prompt, short], new=CONTEXT)
        assert [len(row) for row in rows] == [CONTEXT, CONTEXT]
        assert rows == [
            generate.complete(imported_model, [prompt], new=CONTEXT)[0] for prompt in (long_prompt, short)
        ]

    def test_tokens_that_the_tokenizer_lacks_are_not_chosen(self, imported_model: Any) -> None:
        sampling = generate.Sampling(temperature=100.0)
        rows = generate.complete(imported_model, self.PROMPTS, new=20, tokens=20, sampling=sampling)
        assert max(map(max, rows)) < 20

    def test_a_seed_decides(self, imported_model: Any) -> None:
        sampling = generate.Sampling(temperature=2.0)
        texts = [
            generate.complete(imported_model, self.PROMPTS, new=9, sampling=sampling, seed=s)
            for s in (1, 1, 2)
        ]
        assert texts[0] == texts[1] != texts[2]

    @pytest.mark.parametrize(
        ("prompts", "message"),
        [
            ([[5], []], "prompt 2 is empty: at least one token is needed"),
            ([[5] * CONTEXT], "prompt 1 has 32 tokens: the model's context of 32 leaves no room"),
            ([[5, 4000]], "prompt 1 has token 4000: the vocabulary has 300"),
        ],
    )
    def test_a_prompt_that_cannot_be_continued(self, prompts: Any, message: str, imported_model: Any) -> None:
        with pytest.raises(ValueError, match=message):
            generate.complete(imported_model, prompts, new=3)


class TestEvaluation:
    def test_a_score_is_the_mean_over_the_labels_tokens(self, imported_model: Any, bpe: Any) -> None:
        text, answer = [0, *bpe.encode("the cat")], bpe.encode(" dog sat")
        with torch.no_grad():
            shares = imported_model(torch.tensor([text + answer]))[0].log_softmax(-1)
        expected = sum(float(shares[len(text) + n - 1, token]) for n, token in enumerate(answer)) / len(
            answer
        )
        assert evaluate.score(imported_model, bpe, "the cat", "dog sat") == pytest.approx(expected, rel=1e-4)

    def test_a_text_longer_than_the_context_loses_its_beginning(self, imported_model: Any, bpe: Any) -> None:
        assert evaluate.score(imported_model, bpe, "a " * 200 + TEXT, "dog") == evaluate.score(
            imported_model, bpe, TEXT, "dog"
        )

    def test_classes(self, imported_model: Any, bpe: Any) -> None:
        samples = [("the cat", "dog"), ("the mat", "dog"), ("the dog", "cat"), ("on", "dog")]
        result = evaluate.classify(imported_model, bpe, samples, " is")
        assert result["samples"] == 4
        assert result["always_the_most_frequent"] == 0.75
        assert result["low"] <= result["accuracy"] <= result["high"]


class TestCheckpoints:
    def test_another_tokenizer_is_refused(self, imported: Path) -> None:
        other_tokenizer = tokenizer.train([TEXT], 265)
        with pytest.raises(
            ValueError, match=r"the tokenizer's vocabulary does not fit .*: trained with .*, given"
        ):
            checkpoint.load(imported, other_tokenizer)

    def test_more_tokens_than_rows_are_refused(self, bpe: Any) -> None:
        with pytest.raises(ValueError, match=r"the tokenizer has 2.. tokens, the model's vocabulary is 200"):
            checkpoint.require_room(bpe, config.ModelConfig(vocabulary=200))

    def test_another_shape_is_refused(self, imported: Path) -> None:
        _, _, about = checkpoint.read(imported)
        expected = checkpoint.about(config.Config(), about["tokenizer"])
        with pytest.raises(ValueError, match="has a model with vocabulary 300, the configuration says 50257"):
            checkpoint.require_same(imported, about, expected)

    def test_no_checkpoint(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"has no checkpoint: no latest_checkpointed_iteration\.txt"):
            checkpoint.read(tmp_path)

    def test_the_parts_of_tensor_parallelism_are_joined(self, imported: Path, tmp_path: Path) -> None:
        weights, _, about = checkpoint.read(imported)
        for rank in range(2):
            shard = {}
            for name, value in weights.items():
                dimension = next((at for end, at in checkpoint.DIVIDED.items() if name.endswith(end)), None)
                shard[name] = value if dimension is None else value.chunk(2, dimension)[rank]
            checkpoint.write(tmp_path, 7, {"model": shard, "about": about}, rank=rank)
        checkpoint.publish(tmp_path, 7)
        joined, _, _ = checkpoint.read(tmp_path)
        assert all(torch.equal(joined[name], value) for name, value in weights.items())

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"activation_function": "relu"}, "has activation_function relu: only gelu_new is supported"),
            ({"n_embd": 64}, "wte.weight is .*, config.json makes it"),
            ({"n_layer": 4}, "the weight h.3.ln_1.weight is missing"),
            ({"vocab_size": 100}, "the tokenizer has 2.. tokens, the model's vocabulary is 100"),
        ],
        ids=["another activation", "another width", "more layers", "fewer rows"],
    )
    def test_a_model_that_is_another(
        self, change: dict[str, Any], message: str, hf: Path, tmp_path: Path
    ) -> None:
        for path in hf.iterdir():
            (tmp_path / path.name).write_bytes(path.read_bytes())
        settings = json.loads((hf / "config.json").read_text()) | change
        (tmp_path / "config.json").write_text(json.dumps(settings))
        with pytest.raises(ValueError, match=message):
            convert.import_(tmp_path, tmp_path / "out")

    def test_weights_that_are_cut_short(self, hf: Path, tmp_path: Path) -> None:
        for path in hf.iterdir():
            (tmp_path / path.name).write_bytes(path.read_bytes())
        raw = (tmp_path / "model.safetensors").read_bytes()
        (tmp_path / "model.safetensors").write_bytes(raw[: len(raw) // 2])
        with pytest.raises(ValueError, match=r"model\.safetensors is damaged or cut short"):
            convert.import_(tmp_path, tmp_path / "out")


@pytest.mark.parametrize("vocabulary", [1000, 100_000])
def test_megatron_reads_the_tokens(vocabulary: int, tmp_path: Path) -> None:
    documents = [[1, 2, 3, 0], [4, 0], [5, 6, 7, 8, 9, 0]]
    data.write_tokens(tmp_path / "v1.5", documents, vocabulary)
    read = IndexedDataset(str(tmp_path / "v1.5"))
    assert [row.tolist() for row in read] == documents
    assert read.document_indices.tolist() == [0, 1, 2, 3]
    assert read.index.dtype.__name__ == ("uint16" if vocabulary == 1000 else "int32")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "model_optim_rng.pt cannot be read: "),
        (b"PK\x03\x04 cut short", "model_optim_rng.pt cannot be read: "),
        (None, "model_optim_rng.pt is not of a checkpoint of this example"),
    ],
)
def test_a_checkpoint_that_is_none(content: bytes | None, message: str, tmp_path: Path) -> None:
    files = checkpoint.part(tmp_path, 3)
    files.mkdir(parents=True)
    (tmp_path / checkpoint.TRACKER).write_text("3")
    if content is None:
        torch.save({"model": {}, "iteration": 3}, files / "model_optim_rng.pt")
    else:
        (files / "model_optim_rng.pt").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        checkpoint.read(tmp_path)


def test_a_tracker_that_names_no_step(tmp_path: Path) -> None:
    (tmp_path / checkpoint.TRACKER).write_text("release")
    with pytest.raises(ValueError, match="says 'release': it must be the number of a step"):
        checkpoint.read(tmp_path)
