"""What a role saves comes back: bit for bit on the same ranks, and in any other layout, by us and by Megatron's own loader."""

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slime_ppo.config.ppo import PpoConfig
from slime_ppo.conversion.torch_dist_read import TorchDistReader
from slime_ppo.parallel.layout import ParallelLayout
from slime_ppo.parallel.worker_settings import BatchSettings, ExecutionSettings
from tests.dist.backends.cases import Case
from tests.dist.backends.conftest import CHECKPOINT_RANKS, CaseMaker
from tests.helpers.rank_pool import RankError, RankPool

ONE = ParallelLayout(1)
TP2, PP2 = ParallelLayout(2, tp_size=2), ParallelLayout(2, pp_size=2)
VPP2, TP2_PP2 = ParallelLayout(2, pp_size=2, vpp_size=2), ParallelLayout(4, tp_size=2, pp_size=2)
DP2_TP2, EP2 = ParallelLayout(4, tp_size=2), ParallelLayout(2, ep_size=2)
TP2_ETP2 = ParallelLayout(2, tp_size=2, etp_size=2)
OVERLAP = ExecutionSettings(overlap_grad_reduce=True, overlap_param_gather=True)
Run = Callable[..., Any]


@pytest.fixture
def run(megatron_pool: RankPool, tmp_path: Path) -> Run:
    """A function of checkpoint_ranks in a layout: what rank 0 answers."""

    def answer(function: str, case: Case, layout: ParallelLayout, **arguments: object) -> Any:
        on_ranks = case.on(layout, BatchSettings(3, None), tmp_path)
        return megatron_pool.run(f"{CHECKPOINT_RANKS}:{function}", world=layout.num_ranks, case=on_ranks, **arguments)[0]

    return answer


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, whole."""
    source = TorchDistReader(folder)
    source.check_whole()
    return {key: source.read_whole(key) for key in source.tensors}


def assert_same_contents(folder: Path, expected: Path) -> None:
    """The same names, shapes, types and bits."""
    found, other = stored(folder), stored(expected)
    assert found.keys() == other.keys()
    for key, tensor in other.items():
        assert found[key].dtype == tensor.dtype and torch.equal(found[key], tensor), key


def largest_gap(found: Mapping[str, Any], expected: Mapping[str, Any]) -> float:
    """Over all weights of all roles."""
    assert found.keys() == expected.keys()
    gaps = []
    for role, other in expected.items():
        assert found[role].weights.keys() == other.weights.keys()
        gaps += [np.abs(found[role].weights[name] - other.weights[name]).max() for name in other.weights]
    return float(max(gaps))


@pytest.mark.parametrize(
    ("tie", "layout", "changes"),
    [
        pytest.param(True, ONE, {}, id="one"),
        pytest.param(
            False,
            DP2_TP2,
            {"execution": OVERLAP},
            id="dp2_tp2-overlap",
        ),
        pytest.param(True, TP2_PP2, {"dtype": "bfloat16", "fp32_lm_head": True}, id="tp2_pp2-bf16"),
        pytest.param(False, VPP2, {"fuse_lm_head": True}, id="vpp2"),
    ],
)
def test_run_that_is_resumed_on_the_same_ranks_equals_one_that_never_stopped_bit_for_bit(
    run: Run, make_case: CaseMaker, tmp_path: Path, tie: bool, layout: ParallelLayout, changes: dict
) -> None:
    """Saved in the background, while the next steps change every number; with a reference, which a load leaves alone."""
    case = make_case(PpoConfig(kl_coef=0.1), tie=tie, **changes)
    straight = run("save_and_go_on", case, layout, folder=str(tmp_path / "saved"), in_background=True)
    resumed = run("load_and_go_on", case, layout, folder=str(tmp_path / "saved"), again=str(tmp_path / "again"))
    assert largest_gap(resumed, straight) == 0
    for role in ("actor", "critic"):
        assert (resumed[role].report.with_optimizer, resumed[role].report.restored_rng) == (True, True)
        assert_same_contents(tmp_path / "again" / role, tmp_path / "saved" / role)


def test_checkpoint_passes_through_layouts_without_a_changed_bit(run: Run, make_case: CaseMaker, tmp_path: Path) -> None:
    """TP2 -> PP2 -> TP2 PP2 -> one rank, and DP2 TP2 -> TP2; the vocabulary is padded to 128 rows, or to 192 with TP2 and 96 rows a
    rank. A following step is that of the first layout but for rounding."""
    for tie, chain in ((True, (TP2, PP2, TP2_PP2, ONE)), (False, (DP2_TP2, TP2))):
        case, first = make_case(PpoConfig(), tie=tie), tmp_path / f"{tie}-0"
        straight = run("save_and_go_on", case, chain[0], folder=str(first))
        for number, layout in enumerate(chain[1:], 1):
            before, after = tmp_path / f"{tie}-{number - 1}", tmp_path / f"{tie}-{number}"
            resumed = run("load_and_go_on", case, layout, folder=str(before), again=str(after))
            assert largest_gap(resumed, straight) <= 1e-2 * case.lr * 3
            assert not resumed["actor"].report.restored_rng
            for role in ("actor", "critic"):
                assert_same_contents(after / role, first / role)


def test_mixture_passes_from_one_rank_to_expert_parallel_ranks_and_on(run: Run, mixture_case: Case, tmp_path: Path) -> None:
    """With the optimizer, which Megatron's own loader can't: it has one Adam more where experts have ranks of their own."""
    names = ["actor"]
    straight = run("save_and_go_on", mixture_case, ONE, folder=str(tmp_path / "one"), names=names)
    folder = tmp_path / "one"
    for name, layout in (("ep2", EP2), ("tp2_etp2", TP2_ETP2)):
        resumed = run("load_and_go_on", mixture_case, layout, folder=str(folder), again=str(tmp_path / name), names=names)
        assert largest_gap(resumed, straight) <= 1e-2 * mixture_case.lr * 3
        folder = tmp_path / name
        assert_same_contents(folder / "actor", tmp_path / "one" / "actor")


def test_checkpoint_is_one_to_megatrons_own_loader(run: Run, make_case: CaseMaker, tmp_path: Path) -> None:
    """Asked strictly, with the optimizer, on the same ranks and on others. Not the optimizer of a bfloat16 critic, whose head is
    float32, which Megatron could not have saved either: README's sentence goes when this load does not raise any more."""
    case, names = make_case(PpoConfig()), ["actor"]
    straight = run("save_and_go_on", case, TP2, folder=str(tmp_path), names=names)
    for layout, tolerance in ((TP2, 0.0), (PP2, 1e-2 * case.lr * 3)):
        loaded = run("load_by_megatron", case, layout, folder=str(tmp_path / "actor"))
        assert largest_gap({"actor": loaded}, straight) <= tolerance
    mixed, folder = replace(case, dtype="bfloat16"), str(tmp_path / "mixed")
    assert run("refusal_by_megatron", mixed, ONE, folder=folder).startswith("The size of tensor a (64) must match")


