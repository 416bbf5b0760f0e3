"""What the tests of checkpoints run on each rank of the pool."""

from slime_ppo.backends.megatron.checkpoint import finish_save, load_checkpoint, save_checkpoint
from slime_ppo.types.load_report import LoadReport
from tests.dist.backends.cases import Case, make_plan, make_scored_batch
from tests.dist.backends.ranks import Tensors, _data, _start, _whole


def save(case: Case, folder: str, *, in_background: bool = False) -> list[Tensors]:
    """Train both roles, save them in `folder`/actor and /critic, train again."""
    after = []
    roles = dict(zip(("actor", "critic"), _start(case), strict=True))
    for name, role in roles.items():
        role.train(make_scored_batch(), make_plan(), [case.lr] * 3)
        save_checkpoint(role, f"{folder}/{name}", in_background=in_background)
        role.train(make_scored_batch(1), make_plan(), [case.lr] * 3)
        finish_save(role)
        after.append(_whole(role, _data))
    return after


def load(case: Case, folder: str, again: str | None = None) -> list[tuple[LoadReport, Tensors]]:
    """Load both roles, save them `again`, train as `save` has done after it."""
    after = []
    roles = dict(zip(("actor", "critic"), _start(case), strict=True))
    for name, role in roles.items():
        report = load_checkpoint(role, f"{folder}/{name}", with_optimizer=True)
        if again is not None:
            save_checkpoint(role, f"{again}/{name}", in_background=False)
        role.train(make_scored_batch(1), make_plan(), [case.lr] * 3)
        after.append((report, _whole(role, _data)))
    return after
