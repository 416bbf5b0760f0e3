"""The seams between the training loop and what runs it. The loop knows these protocols, not Ray."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import ClassVar, Protocol, Self

from slime_ppo.config.roles import RoleName
from slime_ppo.errors import CheckpointError
from slime_ppo.rollout.engine import RolloutEngine
from slime_ppo.types.load_report import LoadReport
from slime_ppo.types.rollout_batch import RolloutBatch
from slime_ppo.types.stats import Stats
from slime_ppo.types.step_plan import StepPlan
from slime_ppo.weight_sync.base import WeightSync


@dataclass(frozen=True)
class BatchHandle:
    """A rollout on its way through the stages: the batch, and the columns each stage's ranks have added.

    Both are references into whatever carries the data (an object store, or plain objects); the driver does not look in.
    `parts` holds one reference per producing rank and stage.
    """

    batch: object
    parts: tuple[object, ...] = ()

    def with_parts(self, parts: Sequence[object]) -> "BatchHandle":
        return BatchHandle(self.batch, (*self.parts, *parts))


class Tenant(Protocol):
    """Something that holds device memory and takes turns."""

    def wake(self) -> None: ...

    def offload(self) -> None: ...

    def resident_bytes(self) -> int: ...


class TrainGroup(Tenant, Protocol):
    """All ranks of one role."""

    def put(self, batch: RolloutBatch) -> BatchHandle:
        """Hand a rollout to where the ranks can read it."""
        ...

    def fetch(self, handle: BatchHandle) -> RolloutBatch:
        """The rollout with every column made so far, on the driver."""
        ...

    def compute_log_probs(self, handle: BatchHandle) -> tuple[BatchHandle, Stats]:
        """The actor's old log-probs, entropy, the reference's log-probs, and the weights and rejections of the rollout
        correction."""
        ...

    def compute_advantages(self, handle: BatchHandle, kl_coef: float) -> tuple[BatchHandle, Stats]:
        """Token rewards, returns and advantages, and with a critic its values: asked of the critic where there is one, else
        of the actor."""
        ...

    def train(self, handle: BatchHandle, plan: StepPlan, learning_rates: Sequence[float]) -> list[Stats]:
        """The planned optimizer steps, one Stats per step."""
        ...

    def save_hf(self, folder: str) -> None:
        """Write the weights as a Hugging Face folder."""
        ...

    def save_checkpoint(self, folder: str, *, in_background: bool) -> None:
        """Write weights, optimizer and random states into `folder`, which is made if it is not there: that of all ranks on all
        nodes. The role is awake. `in_background`: return as soon as the state is copied. Either way `finish_save` comes before
        the folder is used, and before the next save.

        Raises CheckpointError when it can't be written; the ranks go on.
        """
        ...

    def finish_save(self) -> None:
        """Return when everything of the last save is on disk, flushed. Does nothing when none is under way.

        Raises CheckpointError with the cause (disk full, read-only folder); the ranks go on.
        """
        ...

    def load_checkpoint(self, folder: str, *, with_optimizer: bool) -> LoadReport:
        """Take weights, and with the optimizer its state and the random states, from a folder written by `save_checkpoint`, also
        by other numbers of ranks. The role is awake.

        Raises CheckpointError that lists everything missing, unexpected or of another shape or type; then nothing is changed.
        """
        ...


def check_saved(problems: Sequence[str | None]) -> None:
    """Raise CheckpointError with what the ranks of a save, in order, say went wrong: the first of them, as all say the same."""
    found = [problem for problem in problems if problem is not None]
    if found:
        raise CheckpointError(found[0])


class SideBySide(Protocol):
    """Roles that train at the same time, each on devices of its own."""

    def train(
        self,
        handle: BatchHandle,
        plan: StepPlan,
        learning_rates: Mapping[RoleName, Sequence[float]],
        on_end: Callable[[RoleName], None],
    ) -> dict[RoleName, list[Stats]]:
        """The planned steps of the roles that have learning rates. `on_end` is told of a role when its last rank is done, before
        the others are; an error of one role is not kept back until the other's end."""
        ...


@dataclass(frozen=True)
class RunningEngine:
    """An engine, and how the weights reach it."""

    engine: RolloutEngine
    sync: WeightSync


@dataclass(frozen=True)
class RunningRoles:
    """What a launcher has brought up: no engine where rollouts come from files, no groups where nothing is trained. `check_alive`
    raises when a process of the run has died, for waits that would not notice. `side_by_side` is None where the roles share
    devices."""

    groups: Mapping[RoleName, TrainGroup]
    engine: RunningEngine | None
    check_alive: Callable[[], None]
    side_by_side: SideBySide | None


class Launcher(Protocol):
    """Whoever starts the ranks and the engine. On exit all processes that it started have ended, or will with this one."""

    returns_support: ClassVar[bool]

    def __enter__(self) -> Self: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /) -> None: ...

    @property
    def description(self) -> str:
        """Where the run is, for the start of its output."""
        ...

    def start(self, where: Callable[[], str]) -> RunningRoles:
        """Bring up all roles and the engine; `where` says the present place of the run, for messages."""
        ...
