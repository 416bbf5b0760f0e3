"""What the tests of checkpoints run on each rank of the pool."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel

from slime_ppo.backends.megatron.checkpoint import finish_save, load_checkpoint, save_checkpoint
from slime_ppo.backends.megatron.critic import CriticRole
from slime_ppo.backends.megatron.role import MegatronRole
from slime_ppo.backends.megatron.stored_state import steps_done
from slime_ppo.errors import CheckpointError
from slime_ppo.types.load_report import LoadReport
from tests.dist.backends.cases import Case, make_plan, make_scored_batch
from tests.dist.backends.ranks import Tensors, _data, _start, _start_actor, _whole

BOTH = ("actor", "critic")


@dataclass(frozen=True)
class Resumed:
    """What one role was told, and its whole weights after three more steps."""

    report: LoadReport | None
    weights: Tensors


def _roles(case: Case, names: Sequence[str]) -> dict[str, MegatronRole]:
    """One role, or both in this process."""
    if len(names) == 2:
        return dict(zip(names, _start(case), strict=True))
    return {names[0]: _start_actor(case) if names[0] == "actor" else _start_critic(case)}


def _start_critic(case: Case) -> CriticRole:
    rank = dist.get_rank()
    dist.destroy_process_group()
    return CriticRole(case.settings(rank, "critic"), case.ppo)


def _train(role: MegatronRole, case: Case, seed: int) -> None:
    role.train(make_scored_batch(seed), make_plan(), [case.lr] * 3)


def save_and_go_on(case: Case, folder: str, in_background: bool = False, names: Sequence[str] = BOTH) -> dict[str, Resumed]:
    """Train the roles, save each in a folder of its name, and train on: in the background, while the file is written."""
    after = {}
    for name, role in _roles(case, names).items():
        _train(role, case, 0)
        save_checkpoint(role, f"{folder}/{name}", in_background=in_background)
        _train(role, case, 1)
        finish_save(role)
        after[name] = Resumed(None, _whole(role, _data))
    return after


def load_and_go_on(case: Case, folder: str, again: str | None = None, names: Sequence[str] = BOTH) -> dict[str, Resumed]:
    """Load the roles, save what came in another folder, train as `save_and_go_on` has done after its save."""
    after = {}
    for name, role in _roles(case, names).items():
        reference = None if role.reference is None else [copy.clone() for copy in role.reference._host]
        report = load_checkpoint(role, f"{folder}/{name}", with_optimizer=True)
        if role.reference is not None and not all(map(torch.equal, reference, role.reference._host)):
            raise AssertionError("a load has changed the reference")
        if again is not None:
            save_checkpoint(role, f"{again}/{name}", in_background=False)
        _train(role, case, 1)
        after[name] = Resumed(report, _whole(role, _data))
    return after


def load_weights(case: Case, folder: str) -> tuple[Tensors, bool]:
    """(the actor's whole weights from a checkpoint without its optimizer, main parameters equal them)."""
    role = _start_actor(case)
    load_checkpoint(role, folder, with_optimizer=False)
    mains = [main for part in role.optimizer.chained_optimizers for group in part.param_groups for main in group["params"]]
    parameters = torch.cat([parameter.data.float().view(-1) for model in role.models for parameter in model.parameters()])
    fresh = not any(part.optimizer.state for part in role.optimizer.chained_optimizers)
    return _whole(role, _data), fresh and all(bool(torch.isin(main.data, parameters).all()) for main in mains)


def start(case: Case) -> tuple[Tensors, np.ndarray]:
    """(the critic's whole weights as it starts, its random state)."""
    role = _start_critic(case)
    return _whole(role, _data), torch.get_rng_state().numpy()


def refusals(case: Case, folders: Sequence[str], name: str, with_optimizer: bool = True) -> list[str]:
    """Why the role does not take each of the checkpoints; an AssertionError when it does, or is another one after it."""
    role = _roles(case, [name])[name]
    before, found = _whole(role, _data), []
    for folder in folders:
        try:
            load_checkpoint(role, folder, with_optimizer=with_optimizer)
        except CheckpointError as error:
            found.append(str(error))
        else:
            raise AssertionError(f"{folder} was loaded")
    after = _whole(role, _data)
    if not all(np.array_equal(after[name], before[name]) for name in before) or steps_done(role.optimizer):
        raise AssertionError(f"a load that was refused has changed the role: {found}")
    return found


def failed_save(case: Case, folder: str, again: str) -> tuple[str, str]:
    """What both ways of saving into `folder`, where it can't be done, say; after it the actor trains and saves `again`."""
    role, problems = _start_actor(case), []
    for in_background in (False, True):
        try:
            save_checkpoint(role, f"{folder}/{in_background}", in_background=in_background)
            finish_save(role)
        except CheckpointError as error:
            problems.append(str(error))
    _train(role, case, 0)
    save_checkpoint(role, again, in_background=False)
    return problems[0], problems[1]


def rng_after_load(case: Case, folder: str) -> tuple[bool, list[bool]]:
    """(the random states of the save are there again after a load; the same after loads of what ranks on another kind of device
    have saved, and of what says nothing of its ranks)."""
    role = _start_actor(case)
    torch.manual_seed(1234 + dist.get_rank())
    tensor_parallel.get_cuda_rng_tracker().add("test", 99 + dist.get_rank())
    saved = torch.get_rng_state(), tensor_parallel.get_cuda_rng_tracker().get_states()
    save_checkpoint(role, folder, in_background=False)

    def restored() -> bool:
        torch.manual_seed(7)
        tensor_parallel.get_cuda_rng_tracker().reset()
        report = load_checkpoint(role, folder, with_optimizer=True)
        states = tensor_parallel.get_cuda_rng_tracker().get_states()
        equal = states.keys() == saved[1].keys() and all(torch.equal(states[name], saved[1][name]) for name in states)
        equal = equal and torch.equal(torch.get_rng_state(), saved[0])
        if report.restored_rng != equal:
            raise AssertionError(f"the load reports {report.restored_rng}, and the states are the saved ones: {equal}")
        return equal

    as_saved, others = restored(), []
    for change in (lambda own: own["ranks"].update(device={"cpu": "cuda"}[own["ranks"]["device"]]), lambda own: own.pop("ranks")):
        dist.barrier()
        if dist.get_rank() == 0:
            common = torch.load(f"{folder}/common.pt", weights_only=True)
            change(common["slime_ppo"])
            torch.save(common, f"{folder}/common.pt")
        dist.barrier()
        others.append(restored())
    return as_saved, others


def load_by_megatron(case: Case, folder: str) -> Resumed:
    """The actor as Megatron's own code loads it from our checkpoint, trained as `load_and_go_on`."""
    role = _start_actor(case)
    _load_by_megatron(role, folder)
    _train(role, case, 1)
    return Resumed(None, _whole(role, _data))


def refusal_by_megatron(case: Case, folder: str) -> str:
    """Why Megatron's own code does not load the critic from our checkpoint, which is made in `folder`."""
    role = _start_critic(case)
    _train(role, case, 0)
    save_checkpoint(role, folder, in_background=False)
    try:
        _load_by_megatron(role, folder)
    except RuntimeError as error:
        return str(error)
    raise AssertionError("it was loaded")


def _load_by_megatron(role: MegatronRole, folder: str) -> None:
    [model] = role.models
    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "non_homogeneous_layers": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    asked = {"model": model.sharded_state_dict(metadata=metadata)}
    asked["optimizer"] = role.optimizer.sharded_state_dict(asked, is_loading=True, metadata=metadata)
    state = dist_checkpointing.load(asked, folder)
    model.load_state_dict(state["model"], strict=False)
    role.optimizer.load_state_dict(state["optimizer"])
