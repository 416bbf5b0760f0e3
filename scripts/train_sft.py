"""Fine-tune a language model on given responses, on a Ray cluster or on the ranks of torchrun.

python scripts/train_sft.py --config configs/sft_cpu.yaml
python scripts/train_sft.py --config configs/sft_cpu.yaml --dry-run
torchrun --nproc-per-node 2 scripts/train_sft.py --config configs/sft_cpu.yaml --actor-num-gpus-per-node 2
ray job submit --working-dir . -- python scripts/train_sft.py --config my.yaml --seed 1
"""

import os
import sys

from slime_ppo.command import start
from slime_ppo.config.cli import SFT
from slime_ppo.config.launcher import RankPlace

if __name__ == "__main__":
    sys.exit(start(SFT, RankPlace.from_environment(os.environ)))
