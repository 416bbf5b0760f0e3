"""Train a language model by PPO, on a Ray cluster or on the ranks of torchrun.

python scripts/train_ppo.py --config configs/quickstart_cpu.yaml
python scripts/train_ppo.py --config configs/quickstart_cpu.yaml --dry-run
torchrun --nproc-per-node 2 scripts/train_ppo.py --config configs/quickstart_cpu.yaml --actor-num-gpus-per-node 2
ray job submit --working-dir . -- python scripts/train_ppo.py --config my.yaml --seed 1
"""

import os
import sys

from slime_ppo.command import start
from slime_ppo.config.cli import PPO
from slime_ppo.config.launcher import RankPlace

if __name__ == "__main__":
    sys.path.insert(0, os.getcwd())  # reward functions are found where the command is typed
    sys.exit(start(PPO, RankPlace.from_environment(os.environ)))
