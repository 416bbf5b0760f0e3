"""Fusing and splitting of parameters against hand-made ones, by family; tests/sglang compares with a real server."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from slime_ppo.config.model_shape import ModelShape
from slime_ppo.errors import WeightSyncError
from slime_ppo.rollout.sglang.checksums import ExpectedChecksums, compare_checksums
from slime_ppo.rollout.sglang.tensor_hash import tensor_hash
from slime_ppo.weight_sync.bucket import TensorSpec, dtype_name, pack_bucket, plan_buckets
from tests.helpers.engine_harness import folder_tensors
from tests.helpers.tiny_family import make_tiny_family

Tensors = dict[str, torch.Tensor]
FamilyMaker = Callable[[str], tuple[Tensors, ModelShape]]
LAYER = "model.layers.1."
HASH = tensor_hash("cuda")


def expected(
    tensors: Tensors, shape: ModelShape, *, tp_size: int, device: Any = "cuda", bucket_bytes: int = 9000
) -> ExpectedChecksums:
    specs = [TensorSpec(name, tuple(tensor.shape), dtype_name(tensor.dtype)) for name, tensor in tensors.items()]
    checksums = ExpectedChecksums(shape, tp_size=tp_size, device=device)
    for bucket in reversed(plan_buckets(specs, bucket_bytes)):
        checksums.add(bucket, pack_bucket(bucket, tensors))
    return checksums


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> FamilyMaker:
    def make(name: str) -> tuple[Tensors, ModelShape]:
        folder = make_tiny_family(tmp_path_factory.mktemp(name), name, tie=False, seed=0)
        return folder_tensors(folder), ModelShape.from_hf_folder(folder)

    return make


def hashed(tensor: torch.Tensor) -> str:
    return HASH(tensor.contiguous().numpy())


def test_dense_parameters_of_two_ranks(family: FamilyMaker) -> None:
    """4 heads of 16, 2 key-value heads, 100 tokens: padded to 128 rows, 64 on each rank."""
    tensors, shape = family("qwen2")
    found = expected(tensors, shape, tp_size=2)
    assert found.incomplete == []
    assert len(found.ranks[0]) == len(found.ranks[1]) == 2 * 7 + 3
    attention, mlp = LAYER + "self_attn.", LAYER + "mlp."
    for rank, checksums in enumerate(found.ranks):
        own, kv = slice(32 * rank, 32 * (rank + 1)), slice(16 * rank, 16 * (rank + 1))
        parts = {"q_proj": own, "k_proj": kv, "v_proj": kv}
        for kind in ("weight", "bias"):
            fused = torch.cat([tensors[f"{attention}{name}.{kind}"][rows] for name, rows in parts.items()])
            assert checksums[f"{attention}qkv_proj.{kind}"] == hashed(fused)
        assert checksums[attention + "o_proj.weight"] == hashed(tensors[attention + "o_proj.weight"][:, own])
        ffn = slice(64 * rank, 64 * (rank + 1))
        fused = torch.cat([tensors[f"{mlp}{name}_proj.weight"][ffn] for name in ("gate", "up")])
        assert checksums[mlp + "gate_up_proj.weight"] == hashed(fused)
        assert checksums[mlp + "down_proj.weight"] == hashed(tensors[mlp + "down_proj.weight"][:, ffn])
        assert checksums["model.norm.weight"] == hashed(tensors["model.norm.weight"])
        rows = torch.cat((tensors["lm_head.weight"], torch.zeros(28, 64)))[64 * rank : 64 * (rank + 1)]
        assert checksums["lm_head.weight"] == hashed(rows)


def test_experts_of_two_ranks_are_stacked_and_on_a_cpu_filled_up_to_32_rows(
    family: FamilyMaker,
) -> None:
    """8 experts of 32 rows."""
    tensors, shape = family("qwen3_moe")
    experts = LAYER + "mlp.experts."

    def stacked(part: str, axis: int, rank: int, rows: int) -> torch.Tensor:
        wholes = torch.stack([tensors[f"{experts}{expert}.{part}_proj.weight"] for expert in range(8)])
        filled = torch.zeros([64 if at == axis else size for at, size in enumerate(wholes.shape)])
        filled.narrow(axis, 0, 32).copy_(wholes)
        return filled.narrow(axis, rank * rows, rows)

    for device, rows in (("cuda", 16), ("cpu", 32)):
        found = expected(tensors, shape, tp_size=2, device=device, bucket_bytes=3000)
        for rank, checksums in enumerate(found.ranks):
            up = torch.cat([stacked("gate", 1, rank, rows), stacked("up", 1, rank, rows)], 1)
            down = stacked("down", 2, rank, rows)
            wanted = tensor_hash(device)  # type: ignore[arg-type]
            assert checksums[experts + "w13_weight"] == wanted(up.contiguous().numpy())
            assert checksums[experts + "w2_weight"] == wanted(down.contiguous().numpy())
            assert checksums[LAYER + "mlp.gate.weight"] == wanted(tensors[LAYER + "mlp.gate.weight"].numpy())


def test_key_value_heads_fewer_than_ranks_lie_on_several_of_them(family: FamilyMaker) -> None:
    """2 key-value heads of 32 on 4 ranks; a server on a CPU would add heads instead, which is refused."""
    tensors, shape = family("qwen3")
    found = expected(tensors, shape, tp_size=4)
    prefix = LAYER + "self_attn."
    for rank, checksums in enumerate(found.ranks):
        kv = slice(32 * (rank // 2), 32 * (rank // 2 + 1))
        parts = {"q_proj": slice(32 * rank, 32 * (rank + 1)), "k_proj": kv, "v_proj": kv}
        fused = torch.cat([tensors[f"{prefix}{name}.weight"][rows] for name, rows in parts.items()])
        assert checksums[prefix + "qkv_proj.weight"] == hashed(fused)
    with pytest.raises(WeightSyncError, match="4 ranks adds heads to a model of 4 heads and 2 key-value heads"):
        ExpectedChecksums(shape, tp_size=4, device="cpu")


def test_vocabulary_that_steps_of_64_rows_do_not_divide_takes_64_per_rank(family: FamilyMaker) -> None:
    _, shape = family("llama")
    tensors = {"model.embed_tokens.weight": torch.randn(100, 2)}
    found = expected(tensors, shape, tp_size=3)
    padded = torch.cat((tensors["model.embed_tokens.weight"], torch.zeros(92, 2)))
    assert [checksums["model.embed_tokens.weight"] for checksums in found.ranks] == [hashed(rows) for rows in padded.split(64)]


def test_weights_of_two_bytes_are_hashed_as_they_are(family: FamilyMaker) -> None:
    _, shape = family("llama")
    norm = torch.randn(64).bfloat16()
    found = expected({"model.norm.weight": norm}, shape, tp_size=1, device="cpu")
    assert found.ranks[0]["model.norm.weight"] == tensor_hash("cpu")(norm.view(torch.int16).numpy())


def answer(rank: int, checksums: Mapping[str, str]) -> dict[str, Any]:
    return {"checksums": dict(checksums), "parallelism_info": [{"tp_rank": rank}]}


def test_compare_names_what_differs_is_missing_or_is_reached_by_no_push(family: FamilyMaker, tmp_path: Path) -> None:
    tensors, shape = family("llama")
    found = expected(tensors, shape, tp_size=2)
    ranks = [answer(1, found.ranks[1]), answer(0, found.ranks[0])]
    compare_checksums(found, ranks, server="http://a")
    ranks[0]["checksums"]["model.norm.weight"] = "0" * 16
    del ranks[1]["checksums"]["lm_head.weight"]
    ranks[1]["checksums"]["model.visual.weight"] = "1"
    with pytest.raises(WeightSyncError, match="http://a does not hold the trainer's weights") as failure:
        compare_checksums(found, ranks, server="http://a")
    assert str(failure.value).splitlines()[1:] == [
        "  rank 1: model.norm.weight differs",
        "  rank 0 has no lm_head.weight",
        "  rank 0: no push reaches model.visual.weight",
    ]
    with pytest.raises(WeightSyncError, match="1 ranks answered, expected 2"):
        compare_checksums(found, [answer(0, found.ranks[0])], server="http://a")
    del tensors[LAYER + "self_attn.k_proj.weight"]
    incomplete = expected(tensors, shape, tp_size=1)
    with pytest.raises(WeightSyncError, match=f"not all parts of {LAYER}self_attn.qkv_proj.weight were pushed"):
        compare_checksums(incomplete, [answer(0, incomplete.ranks[0])], server="http://a")
