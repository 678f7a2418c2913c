"""Registry, configuration and data of examples/gpt2_from_scratch."""

from __future__ import annotations

from pathlib import Path

import numpy
import pytest
import torch

from tests.unit.gpt2_example import FOLDER, module

config, data, registry = module("config"), module("data"), module("registry")


class TestRegistry:
    def test_a_registered_part_is_returned(self) -> None:
        part = registry.register("vegetable", "leek")(lambda: 1)
        assert registry.find("vegetable", "leek") is part

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("paer", "unknown fruit 'paer'; did you mean pear"),
            ("kiwi", "unknown fruit 'kiwi'; known: .*pear"),
        ],
    )
    def test_an_unknown_name_lists_near_ones(self, name: str, message: str) -> None:
        registry.register("fruit", "pear")(registry.find)
        with pytest.raises(ValueError, match=message):
            registry.find("fruit", name)

    def test_a_name_that_is_taken(self) -> None:
        registry.register("fruit", "plum")(registry.find)
        with pytest.raises(ValueError, match="fruit 'plum' is registered already: find"):
            registry.register("fruit", "plum")(registry.unknown)

    def test_it_is_short(self) -> None:
        assert len((FOLDER / "registry.py").read_text().splitlines()) <= 60


class TestConfig:
    @pytest.mark.parametrize(
        ("name", "millions"),
        [
            ("tiny", 0.93),
            ("small", 124.44),
            ("xl", 1557.61),
            ("13b", 12853.6),
            ("52b", 51975.3),
            ("lora", 125.03),
        ],
    )
    def test_every_file_is_read(self, name: str, millions: float) -> None:
        assert config.load(name).model.parameters / 1e6 == pytest.approx(millions, rel=1e-3)

    def test_no_file_is_forgotten(self) -> None:
        assert {path.stem for path in (FOLDER / "configs").iterdir()} == {
            "tiny",
            "small",
            "xl",
            "13b",
            "52b",
            "lora",
        }

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("model: {hiden: 8}", r"bad.yaml: unknown key 'hiden'; did you mean hidden\?"),
            ("modle: {}", r"bad.yaml: unknown key 'modle'; did you mean model\?"),
            ("model: {layers: two}", "layers is 'two', it must be a int"),
            ("model: {layers: true}", "layers is True, it must be a int"),
            ("model: {hidden: 10, heads: 4}", "hidden is 10, it must be a multiple of heads, 4"),
            ("model: {layers: 0}", "layers is 0, it must be 1 or more"),
            ("train: {tensor_parallel: 8}", "heads is 12, it must be a multiple of tensor_parallel, 8"),
            ("train: {precision: fp64}", "precision is 'fp64', it must be bf16 or fp32"),
            ("model: [1]", r"\[1\] is where keys and values belong"),
            ("a: [", "is no YAML"),
        ],
    )
    def test_unknown_settings_are_refused(self, text: str, message: str, tmp_path: Path) -> None:
        (tmp_path / "bad.yaml").write_text(text)
        with pytest.raises(ValueError, match=message) as raised:
            config.load(tmp_path / "bad.yaml")
        assert "\n" not in str(raised.value)

    def test_a_number_as_people_write_it(self, tmp_path: Path) -> None:
        """YAML reads 6e-4 as text."""
        (tmp_path / "good.yaml").write_text("train: {learning_rate: 6e-4}")
        assert config.load(tmp_path / "good.yaml").train.learning_rate == 6e-4

    def test_a_name_that_is_nearly_right(self) -> None:
        with pytest.raises(ValueError, match=r"unknown configuration 'smal'; did you mean small\?"):
            config.load("smal")


