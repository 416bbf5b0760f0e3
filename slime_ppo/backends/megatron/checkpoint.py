"""Checkpoints of a role in Megatron's torch_dist format."""

from slime_ppo.backends.megatron.role import MegatronRole
from slime_ppo.types.load_report import LoadReport


def save_checkpoint(role: MegatronRole, folder: str, *, in_background: bool) -> None:
    """Write the state of the role."""
    raise NotImplementedError


def finish_save(role: MegatronRole) -> None:
    """Wait for the last save."""
    raise NotImplementedError


def load_checkpoint(role: MegatronRole, folder: str, *, with_optimizer: bool) -> LoadReport:
    """Take over the state in `folder`."""
    raise NotImplementedError
