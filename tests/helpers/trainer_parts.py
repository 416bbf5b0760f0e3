"""TrainerParts that write down what the training loop does with them, without torch, Ray or a model.

All parts share one `Journal`, so that a test can compare the order of everything that happened with a list of lines.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from slime_ppo.checkpoint.progress import Progress
from slime_ppo.checkpoint.run_state import RunState
from slime_ppo.config.roles import RoleName
from slime_ppo.config.root import Config
from slime_ppo.errors import RolloutError
from slime_ppo.evaluation import EvalSet, Evaluation
from slime_ppo.orchestration.engine_keeper import EngineKeeper
from slime_ppo.orchestration.interrupts import StopRequest
from slime_ppo.orchestration.protocols import BatchHandle
from slime_ppo.orchestration.turns import DeviceTurns
from slime_ppo.rewards.runner import RewardOutcome
from slime_ppo.rollout.dump import DumpWriter
from slime_ppo.rollout.engine import NO_VERSION, EngineHealth, EnginePart
from slime_ppo.rollout.generate import SampleBuilder
from slime_ppo.rollout_only import RolloutOnly
from slime_ppo.rollout_source import GeneratedRollouts, RolloutSource, rollout_sampling
from slime_ppo.saver import CheckpointSaver, SavePlan
from slime_ppo.tracking.base import RolloutRecord, RunInfo, SampleRecord
from slime_ppo.tracking.clock import ROLLOUT_PHASES, RunClock, run_phases
from slime_ppo.trainer import TrainerParts
from slime_ppo.types.load_report import LoadReport
from slime_ppo.types.rollout_batch import RolloutBatch
from slime_ppo.types.sample import FinishReason, GenerateRequest, GenerateResult, Prompt, Sample, Support, one_version
from slime_ppo.types.stats import Stats
from slime_ppo.types.step_plan import StepPlan

EOS = 3
Journal = list[str]


def step_stats(*, skipped: bool = False, early_stopped: bool = False, **means: float) -> Stats:
    """What one optimizer step reports; `means` are token averages over 10 tokens."""
    stats = Stats()
    stats.add_value("skipped", float(skipped))
    if early_stopped:
        stats.add_value("early_stopped", 1.0)
    for name, value in means.items():
        stats.add_mean(name, 10 * value, 10)
    return stats


class RecordingRole:
    """A TrainGroup. `outcomes(rollout_id, step)` is what each step reports, `columns` what the ranks have made; the rest is kept
    for the test to look at."""

    def __init__(self, name: str, journal: Journal) -> None:
        self.name, self.journal = name, journal
        self.outcomes: Callable[[int, int], Stats] = lambda rollout_id, step: step_stats()
        self.log_prob_stats, self.advantage_stats = Stats(), Stats()
        self.columns: Mapping[str, np.ndarray] = {}
        self.batches: list[RolloutBatch] = []
        self.plans: list[StepPlan] = []
        self.rates: list[list[float]] = []
        self.betas: list[float] = []
        self.writes_in: Path | None = None

    def wake(self) -> None:
        self.journal.append(f"wake {self.name}")

    def offload(self) -> None:
        self.journal.append(f"offload {self.name}")

    def resident_bytes(self) -> int:
        return 0

    def put(self, batch: RolloutBatch) -> BatchHandle:
        self.batches.append(batch)
        return BatchHandle(batch)

    def fetch(self, handle: BatchHandle) -> RolloutBatch:
        assert isinstance(handle.batch, RolloutBatch)
        return handle.batch.with_columns(**self.columns)

    def compute_log_probs(self, handle: BatchHandle) -> tuple[BatchHandle, Stats]:
        self.journal.append(f"{self.name} log-probs")
        return handle.with_parts(["log-probs"]), self.log_prob_stats

    def compute_advantages(self, handle: BatchHandle, kl_coef: float) -> tuple[BatchHandle, Stats]:
        assert handle.parts == ("log-probs",), "token rewards are made from the actor's log-probs"
        self.journal.append(f"{self.name} advantages")
        self.betas.append(kl_coef)
        return handle.with_parts(["advantages"]), self.advantage_stats

    def train(self, handle: BatchHandle, plan: StepPlan, learning_rates: Sequence[float]) -> list[Stats]:
        assert handle.parts == ("log-probs", "advantages"), "both roles train on columns of before the first step"
        self.journal.append(f"{self.name} train")
        self.plans.append(plan)
        self.rates.append(list(learning_rates))
        return [self.outcomes(plan.rollout_id, step) for step in range(len(plan.steps))]

    def save_hf(self, folder: str) -> None:
        self.journal.append(f"save {self.name} in {folder}")

    def save_checkpoint(self, folder: str, *, in_background: bool) -> None:
        """`writes_in` is the folder until `finish_save`, which writes the last file, as ranks do."""
        assert self.writes_in is None, "ranks refuse a save while one is under way"
        self.journal.append(f"save {self.name} as {Path(folder).name}{' in the background' if in_background else ''}")
        for file in ("__0_0.distcp", "metadata.json"):
            (Path(folder) / file).write_text(f"{self.name} {file}")
        self.writes_in = Path(folder)

    def finish_save(self) -> None:
        self.journal.append(f"finish {self.name}")
        folder, self.writes_in = self.writes_in, None
        if folder is not None:
            (folder / ".metadata").write_text(f"{self.name} .metadata")

    def load_checkpoint(self, folder: str, *, with_optimizer: bool) -> LoadReport:
        self.journal.append(f"load {self.name} from {Path(folder).name}{' with its optimizer' if with_optimizer else ''}")
        return LoadReport(with_optimizer, restored_rng=with_optimizer)


class RecordingSideBySide:
    """A SideBySide whose first role ends first."""

    def __init__(self, roles: Mapping[RoleName, RecordingRole]) -> None:
        self._roles = roles

    def train(
        self,
        handle: BatchHandle,
        plan: StepPlan,
        learning_rates: Mapping[RoleName, Sequence[float]],
        on_end: Callable[[RoleName], None],
    ) -> dict[RoleName, list[Stats]]:
        self._roles["actor"].journal.append("side by side:")
        steps = {role: self._roles[role].train(handle, plan, rates) for role, rates in learning_rates.items()}
        for role in steps:
            on_end(role)
        return steps


class ScriptedEngine:
    """A rollout engine. `answer(request)` gives response ids and finish reason: by default one token and the stop token."""

    returns_support: ClassVar[bool] = True

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.version = NO_VERSION
        self.num_lost = 0
        self.requests: list[list[GenerateRequest]] = []
        self.answer: Callable[[GenerateRequest], tuple[list[int], FinishReason]] = lambda request: ([7, EOS], FinishReason.STOP)

    def generate(self, requests: Sequence[GenerateRequest]) -> list[GenerateResult]:
        self.journal.append("answer held-out" if requests[0].sampling.greedy else "generate")
        self.requests.append(list(requests))
        return [self._result(request) for request in requests]

    def _result(self, request: GenerateRequest) -> GenerateResult:
        ids, finish = self.answer(request)
        recorded = request.sampling.restricted and not request.sampling.greedy
        return GenerateResult(
            sample_id=request.sample_id,
            response_ids=np.array(ids, np.int32),
            log_probs=np.full(len(ids), -0.5, np.float32),
            support=Support(np.array(ids, np.int32), np.ones(len(ids), np.int32)) if recorded else None,
            finish=finish,
            weight_versions=one_version(self.version, len(ids)),
        )

    def abort(self) -> None: ...

    def wake(self, parts: object) -> None: ...

    def offload(self, parts: object) -> None: ...

    def weight_version(self) -> int:
        return self.version

    def health(self) -> EngineHealth:
        if self.num_lost > 1:
            raise RolloutError("all servers are lost")
        return EngineHealth(EnginePart.ALL, self.version, 0, self.num_lost)


class RolloutTenant:
    def __init__(self, journal: Journal) -> None:
        self.journal = journal

    def wake(self) -> None:
        self.journal.append("wake rollout")

    def offload(self) -> None:
        self.journal.append("offload rollout")

    def resident_bytes(self) -> int:
        return 0


class RecordingSync:
    """A WeightSync: what was pushed is the version that the engine answers with."""

    def __init__(self, journal: Journal, engine: ScriptedEngine) -> None:
        self.journal, self.engine = journal, engine

    def connect(self) -> None:
        self.journal.append("connect")

    def push(self, version: int) -> int:
        self.journal.append(f"push {version}")
        self.engine.version = version
        return version

    def close(self) -> None: ...


class RecordingRewards:
    """Gives each sample the reward 1, and `process_rewards` by sample id; `dropped` sample ids are left out."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.dropped: set[int] = set()
        self.process_rewards: dict[int, list[float]] = {}

    def score(self, samples: Sequence[Sample], *, check: Callable[[], None]) -> RewardOutcome:
        check()
        self.journal.append("reward")
        kept = tuple(self._rewarded(sample) for sample in samples if sample.sample_id not in self.dropped)
        reasons = {sample.sample_id: "returned None" for sample in samples if sample.sample_id in self.dropped}
        return RewardOutcome(kept, len(reasons), reasons)

    def _rewarded(self, sample: Sample) -> Sample:
        if sample.sample_id not in self.process_rewards:
            return sample.with_reward(1.0)
        return sample.with_reward(1.0, np.array(self.process_rewards[sample.sample_id], np.float32))


