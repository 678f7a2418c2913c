"""`transform` writes the files that the framework saves in those sizes, and the framework trains on from
them.

The framework's own way to other sizes is its format `torch_dist`, from which it saves in the format `torch`.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from adaptor.__main__ import main
from adaptor.protocol import naming
from tests.faults import harness, outcome, same
from tests.faults.harness import EXPERTS, Job, Layout

_RESHARDABLE = ("--ckpt-format", "torch_dist", "--dist-ckpt-optim-fully-reshardable")
_GATED = (
    *("--num-layers", "4", "--swiglu", "--group-query-attention", "--num-query-groups", "2"),
    *("--position-embedding-type", "rope"),
)
_NO_DROPOUT = ("--hidden-dropout", "0", "--attention-dropout", "0")
STEP = 4
# Arguments that say which job has saved.
_OF_THE_JOB = (
    "ckpt_convert_save",
    "data_parallel_size",
    "local_rank",
    "rank",
    "world_size",
    "inprocess_active",
)

TP2 = Layout("tp2", 2, tp=2, extra=(*_GATED, *_RESHARDABLE))
PP2_VPP2 = Layout("pp2-vpp2", 2, pp=2, extra=(*TP2.extra, "--num-layers-per-virtual-pipeline-stage", "1"))
PP2_UNEVEN = Layout("pp2-uneven", 2, pp=2, extra=(*TP2.extra, "--decoder-first-pipeline-num-layers", "1"))
# `mirror`: without the instances of the optimizer that the reference of `split` has.
EP2 = Layout("ep2", 2, replica="mirror", extra=(*EXPERTS, "--expert-model-parallel-size", "2", *_RESHARDABLE))
# Kinds of the optimizer's state in the format `torch_dist`.
_BEFORE_014 = "--dist-ckpt-save-pre-mcore-014"
KINDS = {
    "dp_reshardable": (),
    "fully_sharded_model_space": (_BEFORE_014,),
    "dp_zero_gather_scatter": (_BEFORE_014, "--no-ckpt-fully-parallel-save"),
}
EP2_PP2 = replace(EP2, name="ep2-pp2", processes=4, pp=2)
TP2_ETP2 = replace(
    EP2,
    name="tp2-ep2-etp2",
    processes=4,
    tp=2,
    extra=(*EP2.extra, "--swiglu", "--sequence-parallel"),
)
TP2_ETP1 = replace(
    TP2_ETP2,
    name="tp2-ep2-etp1",
    processes=2,
    replica="none",
    extra=(*TP2_ETP2.extra, "--expert-tensor-parallel-size", "1"),
)
TP1_EP2 = replace(EP2, name="tp1-ep2", extra=TP2_ETP2.extra[:-1])


def _train(tmp_path: Path, name: str, layout: Layout, *arguments: str, **job_options: Any) -> harness.Ended:
    all_options: dict[str, Any] = {"launcher": "torchrun", **job_options}
    return harness.run(Job(tmp_path / name, layout, arguments=arguments, **all_options), code=0)


def _converted(tmp_path: Path, layout: Layout, load: Path, *arguments: str) -> Path:
    """The framework loads in the sizes of `layout`, and saves in the format `torch`."""
    save = tmp_path / f"framework-{layout.name}"
    options = ("--ckpt-convert-format", "torch", "--ckpt-convert-save", str(save))
    _train(tmp_path, f"convert-{layout.name}", layout, *options, *arguments, load=load)
    return save / "torch"


def _differences(transformed: Path, expected: Path) -> list[str]:
    differences = same.differences(*(root / f"iter_{STEP:07d}" for root in (transformed, expected)))
    names = tuple(f"args./{name}" for name in _OF_THE_JOB)
    return [
        line for line in differences if "rng_state" not in line and not any(name in line for name in names)
    ]


def _content(transformed: Path, expected: Path) -> list[str]:
    """Return the differences apart from arguments that describe the saving job."""
    return [line for line in _differences(transformed, expected) if "/model_optim_rng.pt/args." not in line]


def _transform(source: Path, target: Path, *options: str) -> Path:
    assert main(["transform", str(source), str(target), "--verify", *options]) == 0
    return target


def test_tensor_ranks_become_an_interleaved_pipeline(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    _train(tmp_path, "train", TP2, "--exit-interval", str(STEP), save=saved, launcher="ttprun")
    source, expected = (_converted(tmp_path, layout, saved) for layout in (TP2, PP2_VPP2))
    by_rules = _transform(source, tmp_path / "by-rules", "--tp", "1", "--pp", "2", "--vpp", "2")
    assert _differences(by_rules, expected) == []
    # The framework's own conversion has no layout file; it is of the same model, in the same sizes.
    shutil.copy(saved / f"iter_{STEP:07d}" / naming.LAYOUT, source / f"iter_{STEP:07d}")
    transformed = _transform(source, tmp_path / "ours", "--tp", "1", "--pp", "2", "--vpp", "2", "--dp", "1")
    assert _differences(transformed, expected) == []
    uneven = _converted(tmp_path, PP2_UNEVEN, saved)
    target = tmp_path / "target.json.gz"
    only = {"launcher": "ttprun", "save": tmp_path / "none", "options": ("--ttp-layout-only", str(target))}
    _train(tmp_path, "layout", PP2_UNEVEN, **only)
    assert _differences(_transform(transformed, tmp_path / "uneven", "--layout", str(target)), uneven) == []
    # From the format `torch_dist` in one go, and back to it.
    assert (
        _content(_transform(saved, tmp_path / "one-go", "--tp", "1", "--pp", "2", "--vpp", "2"), expected)
        == []
    )
    sharded = _transform(
        transformed, tmp_path / "sharded", "--tp", "2", "--pp", "1", "--format", "torch_dist"
    )
    # Random states are not carried over by the framework, so there is no dropout.
    as_torch = replace(PP2_VPP2, extra=PP2_VPP2.extra[: len(_GATED)] + PP2_VPP2.extra[-2:])
    from_transformed = _train(tmp_path, "mine", as_torch, *_NO_DROPOUT, load=transformed)
    theirs = _train(tmp_path, "theirs", PP2_VPP2, *_NO_DROPOUT, load=saved)
    back = _train(tmp_path, "back", PP2_VPP2, *_NO_DROPOUT, load=sharded)
    for run in (from_transformed, back):
        outcome.assert_same_training(run, theirs.records, steps=range(STEP + 1, harness.ITERATIONS + 1))
    # Without the optimizer, as the framework saves it, and the first loss that it finds with the weights.
    options = ("--tp", "1", "--pp", "2", "--vpp", "2", "--weights-only")
    weights = _transform(saved, tmp_path / "weights", *options)
    without = _converted(tmp_path / "no-optim", PP2_VPP2, saved, "--no-save-optim", "--no-load-optim")
    assert _content(weights, without) == []
    for name, layout, format_options in (
        ("torch", as_torch, ()),
        ("torch_dist", PP2_VPP2, ("--format", "torch_dist")),
    ):
        load = _transform(saved, tmp_path / f"weights-{name}", *options, *format_options)
        only = (*_NO_DROPOUT, "--no-load-optim", "--exit-interval", str(STEP + 1))
        result = _train(tmp_path, f"from-weights-{name}", layout, *only, load=load)
        firsts = [
            {rank: lines[0]["losses"] for rank, lines in run.records.items()} for run in (result, theirs)
        ]
        assert firsts[0] == firsts[1]


def test_each_kind_of_optimizer_state_in_the_sharded_format(tmp_path: Path) -> None:
    """The framework itself cannot load two of them in other sizes."""
    transformed = []
    for kind, options in KINDS.items():
        layout = Layout("dp2", 2, replica="mirror", extra=(*_GATED, "--ckpt-format", "torch_dist", *options))
        saved = tmp_path / f"{kind}-saved"
        _train(tmp_path, kind, layout, "--exit-interval", str(STEP), save=saved, launcher="ttprun")
        transformed.append(_transform(saved, tmp_path / f"{kind}-ours", "--tp", "1"))
        if kind == "dp_reshardable":
            expected = _converted(tmp_path, layout, saved)
    assert [_content(folder, expected) for folder in transformed] == [[], [], []]


def test_a_tied_embedding_gets_a_second_copy_and_loses_it(tmp_path: Path) -> None:
    """There and back through two stages; padded rows of both copies equal those of the source."""
    saved = tmp_path / "saved"
    tp2 = Layout("tied-tp2", 2, tp=2, extra=_RESHARDABLE)
    pp2 = Layout("tied-pp2", 2, pp=2, extra=_RESHARDABLE)
    _train(tmp_path, "train", tp2, "--exit-interval", str(STEP), save=saved)
    source, expected = (_converted(tmp_path, layout, saved) for layout in (tp2, pp2))
    two_stages = _transform(source, tmp_path / "ours", "--tp", "1", "--pp", "2")
    assert _differences(two_stages, expected) == []
    one_stage = _transform(source, tmp_path / "one", "--tp", "1")
    assert _differences(_transform(two_stages, tmp_path / "back", "--pp", "1"), one_stage) == []


def test_experts(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    _train(tmp_path, "train", EP2, "--exit-interval", str(STEP), save=saved)
    source, expected = (_converted(tmp_path, layout, saved) for layout in (EP2, EP2_PP2))
    transformed = _transform(source, tmp_path / "ours", "--pp", "2")
    assert _differences(transformed, expected) == []


def test_experts_that_are_cut_in_another_way_than_all_else(tmp_path: Path) -> None:
    """Between one and two tensor ranks of experts; the framework's own conversions have no layout file."""
    saved = tmp_path / "saved"
    _train(tmp_path, "train", TP2_ETP1, "--exit-interval", str(STEP), save=saved, launcher="ttprun")
    source, uncut, cut = (_converted(tmp_path, layout, saved) for layout in (TP2_ETP1, TP1_EP2, TP2_ETP2))
    transformed = _transform(saved, tmp_path / "cut", "--etp", "2", "--dp", "2")
    assert _content(transformed, cut) == []
    assert _content(_transform(saved, tmp_path / "whole", "--tp", "1"), uncut) == []
    assert _content(_transform(transformed, tmp_path / "back", "--etp", "1", "--dp", "1"), source) == []
    assert _content(_transform(tmp_path / "back", tmp_path / "forth", "--etp", "2", "--dp", "2"), cut) == []
    sharded = _transform(
        transformed, tmp_path / "sharded", "--etp", "1", "--dp", "1", "--format", "torch_dist"
    )
    converted_back = _converted(tmp_path / "again", TP2_ETP1, sharded)
    assert _content(converted_back, source) == []
    # The state by buckets, which are named after the ranks that share experts.
    buckets = replace(
        TP2_ETP1, extra=tuple(option for option in TP2_ETP1.extra if option != _RESHARDABLE[-1])
    )
    saved = tmp_path / "buckets"
    _train(tmp_path, "by-buckets", buckets, "--exit-interval", str(STEP), save=saved, launcher="ttprun")
    assert _content(_transform(saved, tmp_path / "from-buckets", "--dp", "1"), source) == []
