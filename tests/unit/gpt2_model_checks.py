"""Checks of the model of examples/gpt2_from_scratch, of its generation, measures and conversion.

They import Megatron-core, so `test_gpt2_model.py` runs this file in a process of its own. What transformers
compute for the same weights was recorded by `tests/frameworks/by_hand_gpt2.py`.
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
    made = model.GPT2(config.Config(model=SHAPE))
    with torch.no_grad():
        for n, (name, weight) in enumerate(made.named_parameters()):
            weight.copy_(numbers(weight.numel(), 7919 * n).view(weight.shape))
            if "norm" in name and name.endswith("weight"):
                weight += 1
    return made.eval()


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
    words = tokenizer.train([TEXT], VOCABULARY)
    words.save(folder)
    whole = config.Config(model=SHAPE)
    state = {"model": filled().state_dict(), "about": checkpoint.about(whole, words.digest)}
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
def words(hf: Path) -> Any:
    return tokenizer.Tokenizer.load(hf)


@pytest.fixture(scope="module")
def ours(imported: Path, words: Any) -> Any:
    return checkpoint.load(imported, words)


class TestWhatTransformersCompute:
    """As recorded."""

    RECORDED = json.loads(REFERENCE.read_text())

    def test_the_logits(self, ours: Any) -> None:
        with torch.no_grad():
            found = ours(drawn(3, CONTEXT))[:, :: CONTEXT - 1]
        torch.testing.assert_close(found, torch.tensor(self.RECORDED["logits"]), rtol=0, atol=1e-4)

    def test_the_greedy_text(self, ours: Any) -> None:
        assert generate.complete(ours, drawn(2, 6).tolist(), new=20) == self.RECORDED["greedy"]

    def test_the_perplexity(self, ours: Any, tmp_path: Path) -> None:
        found = evaluate.perplexity(ours, samples(tmp_path))
        assert (found["blocks"], found["tokens"]) == (5, 5 * CONTEXT)
        assert found["perplexity"] == pytest.approx(self.RECORDED["perplexity"], rel=1e-5)
        assert found["low"] < found["perplexity"] < found["high"]


class TestConversion:
    def test_there_and_back_is_bitwise(self, imported: Path) -> None:
        weights, _, _ = checkpoint.read(imported)
        first = {name: value for name, value in filled().state_dict().items() if value is not None}
        assert weights.keys() == first.keys()
        assert all(torch.equal(weights[name], value) for name, value in first.items())

    def test_additions_of_lora_are_merged(self, ours: Any, imported: Path) -> None:
        weights, read, _ = checkpoint.read(imported)
        shape = dataclasses.replace(read.model, lora_rank=2, lora_alpha=8.0)
        adapted = model.GPT2(dataclasses.replace(read, model=shape)).eval()
        adapted.load_state_dict(weights, strict=False)
        assert {name for name, weight in adapted.named_parameters() if weight.requires_grad} == {
            f"blocks.{layer}.attention.lora.{part}.weight" for layer in range(3) for part in ("up", "down")
        }
        tokens = drawn(2, 9)
        with torch.no_grad():
            assert torch.equal(adapted(tokens), ours(tokens))
            for block in adapted.blocks:
                torch.nn.init.normal_(block.attention.lora.up.weight, std=0.3)
            state = {name: value for name, value in adapted.state_dict().items() if value is not None}
            merged = model.GPT2(read).eval()
            merged.load_state_dict(convert.from_hf(convert.to_hf(state, shape), read.model))
            assert not torch.allclose(adapted(tokens), ours(tokens), atol=1e-2)
            torch.testing.assert_close(adapted(tokens), merged(tokens), rtol=0, atol=1e-4)


class TestGeneration:
    PROMPTS = ([5, 6, 7, 8, 9, 10, 11], [12], [13, 14, 15])

    @pytest.mark.parametrize(
        "sampling",
        [generate.Sampling(), generate.Sampling(0.9, top_k=30, top_p=0.95, repetition_penalty=1.3)],
        ids=["greedy", "drawn"],
    )
    def test_with_a_cache_and_without(self, sampling: Any, ours: Any) -> None:
        rows = [
            generate.complete(ours, self.PROMPTS, new=18, sampling=sampling, cached=cached)
            for cached in (True, False)
        ]
        assert rows[0] == rows[1]

    def test_a_row_of_a_batch_is_as_if_alone(self, ours: Any) -> None:
        """Also with a penalty: the guide counts the tokens of all rows in the first one's list."""
        sampling = generate.Sampling(repetition_penalty=1.4)
        together = generate.complete(ours, self.PROMPTS, new=15, sampling=sampling)
        alone = [generate.complete(ours, [prompt], new=15, sampling=sampling)[0] for prompt in self.PROMPTS]
        assert together == alone

    def test_the_end_of_text_in_a_prompt_is_kept(self, ours: Any) -> None:
        """The guide takes the token for filling, and cuts the prompt there."""
        for prompt in ([5, 0, 6, 0], [0], [0, 0, 7]):
            rows = generate.complete(ours, [prompt, [8] * 9], new=5)
            assert rows[0][: len(prompt)] == prompt
            assert rows[0] == generate.complete(ours, [prompt], new=5)[0]

    def test_a_row_ends_behind_the_end_and_others_go_on(self, ours: Any) -> None:
        free = generate.complete(ours, self.PROMPTS, new=10)
        end = free[0][len(self.PROMPTS[0]) + 2]
        rows = generate.complete(ours, self.PROMPTS, new=10, end=end)
        for row, whole, prompt in zip(rows, free, self.PROMPTS, strict=True):
            stop = whole.index(end, len(prompt)) + 1 if end in whole[len(prompt) :] else len(whole)
            assert row == whole[:stop]

    def test_the_context_is_filled_and_not_left(self, ours: Any) -> None:
        long, short = [7] * (CONTEXT - 2), [8]
        rows = generate.complete(ours, [long, short], new=CONTEXT)
        assert [len(row) for row in rows] == [CONTEXT, CONTEXT]
        assert rows == [generate.complete(ours, [prompt], new=CONTEXT)[0] for prompt in (long, short)]

    def test_tokens_that_the_tokenizer_lacks_are_not_chosen(self, ours: Any) -> None:
        sampling = generate.Sampling(temperature=100.0)
        rows = generate.complete(ours, self.PROMPTS, new=20, tokens=20, sampling=sampling)
        assert max(map(max, rows)) < 20

    def test_a_seed_decides(self, ours: Any) -> None:
        sampling = generate.Sampling(temperature=2.0)
        texts = [generate.complete(ours, self.PROMPTS, new=9, sampling=sampling, seed=s) for s in (1, 1, 2)]
        assert texts[0] == texts[1] != texts[2]

    @pytest.mark.parametrize(
        ("prompts", "said"),
        [
            ([[5], []], "prompt 2 is empty: at least one token is needed"),
            ([[5] * CONTEXT], "prompt 1 has 32 tokens: the model's context of 32 leaves no room"),
            ([[5, 4000]], "prompt 1 has token 4000: the vocabulary has 300"),
        ],
    )
    def test_a_prompt_that_cannot_be_continued(self, prompts: Any, said: str, ours: Any) -> None:
        with pytest.raises(ValueError, match=said):
            generate.complete(ours, prompts, new=3)