class CountingPrompts:
    """Prompts 0, 1, 2, ... without end."""

    def __init__(self) -> None:
        self.drawn = 0

    def state_dict(self) -> dict[str, object]:
        return {"drawn": self.drawn}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        self.drawn = int(str(state["drawn"]))

    def next_prompts(self, n: int) -> list[Prompt]:
        self.drawn += n
        return [make_prompt(index) for index in range(self.drawn - n, self.drawn)]


@dataclass
class RecordingTracker:
    journal: Journal
    records: list[RolloutRecord] = field(default_factory=list)
    tables: list[tuple[int, list[SampleRecord]]] = field(default_factory=list)

    def start(self, run: RunInfo) -> None: ...

    def log(self, record: RolloutRecord) -> None:
        self.journal.append("log")
        self.records.append(record)

    def log_table(self, rollout_id: int, samples: Sequence[SampleRecord]) -> None:
        self.tables.append((rollout_id, list(samples)))

    def close(self) -> None: ...

    def metric(self, name: str) -> list[float]:
        """The metric of every rollout."""
        return [record.metrics[name] for record in self.records]


class NumberTokenizer:
    """Token 7 reads "7 "."""

    eos_ids = (EOS,)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return "".join(self.token_strings(ids))

    def token_strings(self, ids: Sequence[int] | np.ndarray) -> list[str]:
        return [f"{int(i)} " for i in ids]