def test_weights_alone_start_a_fresh_optimizer_and_change_their_type(run: Run, make_case: CaseMaker, tmp_path: Path) -> None:
    case = make_case(PpoConfig())
    run("save_and_go_on", case, TP2, folder=str(tmp_path), names=["actor"])
    saved = stored(tmp_path / "actor")["embedding.word_embeddings.weight"]
    for dtype in ("float32", "bfloat16"):
        weights, fresh = run("load_weights", replace(case, dtype=dtype), PP2, folder=str(tmp_path / "actor"))
        assert fresh
        expected = saved.to(getattr(torch, dtype)).float().numpy()
        assert np.array_equal(weights["model.embed_tokens.weight"], expected)


def test_random_states_come_back_on_an_equal_layout_and_kind_of_device(run: Run, make_case: CaseMaker, tmp_path: Path) -> None:
    found = run("rng_after_load", make_case(PpoConfig()), TP2, folder=str(tmp_path / "saved"))
    assert found == (True, [False, False])


def test_checkpoint_of_another_model_is_refused_with_every_difference_at_once(
    run: Run, make_case: CaseMaker, tmp_path: Path
) -> None:
    case = make_case(PpoConfig(), tie=False)
    run("save_and_go_on", case, ONE, folder=str(tmp_path))
    [message] = run("refusals", case, TP2, folders=[str(tmp_path / "actor")], name="critic")
    assert message.startswith(f"{tmp_path}/actor does not hold this model: of another shape or type: ")
    assert "output_layer.weight is torch.float32 [100, 64], expected torch.float32 [1, 64]" in message
    assert "optimizer.state.exp_avg.output_layer.weight is torch.float32 [100, 64]" in message
    assert message.count("expected torch") == 4 and "unexpected" not in message
    [message] = run("refusals", case, PP2, folders=[str(tmp_path / "critic")], name="actor", with_optimizer=False)
    assert message.count("expected torch") == 1
    [tied] = run("refusals", make_case(PpoConfig(), tie=True), PP2, folders=[str(tmp_path / "actor")], name="actor")
    names = ("optimizer.state.exp_avg", "optimizer.state.exp_avg_sq", "optimizer.state.param")
    unexpected = ", ".join(f"{name}.output_layer.weight" for name in names) + ", output_layer.weight"
    assert tied == f"{tmp_path}/actor does not hold this model: unexpected: {unexpected}. Load a checkpoint of the same model"
    [narrow] = run("refusals", replace(case, dtype="bfloat16"), ONE, folders=[str(tmp_path / "actor")], name="actor")
    assert "decoder.final_layernorm.weight is torch.float32 [64], expected torch.bfloat16 [64]" in narrow


