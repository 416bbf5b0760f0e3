"""transformers' models as the reference wants them, and samples as it wants them. No Megatron here."""

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaModel

from slime_ppo.ppo_utils.reference import log_probs_and_entropy
from slime_ppo.ppo_utils.reference_types import ReferenceSample, ReferenceSettings
from slime_ppo.types.rollout_batch import FINISH_CODES, RolloutBatch
from slime_ppo.types.sample import FinishReason
from tests.dist.backends.cases import VOCAB

# log of the ratio of old policy to engine over each whole sample; rejection by [0.5, 2] takes rows 5 and 6
LOG_RATIOS = (0.2, -0.3, 0.1, 0.0, 0.4, 1.5, -1.2)


class Policy(torch.nn.Module):
    """Token ids [T] -> logits [T, V] by transformers."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.hf = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.hf(ids[None]).logits[0]


class Critic(torch.nn.Module):
    """Token ids [T] -> values [T]: transformers' trunk and a linear head."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        weights = load_file(Path(folder) / "model.safetensors")
        self.model = LlamaModel(LlamaConfig.from_pretrained(folder))
        trunk = {name.removeprefix("model."): tensor for name, tensor in weights.items() if name.startswith("model.")}
        self.model.load_state_dict(trunk)
        self.score = torch.nn.Linear(64, 1, bias=False)
        self.score.load_state_dict({"weight": weights["score.weight"]})

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.score(self.model(ids[None]).last_hidden_state[0])[:, 0]


def reference_samples(batch: RolloutBatch, *, bootstrap: bool) -> list[ReferenceSample]:
    samples = []
    for row in range(batch.num_samples):
        one = batch.select([row])
        support = None
        if one.support_ids is not None:
            support = [torch.tensor(ids) for ids in np.split(one.support_ids, np.cumsum(one.support_counts)[:-1])]
        samples.append(
            ReferenceSample(
                prompt_ids=torch.tensor(one.prompt_ids).long(),
                response_ids=torch.tensor(one.response_ids).long(),
                loss_mask=torch.tensor(one.loss_mask),
                reward=float(one.rewards[0]),
                trajectory_id=int(one.trajectory_ids[0]),
                support=support,
                process_rewards=None if one.process_rewards is None else one.process_rewards.tolist(),
                bootstraps=bootstrap and FINISH_CODES[one.finish[0]] is FinishReason.LENGTH,
                group_id=int(one.group_ids[0]),
                rollout_log_probs=one.rollout_log_probs.tolist(),
            )
        )
    return samples


def drawn_nearby(batch: RolloutBatch, folder: str, temperature: float) -> RolloutBatch:
    """The batch as if an engine close to the folder's policy had drawn it: rollout log-probs are the policy's, with noise that
    adds up to LOG_RATIOS over the trainable tokens of each sample."""
    policy, rng = Policy(folder), np.random.default_rng(12)
    settings = ReferenceSettings(vocab_size=VOCAB, temperature=temperature)
    moved = np.array(batch.rollout_log_probs)
    starts = batch.offsets("response_token")
    for row, sample in enumerate(reference_samples(batch, bootstrap=False)):
        with torch.no_grad():
            own = log_probs_and_entropy(policy, sample, settings)[0].numpy()
        noise = 0.5 * rng.standard_normal(len(own))
        gaps = noise + (LOG_RATIOS[row] - noise.sum()) / max(len(own), 1)
        moved[starts[row] + np.array(sample.trainable, np.int64)] = own - gaps
    return batch.with_columns(rollout_log_probs=moved)


@torch.no_grad()
def hf_rows(folder: str, batch: RolloutBatch, *, hidden: bool) -> torch.Tensor:
    """Logits [N, V] or last hidden states [N, h] that predict each response token, one sample at a time, by transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rows = []
    for row in range(batch.num_samples):
        one = batch.select([row])
        ids = torch.tensor(np.concatenate((one.prompt_ids, one.response_ids))).long()[None]
        out = model.model(ids).last_hidden_state if hidden else model(ids).logits
        rows.append(out[0, len(one.prompt_ids) - 1 : -1])
    return torch.cat(rows)
