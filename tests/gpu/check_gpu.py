"""One rollout of both roles on one GPU against the same on the CPU, in float32. Needs CUDA; pytest does not collect it.

python tests/gpu/check_gpu.py            # reports the largest error of every figure; exit code 1 when one passes 1e-3
"""

import argparse
import logging
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from unittest.mock import patch

import numpy as np

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))
TOLERANCE = 1e-3
LOG = logging.getLogger("check_gpu")


def run_roles(device: str, folder: Path, out: Path) -> None:
    """One iteration on `device`, its columns and step statistics into `out`."""
    from slime_ppo.backends.megatron.device import prepare_megatron

    prepare_megatron(device)
    import torch

    from slime_ppo.backends.megatron.actor import ActorRole
    from slime_ppo.backends.megatron.critic import CriticRole
    from slime_ppo.config.ppo import PpoConfig
    from slime_ppo.types.stats import Stats
    from tests.dist.backends.cases import Case, make_batch, make_plan

    names = [str(folder / name) for name in ("actor", "critic", "reference")]
    case = Case(*names, PpoConfig(kl_coef=0.1), rendezvous=f"{out}.rendezvous")
    settings = {role: case.settings(0, role) for role in ("actor", "critic")}
    settings = {role: replace(one, rank=replace(one.rank, device=device)) for role, one in settings.items()}
    started = perf_counter()
    actor = ActorRole(settings["actor"], case.ppo, case.temperature)
    with patch("slime_ppo.backends.megatron.role.init_rank", return_value=torch.device(device)):
        critic = CriticRole(settings["critic"], case.ppo)
    batch, plan = make_batch(), make_plan()
    rates = [case.lr] * len(plan.steps)
    batch = batch.with_parts([actor.compute_log_probs(batch)[0]])
    batch = batch.with_parts([critic.compute_advantages(batch, case.ppo.kl_coef)[0]])
    steps: dict[str, list[Stats]] = {}
    for name, role in (("critic", critic), ("actor", actor)):
        role.memory.offload()
        left = role.memory.resident_bytes()
        role.memory.wake()
        steps[name] = role.train(batch, plan, rates)
        LOG.info(f"{device}: {name} holds {role.memory.resident_bytes()} bytes awake, {left} offloaded")
    figures = {name: getattr(batch, name) for name in ("old_log_probs", "ref_log_probs", "entropy", "values", "advantages")}
    for name, found in steps.items():
        for key in found[0].result():
            figures[f"{name}/{key}"] = np.array([stats.result()[key] for stats in found])
    np.savez(out, **figures)
    LOG.info(f"{device}: {perf_counter() - started:.1f} s, torch {torch.__version__}")


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
    parser.add_argument("--only", nargs=2, metavar=("FOLDER", "OUT"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    logging.basicConfig(format="%(message)s", stream=sys.stdout)
    LOG.setLevel(logging.INFO)  # and not the root's: Megatron says much at that level
    if arguments.only:
        run_roles(arguments.device, Path(arguments.only[0]), Path(arguments.only[1]))
        return 0
    from tests.dist.backends.cases import make_folders

    with tempfile.TemporaryDirectory() as folder:
        make_folders(Path(folder), tie=True)
        outs = []
        for name, device in (("found", arguments.device), ("expected", "cpu")):
            outs.append(Path(folder) / f"{name}.npz")
            # a process each: on the CPU megatron.core is imported through the shim
            command = [sys.executable, __file__, "--device", device, "--only", folder, str(outs[-1])]
            subprocess.run(command, check=True, timeout=240)
        return 0 if compare(*outs) else 1


if __name__ == "__main__":
    sys.exit(main())
