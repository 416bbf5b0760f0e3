"""What the tests of supervised fine-tuning run on each rank of the pool."""

import torch.distributed as dist

from tests.dist.backends.ranks import RoleReport, _gathered, _train  # isort: skip

from slime_ppo.backends.megatron.sft import SftRole
from slime_ppo.types.rollout_batch import RolloutBatch
from slime_ppo.types.stats import merge_stats
from slime_ppo.types.step_plan import StepPlan
from tests.dist.backends.cases import Case


def fine_tune(case: Case, batch: RolloutBatch, plan: StepPlan) -> tuple[list[float], RoleReport]:
    """Held-out loss before and after the planned steps, and what these did."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    role = SftRole(case.settings(rank, "actor"))

    def nll() -> float:
        part, stats = role.compute_log_probs(batch)
        batch.with_parts(_gathered(part))  # every sample has log-probs of one rank
        return merge_stats(_gathered(stats)).result()["nll"]

    before = nll()
    report = _train(role, batch, plan, case)
    return [before, nll()], report
