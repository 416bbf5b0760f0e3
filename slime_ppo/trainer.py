"""The PPO iteration. Start reading here: one sample's way from prompt to gradient, always forward.

    weights to the engine -> prompts -> responses -> rewards -> plan
    -> actor: old and reference log-probs -> critic: values, token rewards, GAE, whitening, value updates
    -> actor: policy updates -> report -> checkpoint

Without a critic (--advantage-estimator grpo, rloo, ...) the actor makes the advantages. On shared devices exactly one of
rollout, actor and critic is awake; `turns` changes hands where the loop says so. On devices of their own (--no-colocate) all
are awake, and the critic's value updates run beside the actor's policy updates.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from slime_ppo.checkpoint.progress import Progress
from slime_ppo.config.roles import RoleName, RoleSettings
from slime_ppo.config.root import Config
from slime_ppo.data.schedule import make_step_plan
from slime_ppo.data.tokenizer import TextTokenizer
from slime_ppo.errors import NumericsError, RewardError, RolloutError
from slime_ppo.evaluation import Evaluation
from slime_ppo.orchestration.interrupts import StopRequest
from slime_ppo.orchestration.protocols import BatchHandle, SideBySide, TrainGroup
from slime_ppo.orchestration.turns import DeviceTurns
from slime_ppo.parallel.cp_map import CpMap
from slime_ppo.ppo_utils.lr_schedule import learning_rate
from slime_ppo.rollout.dump import DumpWriter, TrainingDump
from slime_ppo.rollout_source import RolloutSource
from slime_ppo.saver import CheckpointSaver, save_between, saved_at_end
from slime_ppo.tracking.base import RolloutRecord, Tracker
from slime_ppo.tracking.clock import RunClock, phase_metrics
from slime_ppo.tracking.gap_dump import dump_tokens, worst_tokens
from slime_ppo.tracking.phrases import common_phrases
from slime_ppo.tracking.rollout_metrics import (
    batch_metrics,
    before_training,
    is_early_stopped,
    is_skipped,
    pass_metrics,
    sample_metrics,
    stage_metrics,
    step_records,
    training_metrics,
)
from slime_ppo.tracking.sample_records import training_records
from slime_ppo.types.rollout_batch import RolloutBatch
from slime_ppo.types.sample import Sample
from slime_ppo.types.stats import Stats
from slime_ppo.types.step_plan import Step, StepPlan

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainerParts:
    """What the loop is made of. `critic` is None when the advantage estimator needs none, `evaluation` and `dumps`, which keeps
    rollouts in files, where they are not wanted, `side_by_side` where the roles share devices."""

    actor: TrainGroup
    critic: TrainGroup | None
    turns: DeviceTurns
    rollouts: RolloutSource
    tokenizer: TextTokenizer
    evaluation: Evaluation | None
    tracker: Tracker
    clock: RunClock
    dumps: DumpWriter | None
    side_by_side: SideBySide | None
    saver: CheckpointSaver | None
    stop: StopRequest


class PpoTrainer:
    """Runs the iterations up to `num_rollout`. `progress` is all the state of its own."""

    def __init__(self, config: Config, parts: TrainerParts, progress: Progress) -> None:
        self.config = config
        self.parts = parts
        self.progress = progress

    def run(self) -> None:
        """All iterations that are left, then the final weights. Raises Preempted when the run was asked to end and has saved."""
        self.parts.rollouts.connect()
        parts, background = self.parts, self.config.checkpoint.async_save
        with saved_at_end(parts.saver, self.progress, before=self._abort_generation):
            for rollout_id in range(self.progress.rollout_id, self.config.run.num_rollout):
                self.iterate(rollout_id)
                last = rollout_id == self.config.run.num_rollout - 1
                save_between(parts.saver, parts.stop, self.progress, last=last, in_background=background, clock=parts.clock)
        if self.config.model.save_hf:
            self.save_hf()

    def _abort_generation(self) -> None:
        """An engine that has died must not keep the ranks, which are well, from saving."""
        try:
            self.parts.rollouts.abort()
        except RolloutError:
            _log.warning("the rollout engine could not be told to stop; the run is saved all the same", exc_info=True)

    def iterate(self, rollout_id: int) -> None:
        """One PPO iteration."""
        parts, clock, ppo = self.parts, self.parts.clock, self.config.ppo
        clock.start_rollout(rollout_id)
        trains_actor = rollout_id >= ppo.num_critic_only_steps
        parts.rollouts.use_weights(self.progress.version)
        with parts.stop.may_abort():
            metrics = self.evaluate(rollout_id) if self._evaluation_due(rollout_id) else {}
            samples = self.progress.samples or self.collect(rollout_id)
        if parts.saver is not None:
            with clock.phase("save"):
                parts.saver.publish()
        batch = RolloutBatch.from_samples(rollout_id, samples)
        plan = self._plan(batch)
        metrics |= self._over_cap(batch)

        parts.turns.take("actor")
        with clock.phase("log-probs"):
            handle, log_prob_stats = parts.actor.compute_log_probs(parts.actor.put(batch))
        self._check_gap(log_prob_stats, samples, handle)

        if parts.critic is None:
            with clock.phase("advantages"):
                handle, advantage_stats = parts.actor.compute_advantages(handle, self.progress.kl.beta)
        else:
            parts.turns.take("critic")
            with clock.phase("values"):
                handle, advantage_stats = parts.critic.compute_advantages(handle, self.progress.kl.beta)
        rates = self._rates(plan, trains_actor=trains_actor)
        if parts.dumps is not None:
            training = TrainingDump(parts.actor.fetch(handle), plan, rates, self.progress.kl.beta)
            parts.dumps.save(rollout_id, samples, training)
        parts.stop.check()
        actor_steps, critic_steps = self.train(handle, plan, rates)
        self.progress.version += any(not is_skipped(step) for step in actor_steps)

        if rollout_id == self.config.run.num_rollout - 1 and parts.evaluation is not None:
            parts.rollouts.use_weights(self.progress.version)
            metrics = before_training(metrics) | self.evaluate(rollout_id)
        metrics |= batch_metrics(batch) | sample_metrics(samples) | self._pass_metrics(batch)
        metrics |= stage_metrics(log_prob_stats, advantage_stats)
        metrics |= training_metrics(actor_steps, critic_steps) | {"rollout/kl_coef": self.progress.kl.beta}
        metrics["rollout/num_dropped"] = float(self.config.samples_per_rollout - len(samples))
        metrics["train/num_dropped"] = float(plan.num_dropped)
        self._warn_of_value_clip(metrics)
        if trains_actor:
            self._update_kl(log_prob_stats)
        self._report(rollout_id, metrics, (actor_steps, critic_steps), samples=samples, handle=handle)
        self._check_skipped(actor_steps, critic_steps)
        self.progress.has_trained()

    def save_hf(self) -> None:
        """The weights of every role as Hugging Face folders."""
        self.parts.turns.take("actor")
        self.parts.actor.save_hf(f"{self.config.run.save}/hf")
        if self.parts.critic is not None:
            self.parts.turns.take("critic")
            self.parts.critic.save_hf(self.config.role("critic").save_folder)

    def collect(self, rollout_id: int) -> tuple[Sample, ...]:
        """The rollout's samples with their rewards."""
        samples = self.parts.rollouts.collect(rollout_id, self.progress.version)
        if self.parts.dumps is not None:
            self.parts.dumps.save(rollout_id, samples)
        self._check_process_rewards(samples)
        self.progress.has_collected(samples, self.parts.rollouts.state_dict())
        return self.progress.samples

    def train(
        self, handle: BatchHandle, plan: StepPlan, rates: Mapping[RoleName, Sequence[float]]
    ) -> tuple[list[Stats], list[Stats]]:
        """The planned steps of the roles that have learning rates: one role after the other on shared devices, both at once on
        devices of their own."""
        parts, clock = self.parts, self.parts.clock
        steps: dict[RoleName, list[Stats]] = {"actor": [], "critic": []}
        if parts.side_by_side is not None and len(rates) == 2:
            with clock.both_train() as ended:
                steps |= parts.side_by_side.train(handle, plan, rates, ended)
            return steps["actor"], steps["critic"]
        groups: dict[RoleName, TrainGroup | None] = {"critic": parts.critic, "actor": parts.actor}
        for role, group in groups.items():
            if group is not None and role in rates:
                parts.turns.take(role)
                with clock.phase(f"{role} train"):
                    steps[role] = group.train(handle, plan, rates[role])
        return steps["actor"], steps["critic"]

    def evaluate(self, rollout_id: int) -> dict[str, float]:
        """Answers to the held-out prompts by the engine's present weights, as metrics; some of the answers go to the report."""
        if self.parts.evaluation is None:
            return {}
        with self.parts.clock.phase("evaluate"):
            return self.parts.evaluation.run(rollout_id, self.progress.version)

    def _plan(self, batch: RolloutBatch) -> StepPlan:
        """Who trains in which step; samples without a trainable token are in none. When no step is left (nothing trainable, or
        less than one full step with --partial-step drop) the planned steps are empty: skipped and counted like any other."""
        trainable = np.flatnonzero(batch.trainable_tokens)
        plan = make_step_plan(
            batch.rollout_id,
            batch.trajectory_ids[trainable],
            global_batch_size=self.config.batch.global_batch_size,
            num_epochs=self.config.ppo.num_epochs_per_rollout,
            seed=self.config.run.seed,
            partial_step=self.config.batch.partial_step,
        ).renumbered(trainable)
        if plan.steps:
            return plan
        passes = range(self.config.ppo.num_epochs_per_rollout)
        empty = (Step(one, index, rows=trainable[:0]) for one in passes for index in range(self.config.steps_per_pass))
        return replace(plan, steps=tuple(empty))

    def _over_cap(self, batch: RolloutBatch) -> dict[str, float]:
        """How many samples pass --max-tokens-per-gpu, once per rollout, in any role; a warning names the longest. Before any
        pass: should memory not be enough for it, the cause is in the log."""
        cap = self.config.batch.max_tokens_per_gpu
        if cap is None or not self.config.batch.use_dynamic_batch_size:
            return {}
        cp_size = min(self.config.role(role).cp_size for role in self.config.roles)
        tokens = CpMap(cp_size, batch.prompt_lens, batch.response_lens).rank_lens
        num_over = int((tokens > cap).sum())
        if num_over:
            longest = int(tokens.argmax())
            _log.warning(
                "sample %d has %d tokens for one rank, more than --max-tokens-per-gpu %d: it goes alone, in a micro-batch of "
                "its own, with the memory that this takes (%d such samples in rollout %d). Raise the cap or shorten responses",
                *(batch.sample_ids[longest], tokens[longest], cap, num_over, batch.rollout_id),
            )
        return {"train/over_cap_samples": float(num_over)}

    def _rates(self, plan: StepPlan, *, trains_actor: bool) -> dict[RoleName, list[float]]:
        """The learning rates of the roles that train in this rollout, critic first."""
        roles: dict[RoleName, bool] = {"critic": self.parts.critic is not None, "actor": trains_actor}
        return {role: self._learning_rates(role, plan) for role, trains in roles.items() if trains}

    def _learning_rates(self, role: RoleName, plan: StepPlan) -> list[float]:
        """The rate of each step, a function of (rollout, planned step): a pass that lost steps to dropped samples leaves those of
        the next pass where they were. The actor's schedule starts after critic-only rollouts."""
        settings = self.config.role(role)
        trained_before = plan.rollout_id - (self.config.ppo.num_critic_only_steps if role == "actor" else 0)
        first = trained_before * self.config.steps_per_rollout
        return [
            scheduled_rate(settings, first + step.pass_index * self.config.steps_per_pass + step.step_index) for step in plan.steps
        ]

    def _evaluation_due(self, rollout_id: int) -> bool:
        """Before a rollout whose number is a multiple of the interval. The last one is evaluated after its updates instead, the
        only one before and after."""
        after_only = 0 < rollout_id == self.config.run.num_rollout - 1
        return self.parts.evaluation is not None and not after_only and rollout_id % self.config.eval.eval_interval == 0

    def _pass_metrics(self, batch: RolloutBatch) -> dict[str, float]:
        copies, threshold = self.config.rollout.n_samples_per_prompt, self.config.reward.pass_threshold
        return pass_metrics(batch, n_samples_per_prompt=copies, threshold=threshold)

    def _check_process_rewards(self, samples: Sequence[Sample]) -> None:
        """Refuse process rewards that the advantage estimator would not read."""
        if self.config.ppo.estimator_spec.uses_token_rewards:
            return
        for sample in samples:
            if sample.process_rewards is not None and sample.process_rewards.any():
                raise RewardError(
                    f"the reward function paid single tokens of sample {sample.sample_id} (process rewards), and "
                    f"--advantage-estimator {self.config.ppo.advantage_estimator} reads the rewards of whole responses only: they "
                    "would be lost. Use gae or reinforce_plus_plus, or return no process rewards"
                )

    def _check_gap(self, stats: Stats, samples: Sequence[Sample], handle: BatchHandle) -> None:
        """Stop when engine and trainer no longer agree on the tokens' log-probs, over the support or over the full vocabulary
        (--max-logprob-gap), and leave the worst tokens in a file."""
        limit = self.config.rollout.max_logprob_gap
        measured = [stats.maxima[name] for name in ("logprob_gap_max", "logprob_gap_full_max") if name in stats.maxima]
        if measured and 0 < limit < max(measured):
            tokens = worst_tokens(samples, self.parts.actor.fetch(handle), self.parts.tokenizer.token_strings)
            dumped = dump_tokens(Path(self.config.run.save) / "logs" / "logprob_gap.jsonl", tokens)
            raise NumericsError(
                f"engine and trainer differ by {max(measured):.3g} in a token's log-prob, more than --max-logprob-gap {limit:g}: "
                "the engine generates with other weights, another temperature or another support than the trainer believes. "
                f"{dumped}. With --dtype bfloat16 rounding alone gives a few hundredths: raise the limit, or 0 turns it off"
            )

    def _warn_of_value_clip(self, metrics: Mapping[str, float]) -> None:
        name = "train/critic-value_clipfrac"
        if name in metrics and metrics[name] > 0.5:
            _log.warning(
                "rollout values moved beyond --value-clip %g on %.0f%% of tokens: the critic is held back; raise it or set it to 0",
                self.config.ppo.value_clip,
                100 * metrics[name],
            )

    def _check_skipped(self, actor: Sequence[Stats], critic: Sequence[Stats]) -> None:
        """Stop after too many optimizer steps in a row that changed nothing, early stops by KL aside: those are intended."""
        steps: dict[RoleName, Sequence[Stats]] = {"actor": actor, "critic": critic}
        limit = self.config.ppo.max_skipped_steps
        for role, found in steps.items():
            for step in (step for step in found if not is_early_stopped(step)):
                self.progress.skipped_in_a_row[role] = self.progress.skipped_in_a_row[role] + 1 if is_skipped(step) else 0
                if self.progress.skipped_in_a_row[role] >= limit:
                    raise NumericsError(
                        f"{limit} optimizer steps of the {role} in a row were skipped (--max-skipped-steps): gradients that are "
                        "not finite, steps without trainable tokens, or steps whose samples were all rejected "
                        "(--rollout-rejection). Look at grad_norm, num_tokens and rollout/rejected_samples in metrics.jsonl"
                    )

    def _update_kl(self, log_probs: Stats) -> None:
        """Let the controller see the rollout's KL; once per rollout that trains the actor."""
        unit = "kl" if self.config.ppo.kl_target_unit == "token" else "kl_trajectory"
        if unit in log_probs.sums and log_probs.counts[unit] > 0:
            self.progress.kl = self.progress.kl.update(
                log_probs.sums[unit] / log_probs.counts[unit], int(log_probs.counts["kl_trajectory"])
            )

    def _report(
        self,
        rollout_id: int,
        metrics: dict[str, float],
        steps: tuple[Sequence[Stats], Sequence[Stats]],
        *,
        samples: Sequence[Sample],
        handle: BatchHandle,
    ) -> None:
        """Samples and metrics to the trackers."""
        tracking, parts = self.config.tracking, self.parts
        last = rollout_id == self.config.run.num_rollout - 1
        if tracking.num_logged_samples and (last or rollout_id % tracking.log_sample_interval == 0):
            shown = samples[: tracking.num_logged_samples]
            batch = parts.actor.fetch(handle).select(range(len(shown)))
            parts.tracker.log_table(rollout_id, training_records(shown, batch, parts.tokenizer.token_strings))
        phrases = common_phrases([sample.response_text for sample in samples])
        phases = parts.clock.end_rollout()
        num_tokens = sum(len(s.prompt.token_ids) + len(s.response_ids) for s in samples)
        records = step_records(rollout_id * self.config.steps_per_rollout, *steps, metrics=metrics)
        metrics = metrics | phase_metrics(phases, num_tokens)
        parts.tracker.log(RolloutRecord(rollout_id, metrics, records, phases, phrases))


def scheduled_rate(settings: RoleSettings, step: int) -> float:
    """The learning rate of the role's planned step of this number."""
    return learning_rate(
        step,
        lr=settings.lr,
        min_lr=settings.min_lr,
        warmup_iters=settings.lr_warmup_iters,
        decay_iters=settings.lr_decay_iters,
        decay_style=settings.lr_decay_style,
    )