@dataclass
class Parts:
    """The recording parts by name, and `trainer_parts` for the loop; `eval_sets` have so many prompts each, `rollouts` come from
    elsewhere than the engine. Nobody asks the critic when the estimator needs none."""

    config: Config
    eval_sets: Mapping[str, int] = field(default_factory=dict)
    dumps: DumpWriter | None = None
    rollouts: RolloutSource | None = None
    journal: Journal = field(default_factory=list)
    save_plan: SavePlan | None = None
    saved: RunState = RunState("run")

    def __post_init__(self) -> None:
        self.actor, self.critic = RecordingRole("actor", self.journal), RecordingRole("critic", self.journal)
        self.engine = ScriptedEngine(self.journal)
        self.rewards = RecordingRewards(self.journal)
        self.prompts = CountingPrompts()
        self.tracker = RecordingTracker(self.journal)
        self.stop = StopRequest()

    @property
    def progress(self) -> Progress:
        """Of a run that begins."""
        return Progress.start(self.config.ppo, self.prompts.state_dict())

    def rollout_only(self) -> RolloutOnly:
        """The loop that trains nothing: the engine is the only tenant."""
        clock = RunClock(ROLLOUT_PHASES)
        turns = DeviceTurns({"rollout": RolloutTenant(self.journal)}, offload=self.config.offloads, on_time=clock.add)
        rollouts, evaluation = self._rollouts(turns, clock)
        tokenizer: Any = NumberTokenizer()
        return RolloutOnly(
            self.config, rollouts, tokenizer, evaluation=evaluation, tracker=self.tracker, clock=clock, dumps=self.dumps
        )

    def trainer_parts(self) -> TrainerParts:
        has_critic, colocate = self.config.has_critic, self.config.cluster.colocate
        clock = RunClock(run_phases(has_critic=has_critic, side_by_side=not colocate))
        tenants = {"actor": self.actor, "rollout": RolloutTenant(self.journal)} | ({"critic": self.critic} if has_critic else {})
        tokenizer: Any = NumberTokenizer()
        turns = DeviceTurns(tenants, offload=self.config.offloads, on_time=clock.add)
        rollouts, evaluation = self._rollouts(turns, clock)
        groups: dict[RoleName, RecordingRole] = {"actor": self.actor} | ({"critic": self.critic} if has_critic else {})
        return TrainerParts(
            actor=self.actor,
            critic=self.critic if has_critic else None,
            turns=turns,
            rollouts=rollouts,
            tokenizer=tokenizer,
            evaluation=evaluation,
            tracker=self.tracker,
            clock=clock,
            dumps=self.dumps,
            side_by_side=None if colocate else RecordingSideBySide({"actor": self.actor, "critic": self.critic}),
            saver=None if self.save_plan is None else CheckpointSaver(self.save_plan, self.saved, groups=groups, take=turns.take),
            stop=self.stop,
        )

    def _rollouts(self, turns: DeviceTurns, clock: RunClock) -> tuple[RolloutSource, Evaluation | None]:
        """This object's `rollouts`, or generated ones and their evaluation."""
        if self.rollouts is not None:
            return self.rollouts, None
        tokenizer: Any = NumberTokenizer()
        rewards: Any = self.rewards
        prompts: Any = self.prompts
        keeper = EngineKeeper(turns, RecordingSync(self.journal, self.engine), self.engine, clock, attempts=1)
        samples = SampleBuilder(
            engine=self.engine,
            tokenizer=tokenizer,
            run_seed=self.config.run.seed,
            vocab_size=100,
            mask_truncated=self.config.ppo.truncation_policy == "mask",
            restore=keeper.restore,
            answering=self.stop.answering,
        )
        evaluation = Evaluation.of(
            self.config,
            [EvalSet(name, [make_prompt(1000 + index) for index in range(n)]) for name, n in self.eval_sets.items()],
            samples=samples,
            rewards=rewards,
            tracker=self.tracker,
            check_alive=lambda: None,
        )
        rollouts = GeneratedRollouts(
            keeper=keeper,
            samples=samples,
            rewards=rewards,
            prompts=prompts,
            sampling=rollout_sampling(self.config, tokenizer),
            num_prompts=self.config.rollout.rollout_batch_size,
            n_samples_per_prompt=self.config.rollout.n_samples_per_prompt,
            clock=clock,
            check_alive=lambda: None,
        )
        return rollouts, evaluation if self.eval_sets else None


def make_prompt(index: int) -> Prompt:
    """Prompt `index`: two tokens."""
    return Prompt(index=index, text=f"prompt {index}", token_ids=np.array([5, 6], np.int32))
