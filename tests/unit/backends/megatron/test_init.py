"""What a rank is told when it cannot have its device."""

from unittest.mock import patch

import pytest

from slime_ppo.backends.megatron.init import init_rank
from slime_ppo.errors import ParallelError
from slime_ppo.parallel.layout import ParallelLayout
from slime_ppo.parallel.worker_settings import RankSettings


def test_init_rank_on_a_gpu_that_is_not_there_names_the_rank_and_what_it_sees() -> None:
    """--nproc-per-node above the GPUs of the node leaves its last ranks without one."""
    settings = RankSettings(
        rank=2, init_method="file:///unused", device="cuda", seed=0, num_threads=1, deterministic=False, collective_timeout_s=1.0
    )
    with (
        patch.dict("os.environ", {"CUDA_VISIBLE_DEVICES": ""}),
        patch("torch.cuda.device_count", return_value=0),
        pytest.raises(ParallelError, match=r"rank 2 computes on a GPU and sees none \(CUDA_VISIBLE_DEVICES is \)"),
    ):
        init_rank(settings, ParallelLayout(4))