class TestEvaluation:
    def test_a_score_is_the_mean_over_the_labels_tokens(self, ours: Any, words: Any) -> None:
        text, answer = [0, *words.encode("the cat")], words.encode(" dog sat")
        with torch.no_grad():
            shares = ours(torch.tensor([text + answer]))[0].log_softmax(-1)
        expected = sum(float(shares[len(text) + n - 1, token]) for n, token in enumerate(answer)) / len(
            answer
        )
        assert evaluate.score(ours, words, "the cat", "dog sat") == pytest.approx(expected, rel=1e-4)

    def test_a_text_longer_than_the_context_loses_its_beginning(self, ours: Any, words: Any) -> None:
        assert evaluate.score(ours, words, "a " * 200 + TEXT, "dog") == evaluate.score(
            ours, words, TEXT, "dog"
        )

    def test_classes(self, ours: Any, words: Any) -> None:
        samples = [("the cat", "dog"), ("the mat", "dog"), ("the dog", "cat"), ("on", "dog")]
        found = evaluate.classify(ours, words, samples, " is")
        assert found["samples"] == 4
        assert found["always_the_most_frequent"] == 0.75
        assert found["low"] <= found["accuracy"] <= found["high"]


class TestCheckpoints:
    def test_another_tokenizer_is_refused(self, imported: Path) -> None:
        other = tokenizer.train([TEXT], 265)
        with pytest.raises(
            ValueError, match=r"the tokenizer's vocabulary does not fit .*: trained with .*, given"
        ):
            checkpoint.load(imported, other)

    def test_more_tokens_than_rows_are_refused(self, words: Any) -> None:
        with pytest.raises(ValueError, match=r"the tokenizer has 2.. tokens, the model's vocabulary is 200"):
            checkpoint.require_room(words, config.ModelConfig(vocabulary=200))

    def test_another_shape_is_refused(self, imported: Path) -> None:
        _, _, said = checkpoint.read(imported)
        wanted = checkpoint.about(config.Config(), said["tokenizer"])
        with pytest.raises(ValueError, match="has a model with vocabulary 300, the configuration says 50257"):
            checkpoint.require_same(imported, said, wanted)

    def test_no_checkpoint(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"has no checkpoint: no latest_checkpointed_iteration\.txt"):
            checkpoint.read(tmp_path)

    def test_the_parts_of_tensor_parallelism_are_joined(self, imported: Path, tmp_path: Path) -> None:
        weights, _, said = checkpoint.read(imported)
        for rank in range(2):
            own = {}
            for name, value in weights.items():
                dimension = next((at for end, at in checkpoint.DIVIDED.items() if name.endswith(end)), None)
                own[name] = value if dimension is None else value.chunk(2, dimension)[rank]
            checkpoint.write(tmp_path, 7, {"model": own, "about": said}, rank=rank)
        checkpoint.publish(tmp_path, 7)
        joined, _, _ = checkpoint.read(tmp_path)
        assert all(torch.equal(joined[name], value) for name, value in weights.items())

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"activation_function": "relu"}, "has activation_function relu: only gelu_new is supported"),
            ({"n_embd": 64}, "wte.weight is .*, config.json makes it"),
            ({"n_layer": 4}, "the weight h.3.ln_1.weight is missing"),
            ({"vocab_size": 100}, "the tokenizer has 2.. tokens, the model's vocabulary is 100"),
        ],
        ids=["another activation", "another width", "more layers", "fewer rows"],
    )
    def test_a_model_that_is_another(
        self, change: dict[str, Any], words: str, hf: Path, tmp_path: Path
    ) -> None:
        for path in hf.iterdir():
            (tmp_path / path.name).write_bytes(path.read_bytes())
        given = json.loads((hf / "config.json").read_text()) | change
        (tmp_path / "config.json").write_text(json.dumps(given))
        with pytest.raises(ValueError, match=words):
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
    ("content", "words"),
    [
        (b"", "model_optim_rng.pt cannot be read: "),
        (b"PK\x03\x04 cut short", "model_optim_rng.pt cannot be read: "),
        (None, "model_optim_rng.pt is not of a checkpoint of this example"),
    ],
)
def test_a_checkpoint_that_is_none(content: bytes | None, words: str, tmp_path: Path) -> None:
    files = checkpoint.part(tmp_path, 3)
    files.mkdir(parents=True)
    (tmp_path / checkpoint.TRACKER).write_text("3")
    if content is None:
        torch.save({"model": {}, "iteration": 3}, files / "model_optim_rng.pt")
    else:
        (files / "model_optim_rng.pt").write_bytes(content)
    with pytest.raises(ValueError, match=words):
        checkpoint.read(tmp_path)


def test_a_tracker_that_names_no_step(tmp_path: Path) -> None:
    (tmp_path / checkpoint.TRACKER).write_text("release")
    with pytest.raises(ValueError, match="says 'release': it must be the number of a step"):
        checkpoint.read(tmp_path)