def test_broken_checkpoint_is_refused_by_the_name_of_its_file(run: Run, make_case: CaseMaker, tmp_path: Path) -> None:
    """On both ranks of two, with the words of the one that needs the file, and before anything is changed."""
    case = make_case(PpoConfig())
    run("save_and_go_on", case, TP2, folder=str(tmp_path / "whole"), names=["actor"])
    data = tmp_path / "whole" / "actor" / "__1_0.distcp"
    size = data.stat().st_size
    damages: dict[str, tuple[str, Callable[[Path], object], str]] = {
        "lost": (data.name, Path.unlink, "__1_0.distcp: No such file or directory"),
        "cut": (
            data.name,
            lambda path: os.truncate(path, size // 2),
            f"has {size // 2:,} bytes, expected {size:,} or more",
        ),
        "no index": (".metadata", Path.unlink, "is no torch_dist checkpoint: it has no .metadata"),
        "cut index": (".metadata", lambda path: os.truncate(path, 100), ".metadata cannot be read"),
        "no common": ("common.pt", Path.unlink, "common.pt is missing"),
        "cut common": ("common.pt", lambda path: os.truncate(path, 100), "common.pt cannot be read"),
    }
    for name, (file, damage, _) in damages.items():
        shutil.copytree(tmp_path / "whole" / "actor", tmp_path / name)
        damage(tmp_path / name / file)
    found = run("refusals", case, TP2, folders=[str(tmp_path / name) for name in damages], name="actor")
    for message, (name, (_, _, part)) in zip(found, damages.items(), strict=True):
        assert message.startswith(str(tmp_path / name)) and part in message


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, with room for a part of a checkpoint."""
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], check=True)
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_save_that_fails_says_why_on_all_ranks_which_go_on(
    run: Run, make_case: CaseMaker, tmp_path: Path, small_disk: Path
) -> None:
    case, good = make_case(PpoConfig()), [tmp_path / name for name in ("first", "second")]
    for problem in run("failed_save", case, TP2, folder=str(small_disk), again=str(good[0])):
        assert problem == f"writing the checkpoint {problem.split()[3]} failed: [Errno 28] No space left on device"
        assert problem.split()[3].startswith(str(small_disk))
    taken = [tmp_path / "taken" / name for name in ("False", "True")]
    for folder in taken:
        folder.mkdir(parents=True)
        (folder / "thesis.txt").touch()
    problems = run("failed_save", case, TP2, folder=str(tmp_path / "taken"), again=str(good[1]))
    for folder, problem in zip(taken, problems, strict=True):
        assert problem.startswith(f"{folder} holds thesis.txt already, expected a new or empty folder")
    assert_same_contents(good[1], good[0])


@pytest.mark.parametrize("layout", [ParallelLayout(2), TP2, PP2], ids=["dp2", "tp2", "pp2"])
def test_value_head_starts_the_same_on_every_replica_and_in_every_layout(
    megatron_pool: RankPool, run: Run, make_case: CaseMaker, tmp_path: Path, layout: ParallelLayout
) -> None:
    case = make_case(PpoConfig(), init_value_head="normal")
    case = replace(case, critic_folder=case.actor_folder)
    on_ranks = case.on(layout, BatchSettings(3, None), tmp_path)
    heads = [weights["score.weight"] for weights, _ in megatron_pool.run(f"{CHECKPOINT_RANKS}:start", world=2, case=on_ranks)]
    drawn = 0.5 * torch.randn(1, 64, generator=torch.Generator().manual_seed(1))
    assert all(np.array_equal(head, drawn.numpy()) for head in heads)


def test_critic_starts_from_a_critics_checkpoint_or_with_a_head_of_its_own_from_a_policys(
    run: Run, make_case: CaseMaker, tmp_path: Path
) -> None:
    case = make_case(PpoConfig(), tie=False)
    run("save_and_go_on", case, TP2, folder=str(tmp_path))
    critic, actor = (stored(tmp_path / role) for role in ("critic", "actor"))
    embedding = "embedding.word_embeddings.weight"
    for start in (None, "normal"):
        one = replace(case, critic_checkpoint=str(tmp_path / "critic"), init_value_head=start)
        weights, _ = run("start", one, PP2)
        assert np.array_equal(weights["score.weight"], critic["output_layer.weight"].numpy())
        assert np.array_equal(weights["model.embed_tokens.weight"], critic[embedding].numpy())
    policy = replace(case, critic_checkpoint=str(tmp_path / "actor"))
    weights, _ = run("start", policy, PP2)
    assert not weights["score.weight"].any()
    assert np.array_equal(weights["model.embed_tokens.weight"], actor[embedding].numpy())
    with pytest.raises(RankError, match=r"output_layer.weight is torch.float32 \[100, 64\], expected torch.float32 \[1, 64\]"):
        run("start", replace(policy, init_value_head=None), PP2)