class TestText:
    @pytest.mark.parametrize(
        ("raw", "cleaned"),
        [
            ("It cost 1 @,@ 000 @.@ 5 , well @-@ known .", "It cost 1,000.5, well-known."),
            ('He said : " Go ! " ( now )', 'He said: "Go!" (now)'),
            ("the dog 's bone in the ' 90s", "the dog's bone in the '90s"),
            ("the boys ' dog : ' Go ! '", "the boys' dog: 'Go!'"),
            ("Is it 20 ° C ? Yes ; it is .", "Is it 20°C? Yes; it is."),
            # The guide's cleaner makes a 1 of it, which is right for another corpus only.
            ("the N side", "the N side"),
        ],
    )
    def test_wikitext_is_cleaned(self, raw: str, cleaned: str) -> None:
        assert data.clean(raw) == cleaned

    def test_all_passages_are_found(self, tmp_path: Path) -> None:
        """The guide loses the last passage and the text after a tab."""
        text = tmp_path / "text"
        text.write_text(
            " = One = \n\n a b . \n c\td \n\n = = Part = = \n e \n = Two = \n = Three = \n last \n"
        )
        assert list(data.passages(text)) == ["a b.\nc\td", "e", "last"]

    def test_no_text_at_all(self, tmp_path: Path) -> None:
        (tmp_path / "text").write_text(" = One = \n\n")
        with pytest.raises(ValueError, match="text has no text"):
            list(data.passages(tmp_path / "text"))

    def test_docstrings_become_wikitext(self) -> None:
        source = '"""First\n   line.\n\n>>> 1\n\nSecond."""\ndef f():\n    "Of f."\nx = 1\n'
        assert list(data.docstrings(source)) == ["First line.", "Second.", "Of f."]


class TestTokens:
    DOCUMENTS = ([1, 2, 3, 0], [4, 0], [5, 6, 7, 8, 9, 0])

    def test_written_tokens_are_read_back(self, tmp_path: Path) -> None:
        assert data.write_tokens(tmp_path / "text", self.DOCUMENTS, 1000) == 12
        assert data.read_tokens(tmp_path / "text").tolist() == [
            token for row in self.DOCUMENTS for token in row
        ]

    def test_files_that_do_not_belong_together(self, tmp_path: Path) -> None:
        data.write_tokens(tmp_path / "text", self.DOCUMENTS, 1000)
        with (tmp_path / "text.bin").open("ab") as file:
            file.write(b"xx")
        with pytest.raises(ValueError, match=r"text.bin has 26 bytes, .*text.idx says 24"):
            data.read_tokens(tmp_path / "text")
        (tmp_path / "text.idx").write_bytes(b"something else")
        with pytest.raises(ValueError, match=r"text\.idx is no index"):
            data.read_tokens(tmp_path / "text")

    def test_each_token_but_the_first_is_predicted_once(self, tmp_path: Path) -> None:
        data.write_tokens(tmp_path / "text", [list(range(12))], 1000)
        blocks = data.Blocks(tmp_path / "text", 5, 1000)
        assert [blocks[n].tolist() for n in range(len(blocks))] == [[0, 1, 2, 3, 4, 5], [5, 6, 7, 8, 9, 10]]

    def test_a_stream_goes_on_where_it_was_left(self, tmp_path: Path) -> None:
        data.write_tokens(tmp_path / "text", [list(range(101))], 1000)
        blocks = data.Blocks(tmp_path / "text", 10, 1000)
        full = blocks.batch(0, 25, seed=1)
        assert torch.equal(torch.cat([blocks.batch(0, 7, seed=1), blocks.batch(7, 18, seed=1)]), full)
        starts = full[:, 0].numpy()
        for around in (starts[:10], starts[10:20]):
            assert sorted(around) == list(range(0, 100, 10))
        assert not numpy.array_equal(starts[:10], starts[10:20])

    def test_a_text_that_does_not_fit_the_model(self, tmp_path: Path) -> None:
        data.write_tokens(tmp_path / "text", [list(range(12))], 1000)
        with pytest.raises(ValueError, match="has 12 tokens: a block needs 13"):
            data.Blocks(tmp_path / "text", 12, 1000)
        with pytest.raises(ValueError, match="has token 11: the model has a vocabulary of 11"):
            data.Blocks(tmp_path / "text", 5, 11)
