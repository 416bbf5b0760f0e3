"""The SGLang that `make setup` installs on a CPU, without its CUDA dependencies, can be imported beside Megatron and Ray."""

import subprocess
import sys

PROGRAM = """
import sglang
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs
params = SamplingParams(max_new_tokens=4, top_k=8)
import torch
print(sglang.__version__, params.top_k, torch.version.cuda)
"""


def test_sglang_of_the_cpu_list_imports_with_the_cpu_torch() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "0.5.23 8 None"
