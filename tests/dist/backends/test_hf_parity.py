"""The Megatron model against transformers on the same folder, and its way back into a Hugging Face folder."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from slime_ppo.config.ppo import PpoConfig
from slime_ppo.parallel.layout import ParallelLayout
from slime_ppo.parallel.worker_settings import BatchSettings
from slime_ppo.types.rollout_batch import RolloutBatch
from tests.dist.backends.cases import RANKS, make_batch
from tests.dist.backends.compare import relative
from tests.dist.backends.conftest import CaseMaker
from tests.helpers.rank_pool import RankPool

LAYOUTS = {
    "one_rank": ParallelLayout(1),
    "tp2": ParallelLayout(2, tp_size=2),
    "cp2": ParallelLayout(2, cp_size=2),
    "cp2_tp2": ParallelLayout(4, tp_size=2, cp_size=2),
    "pp2_vpp2": ParallelLayout(2, pp_size=2, vpp_size=2),
    "tp2_pp2": ParallelLayout(4, tp_size=2, pp_size=2),
}
ONE_BUCKET = 1 << 30
ALL = BatchSettings(100, None)


@torch.no_grad()
def _hf_logits(folder: str, batch: RolloutBatch) -> torch.Tensor:
    """Logits [N, V] that predict each response token, one sample at a time, by transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rows = []
    for row in range(batch.num_samples):
        one = batch.select([row])
        ids = torch.tensor(np.concatenate((one.prompt_ids, one.response_ids))).long()
        rows.append(model(ids[None]).logits[0, len(one.prompt_ids) - 1 : -1])
    return torch.cat(rows)


@pytest.mark.parametrize("layout", list(LAYOUTS))
@pytest.mark.parametrize("tie", [True, False])
def test_logits_any_tensor_parallel_size_equal_transformers(
    megatron_pool: RankPool, make_case: CaseMaker, tmp_path: Path, *, tie: bool, layout: str
) -> None:
    case = make_case(PpoConfig(), tie=tie).on(LAYOUTS[layout], ALL, tmp_path)
    batch = make_batch()
    found = megatron_pool.run(f"{RANKS}:logits", world=case.layout.num_ranks, case=case, batch=batch)
    expected = _hf_logits(case.actor_folder, batch).numpy()
    for rank in found:
        assert relative(rank, expected) <= 1e-5


@pytest.mark.parametrize("layout", list(LAYOUTS))
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_padded_vocabulary_equal_transformers(
    megatron_pool: RankPool, make_case: CaseMaker, tmp_path: Path, *, temperature: float, layout: str
) -> None:
    """100 tokens are padded to 128: a padded row with logit 0 in the softmax would move every log-prob."""
    case = make_case(PpoConfig(), tie=False, temperature=temperature).on(LAYOUTS[layout], ALL, tmp_path)
    batch = make_batch()
    ranks = megatron_pool.run(f"{RANKS}:log_probs", world=case.layout.num_ranks, case=case, batch=batch)
    [columns] = [reported for reported in ranks if reported]
    scaled = (_hf_logits(case.actor_folder, batch) / temperature).log_softmax(-1)
    expected = scaled.gather(1, torch.tensor(batch.response_ids).long()[:, None])[:, 0].numpy()
    entropy = -(scaled.exp() * scaled).sum(-1).numpy()
    assert [len(columns[name]) for name in ("old_log_probs", "entropy")] == [len(expected)] * 2
    assert relative(columns["old_log_probs"], expected) <= 1e-5
    assert relative(columns["entropy"], entropy) <= 1e-5


def test_padded_vocab_size_is_megatrons_rule(megatron_pool: RankPool) -> None:
    sizes = [(100, 32, 1), (100, 32, 2), (128, 32, 4), (129, 1, 2), (129, 1, 1)]
    assert megatron_pool.run(f"{RANKS}:padded_sizes", world=1, sizes=sizes)[0] == [128, 128, 128, 130, 129]


@pytest.mark.parametrize("layout", list(LAYOUTS))
@pytest.mark.parametrize(("tie", "bucket_bytes"), [(True, 4096), (False, ONE_BUCKET)])
def test_export_any_tensor_parallel_size_and_bucket_gives_the_files_tensors_bit_for_bit(
    megatron_pool: RankPool, make_case: CaseMaker, tmp_path: Path, *, tie: bool, bucket_bytes: int, layout: str
) -> None:
    case = make_case(PpoConfig(), tie=tie).on(LAYOUTS[layout], ALL, tmp_path)
    source = load_file(Path(case.actor_folder) / "model.safetensors")
    for buckets, manifest in megatron_pool.run(
        f"{RANKS}:export", world=case.layout.num_ranks, case=case, bucket_bytes=bucket_bytes
    ):
        assert (len(buckets) == 1) == (bucket_bytes == ONE_BUCKET)
        found = {name: tensor for bucket in buckets for name, tensor in bucket.items()}
        assert sorted(found) == sorted(source) == sorted(manifest)
        assert sum(len(bucket) for bucket in buckets) == len(source)
        for name, tensor in source.items():
            assert np.array_equal(found[name], tensor) and found[name].dtype == tensor.dtype, name


@pytest.mark.parametrize("bucket_bytes", [20_000, ONE_BUCKET])
def test_save_hf_folder_tp2_loads_in_transformers_for_both_roles(
    megatron_pool: RankPool, make_case: CaseMaker, tmp_path: Path, bucket_bytes: int
) -> None:
    case = make_case(PpoConfig()).on(LAYOUTS["tp2"], ALL, tmp_path)
    folders = {"actor": str(tmp_path / "saved" / "actor"), "critic": str(tmp_path / "saved" / "critic")}
    megatron_pool.run(f"{RANKS}:save", world=2, case=case, folders=folders, bucket_bytes=bucket_bytes)
    batch = make_batch()
    assert torch.equal(_hf_logits(folders["actor"], batch), _hf_logits(case.actor_folder, batch))
    assert AutoTokenizer.from_pretrained(folders["actor"])("abc") == AutoTokenizer.from_pretrained(case.actor_folder)("abc")
    critic = AutoModelForSequenceClassification.from_pretrained(folders["critic"], dtype=torch.float32)
    source = load_file(Path(case.critic_folder) / "model.safetensors")
    assert np.array_equal(critic.score.weight.detach().numpy(), source["score.weight"])
    assert np.array_equal(critic.model.embed_tokens.weight.detach().numpy(), source["model.embed_tokens.weight"])
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == ["actor", "critic"]
