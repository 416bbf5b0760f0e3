"""Every model family against transformers on the same folder, and its way back; a new family adds a line to TINY_FAMILIES."""

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from slime_ppo.config.ppo import PpoConfig
from slime_ppo.conversion.families import FAMILIES
from slime_ppo.parallel.layout import ParallelLayout
from slime_ppo.parallel.worker_settings import BatchSettings
from slime_ppo.rollout.embedded.engine import EmbeddedEngine
from slime_ppo.types.sample import GenerateRequest, SamplingParams
from slime_ppo.weight_sync.bucket import TensorSpec, pack_bucket, plan_buckets
from tests.dist.backends.cases import RANKS, Case, make_batch, make_plan
from tests.dist.backends.compare import gradient_error, relative
from tests.dist.backends.models import hf_rows
from tests.helpers.rank_pool import RankPool
from tests.helpers.tiny_family import TINY_FAMILIES, make_tiny_family

if TYPE_CHECKING:
    from tests.dist.backends.ranks import Report

LAYOUTS = {
    "one_rank": ParallelLayout(1),
    "tp2": ParallelLayout(2, tp_size=2, etp_size=2),
    "pp2": ParallelLayout(2, pp_size=2),
    "cp2": ParallelLayout(2, cp_size=2),
}
ALL = BatchSettings(100, None)
BUCKET_BYTES = 20_000
Folders = dict[tuple[str, bool], tuple[Path, Path]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """(policy, critic with a value head) by family and whether the embeddings are tied."""
    made: Folders = {}
    for family in TINY_FAMILIES:
        for tie in (True, False):
            root = tmp_path_factory.mktemp(family)
            policy = make_tiny_family(root / "policy", family, tie=tie, seed=0)
            critic = make_tiny_family(root / "critic", family, tie=tie, seed=1)
            weights = load_file(critic / "model.safetensors")
            weights["score.weight"] = 0.2 * np.random.default_rng(4).standard_normal((1, 64)).astype(np.float32)
            save_file(weights, critic / "model.safetensors", metadata={"format": "pt"})
            made[family, tie] = (policy, critic)
    return made


@cache
def _transformers(policy: str, critic: str) -> tuple[np.ndarray, np.ndarray]:
    """(logits, values) of `make_batch`; all layouts are compared with them."""
    head = load_file(Path(critic) / "model.safetensors")["score.weight"]
    return hf_rows(policy, make_batch(), hidden=False).numpy(), hf_rows(critic, make_batch(), hidden=True).numpy() @ head[0]


def _case(folders: Folders, family: str, tie: bool, layout: str, folder: Path) -> Case:
    policy, critic = folders[family, tie]
    return Case(str(policy), str(critic), None, PpoConfig()).on(LAYOUTS[layout], ALL, folder)


@pytest.mark.parametrize("layout", list(LAYOUTS))
@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", list(TINY_FAMILIES))
def test_model_equals_transformers_and_goes_back_into_files(
    megatron_pool: RankPool, folders: Folders, tmp_path: Path, *, family: str, tie: bool, layout: str
) -> None:
    """Logits of a padded vocabulary and a critic's values to 1e-5; exported tensors bit for bit."""
    case, batch = _case(folders, family, tie, layout, tmp_path), make_batch()
    reports = megatron_pool.run(
        f"{RANKS}:logits_values_and_export", world=case.layout.num_ranks, case=case, batch=batch, bucket_bytes=BUCKET_BYTES
    )
    expected_logits, expected_values = _transformers(case.actor_folder, case.critic_folder)
    assert min(np.abs(expected_logits).max(), np.abs(expected_values).max()) > 0.5
    source = load_file(Path(case.actor_folder) / "model.safetensors")
    for logits, values, exported in reports:
        assert float(np.abs(logits - expected_logits).max()) <= 1e-5
        assert float(np.abs(values - expected_values).max()) <= 1e-5
        assert sorted(exported) == sorted(source)
        assert all(np.array_equal(exported[name], tensor) and exported[name].dtype == "float32" for name, tensor in source.items())


@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", list(TINY_FAMILIES))
def test_exported_tensors_turn_an_engine_of_other_weights_into_the_policy(
    megatron_pool: RankPool, folders: Folders, tmp_path: Path, *, family: str, tie: bool
) -> None:
    """It then has transformers' log-probs of the trainer's folder. One layout: the export is that of any other, bit for bit."""
    case = _case(folders, family, tie, "one_rank", tmp_path)
    ((buckets, _),) = megatron_pool.run(f"{RANKS}:export", world=1, case=case, bucket_bytes=BUCKET_BYTES)
    engine = EmbeddedEngine(make_tiny_family(tmp_path / "other", family, tie=tie, seed=9))
    _push(engine, {name: tensor for bucket in buckets for name, tensor in bucket.items()})
    (result,) = engine.generate([GenerateRequest(0, np.array([5, 9, 40], np.int32), 1, SamplingParams(max_new_tokens=8))])
    assert relative(result.log_probs, _hf_log_probs(case.actor_folder, [5, 9, 40], result.response_ids)) <= 1e-5


def _push(engine: EmbeddedEngine, tensors: dict[str, np.ndarray]) -> None:
    manifest = tuple(TensorSpec(name, tensor.shape, "float32") for name, tensor in tensors.items())
    engine.begin_update(manifest, 1, bucket_bytes=BUCKET_BYTES)
    for bucket in plan_buckets(manifest, BUCKET_BYTES):
        engine.load_bucket(bucket.index, pack_bucket(bucket, {name: torch.tensor(tensor) for name, tensor in tensors.items()}))
    engine.end_update()


@torch.no_grad()
def _hf_log_probs(folder: str, prompt: list[int], response: np.ndarray) -> np.ndarray:
    ids = torch.tensor([*prompt, *response])
    logits = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids[None]).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(response).long()[:, None])[:, 0].numpy()


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "mistral"])
def test_saved_folders_load_in_transformers_for_both_roles(
    megatron_pool: RankPool, folders: Folders, tmp_path: Path, *, family: str
) -> None:
    case = _case(folders, family, True, "tp2", tmp_path)
    saved = {role: str(tmp_path / role) for role in ("actor", "critic")}
    megatron_pool.run(f"{RANKS}:save", world=2, case=case, folders=saved, bucket_bytes=BUCKET_BYTES)
    batch = make_batch()
    assert torch.equal(hf_rows(saved["actor"], batch, hidden=False), hf_rows(case.actor_folder, batch, hidden=False))
    critic, loading = AutoModelForSequenceClassification.from_pretrained(saved["critic"], output_loading_info=True)
    assert type(critic).__name__ == FAMILIES[TINY_FAMILIES[family][0]].value_architecture
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    source = load_file(Path(case.critic_folder) / "model.safetensors")
    assert all(np.array_equal(tensor.numpy(), source[name]) for name, tensor in critic.state_dict().items())


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_iteration_with_tensor_and_data_parallel_ranks_equals_one_rank(
    megatron_pool: RankPool, folders: Folders, tmp_path: Path, *, family: str
) -> None:
    """Gradients of biases are split like the heads they belong to; those of the head norms are sums over tensor-parallel ranks."""
    one = _case(folders, family, False, "one_rank", tmp_path)
    four = one.on(ParallelLayout(4, tp_size=2), BatchSettings(1, None), tmp_path)
    expected, found = (_iteration(megatron_pool, case) for case in (one, four))
    for own, other in ((found.actor, expected.actor), (found.critic, expected.critic)):
        assert own is not None and other is not None
        special = [name for name in other.gradients[0] if name.endswith((".bias", "q_norm.weight", "k_norm.weight"))]
        assert len(special) == 2 * (3 if family == "qwen2" else 2)
        assert gradient_error(own.gradients[0], other.gradients[0]) <= 1e-5
        assert all(np.abs(other.gradients[0][name]).max() > 0 for name in special)
        assert own.replicas_equal


def _iteration(pool: RankPool, case: Case) -> "Report":
    return pool.run(f"{RANKS}:iteration", world=case.layout.num_ranks, case=case, batch=make_batch(), plan=make_plan())[0]


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_load_lists_every_missing_and_unused_tensor_of_the_family_at_once(
    megatron_pool: RankPool, folders: Folders, tmp_path: Path, *, family: str
) -> None:
    case = _case(folders, family, False, "one_rank", tmp_path)
    lost = {"qwen2": "self_attn.k_proj.bias", "qwen3": "self_attn.q_norm.weight"}[family]
    alien = {"qwen2": "self_attn.o_proj.bias", "qwen3": "self_attn.q_proj.bias"}[family]
    changes = {f"model.layers.{layer}.{name}": shape for layer in (0, 1) for name, shape in ((lost, None), (alien, (64,)))}
    (message,) = megatron_pool.run(f"{RANKS}:load_weights", world=1, case=case, changes=changes, head="language_model")
    assert message == (
        f"the folder does not fit the {family} table: missing: model.layers.0.{lost}, model.layers.1.{lost}; "
        f"not used: model.layers.0.{alien}, model.layers.1.{alien}"
    )
