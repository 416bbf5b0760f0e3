"""One rollout of both roles on one GPU against the same on the CPU, in float32. Needs CUDA; pytest does not collect it.

python tests/gpu/check_gpu.py            # reports the largest error of every figure; exit code 1 when one passes 1e-3

Also an error: an offload that leaves weights or gradients on the GPU, or freed blocks with this process's allocator.
"""

import argparse
import logging
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING
from unittest.mock import patch

import numpy as np

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))
from slime_ppo.config.ppo import PpoConfig  # noqa: E402

if TYPE_CHECKING:
    from slime_ppo.backends.megatron.role import MegatronRole

TOLERANCE = 1e-3
# by name: settings, and whether the sampler's supports are recorded
CASES = {
    "reward_kl": (PpoConfig(kl_coef=0.1), False),
    "entropy_on_supports": (PpoConfig(kl_coef=0.1, entropy_coef=0.02, eps_clip_c=1.05), True),
}
# what stands in for activations that the allocator keeps, and what it may hold offloaded: cuBLAS's workspaces
FREED_BYTES = 1 << 30
MAX_RESERVED_BYTES = 256 << 20
LOG = logging.getLogger("check_gpu")


def run_roles(device: str, name: str, folder: Path, out: Path) -> None:
    """One iteration of a case on `device`, its columns and step statistics into `out`."""
    from slime_ppo.backends.megatron.device import prepare_megatron

    prepare_megatron(device)
    import torch

    from slime_ppo.backends.megatron.actor import ActorRole
    from slime_ppo.backends.megatron.critic import CriticRole
    from slime_ppo.types.stats import Stats
    from tests.dist.backends.cases import Case, make_batch, make_plan

    ppo, restricted = CASES[name]
    folders = [str(folder / role) for role in ("actor", "critic", "reference")]
    case = Case(*folders, ppo, temperature=0.8, rendezvous=f"{out}.rendezvous")
    settings = {role: case.settings(0, role) for role in ("actor", "critic")}
    settings = {role: replace(one, rank=replace(one.rank, device=device)) for role, one in settings.items()}
    started = perf_counter()
    actor = ActorRole(settings["actor"], case.ppo, case.correction, case.temperature)
    with patch("slime_ppo.backends.megatron.role.init_rank", return_value=torch.device(device)):
        critic = CriticRole(settings["critic"], case.ppo)
    batch, plan = make_batch(restricted=restricted), make_plan()
    rates = [case.lr] * len(plan.steps)
    batch = batch.with_parts([actor.compute_log_probs(batch)[0]])
    batch = batch.with_parts([critic.compute_advantages(batch, case.ppo.kl_coef)[0]])
    steps: dict[str, list[Stats]] = {}
    for key, role in (("critic", critic), ("actor", actor)):
        check_offload(device, [actor, critic])
        steps[key] = role.train(batch, plan, rates)
    check_offload(device, [actor, critic])
    columns = ("old_log_probs", "ref_log_probs", "entropy", "values", "token_rewards", "advantages")
    figures = {column: getattr(batch, column) for column in columns}
    for key, found in steps.items():
        for figure in found[0].result():
            figures[f"{key}/{figure}"] = np.array([stats.result()[figure] for stats in found])
    np.savez(out, **figures)
    LOG.info(f"{name} on {device}: {perf_counter() - started:.1f} s, torch {torch.__version__}")


def check_offload(device: str, roles: "Sequence[MegatronRole]") -> None:
    """Offload and wake all roles; AssertionError when this process holds device memory in between."""
    import torch

    awake = sum(role.memory.resident_bytes() for role in roles)
    torch.empty(FREED_BYTES if device == "cuda" else 0, dtype=torch.uint8, device=device)
    for role in roles:
        role.memory.offload()
    left = sum(role.memory.resident_bytes() for role in roles)
    reserved = torch.cuda.memory_reserved() if device == "cuda" else 0
    LOG.info(f"{device}: roles hold {awake} bytes awake, {left} offloaded; the allocator then reserves {reserved}")
    if left or reserved > MAX_RESERVED_BYTES:
        raise AssertionError(
            f"offloaded, {left} bytes (expected 0) and {reserved} reserved (at most {MAX_RESERVED_BYTES}) are left"
        )
    for role in roles:
        role.memory.wake()


def compare(found: Path, expected: Path) -> bool:
    """Report the error of every figure relative to its largest value; True when all are within the tolerance."""
    own, other = np.load(found), np.load(expected)
    within = sorted(own.files) == sorted(other.files)
    for name in other.files:
        error = float(np.abs(own[name] - other[name]).max() / max(np.abs(other[name]).max(), 1e-2))
        within = within and error <= TOLERANCE
        LOG.info(f"{name:28s} {error:.1e}{'' if error <= TOLERANCE else '  FAILED'}")
    return within


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda", help="what is compared with the CPU")
    parser.add_argument("--only", nargs=3, metavar=("CASE", "FOLDER", "OUT"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    logging.basicConfig(format="%(message)s", stream=sys.stdout)
    LOG.setLevel(logging.INFO)  # and not the root's: Megatron says much at that level
    if arguments.only:
        run_roles(arguments.device, arguments.only[0], Path(arguments.only[1]), Path(arguments.only[2]))
        return 0
    from tests.dist.backends.cases import make_folders

    with tempfile.TemporaryDirectory() as folder:
        make_folders(Path(folder), tie=True)
        return 0 if all([check_case(name, arguments.device, folder) for name in CASES]) else 1


def check_case(name: str, device: str, folder: str) -> bool:
    """Run a case on `device` and on the CPU, and compare."""
    outs = []
    for index, kind in enumerate((device, "cpu")):
        outs.append(Path(folder) / f"{name}{index}.npz")
        # a process each: on the CPU megatron.core is imported through the shim
        command = [sys.executable, __file__, "--device", kind, "--only", name, folder, str(outs[-1])]
        subprocess.run(command, check=True, timeout=240)
    return compare(*outs)


if __name__ == "__main__":
    sys.exit(main())
