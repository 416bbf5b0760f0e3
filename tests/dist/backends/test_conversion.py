"""The converters against real ranks: a Hugging Face folder goes through torch_dist and the ranks of a layout, and comes back."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from slime_ppo.config.ppo import PpoConfig
from slime_ppo.conversion.convert import plan_hf, plan_torch_dist, write_hf_folder, write_torch_dist_folder
from slime_ppo.conversion.hf_io import HfWeights
from slime_ppo.parallel.layout import ParallelLayout
from slime_ppo.parallel.worker_settings import BatchSettings
from tests.dist.backends.cases import Case
from tests.helpers.rank_pool import RankPool
from tests.helpers.tiny_family import make_tiny_family
from tests.helpers.tiny_llama import make_tiny_llama
from tests.helpers.tiny_reward_model import make_reward_model

RANKS = "tests.dist.backends.conversion_ranks"
LAYOUTS = {
    "one": ParallelLayout(1),
    "tp2": ParallelLayout(2, tp_size=2),
    "tp4": ParallelLayout(4, tp_size=4),
    "pp4": ParallelLayout(4, pp_size=4),
    "tp2 pp2": ParallelLayout(4, tp_size=2, pp_size=2),
    "pp2 vpp2": ParallelLayout(2, pp_size=2, vpp_size=2),
    "ep2": ParallelLayout(2, ep_size=2),
    "ep4": ParallelLayout(4, ep_size=4),
    "tp2 ep2": ParallelLayout(2, tp_size=2, ep_size=2),
}


def _model(folder: Path, family: str, *, tie: bool, dtype: torch.dtype, seed: int) -> Path:
    """A policy; a wide Llama has as many heads as four tensor-parallel ranks need."""
    if family == "wide llama":
        make_tiny_llama(folder, layers=4, kv_heads=4, tie=tie, seed=seed)
    else:
        make_tiny_family(folder, family, tie=tie, seed=seed)
    if dtype != torch.float32:
        tensors = {name: tensor.to(dtype) for name, tensor in load_file(folder / "model.safetensors").items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("family", "layout", "loader", "tie", "dtype"),
    [
        ("wide llama", "tp4", "megatron", True, torch.float32),
        ("wide llama", "tp4", "ours", False, torch.bfloat16),
        ("wide llama", "pp4", "megatron", True, torch.bfloat16),
        ("wide llama", "tp2 pp2", "megatron", False, torch.float32),
        ("wide llama", "pp2 vpp2", "megatron", False, torch.float32),
        ("llama3", "tp2", "ours", False, torch.float32),
        ("mistral", "tp2", "megatron", True, torch.float32),
        ("qwen2", "tp2 pp2", "ours", True, torch.bfloat16),
        ("qwen3", "tp2", "megatron", False, torch.bfloat16),
        ("qwen3_moe", "one", "megatron", False, torch.float32),
        ("qwen3_moe", "ep2", "megatron, stacked layers", True, torch.float32),
        ("qwen3_moe", "ep4", "megatron", False, torch.bfloat16),
        ("qwen3_moe", "tp2 ep2", "ours", False, torch.float32),
    ],
)
def test_folder_through_torch_dist_and_ranks_comes_back_bit_for_bit(
    megatron_pool: RankPool, tmp_path: Path, *, family: str, layout: str, loader: str, tie: bool, dtype: torch.dtype
) -> None:
    """Ranks start from other models, load what the converter has written, by our loader or by Megatron's own, and save; what is
    made of that is the first folder, with the vocabulary of 100 that no layout divides without padding."""
    folders = {"actor": _model(tmp_path / "policy", family, tie=tie, dtype=dtype, seed=1)}
    folders["critic"] = make_reward_model(folders["actor"], tmp_path / "reward", seed=2)
    for name, folder in folders.items():
        plan = plan_torch_dist(folder, dtype=None, make_vocab_size_divisible_by=64 if family == "qwen2" else 1)
        write_torch_dist_folder(plan, tmp_path / "converted" / name, lambda _: None)
        (tmp_path / "saved" / name).mkdir(parents=True)
    other = str(_model(tmp_path / "other", family, tie=tie, dtype=dtype, seed=3))
    case = Case(other, other, None, PpoConfig(), dtype=str(dtype).removeprefix("torch."))
    case = case.on(LAYOUTS[layout], BatchSettings(1, None), tmp_path)
    source, out = str(tmp_path / "converted"), str(tmp_path / "saved")
    megatron_pool.run(f"{RANKS}:load_and_save", world=case.layout.num_ranks, case=case, source=source, out=out, loader=loader)
    for name, folder in folders.items():
        plan_back = plan_hf(tmp_path / "saved" / name, companion=folder, dtype=dtype, max_file_bytes=10**6)
        write_hf_folder(plan_back, tmp_path / "back" / name, lambda _: None)
        expected, found = HfWeights(folder), HfWeights(tmp_path / "back" / name)
        assert set(found) == set(expected) - ({"lm_head.weight"} if tie else set())
        assert [one for one in found if found[one].dtype != dtype or not torch.equal(found[one], expected[one])] == []
