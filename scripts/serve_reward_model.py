"""Serve a classification model with one label as a reward model, by SGLang.

python scripts/serve_reward_model.py models/my_rm --port 30000
python scripts/train_ppo.py --config my.yaml --rm-type reward_model --rm-url http://127.0.0.1:30000

The folder is one that transformers has saved: an architecture that ends with ForSequenceClassification, weights as safetensors.
Where SGLang would give its score a random bias, links to it with a zero bias are served (slime_ppo/rewards/classifier_folder.py
tells why). The server ends with this process.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

import torch

from slime_ppo.config.api_key import read_api_key
from slime_ppo.errors import CheckpointError, ConfigError, SlimePpoError
from slime_ppo.orchestration.interrupts import Interrupted, interrupts_raise
from slime_ppo.rewards.classifier_folder import (
    check_one_label,
    lacks_score_bias,
    link_with_zero_bias,
    read_classifier_config,
    saved_dtype,
)
from slime_ppo.rollout.sglang.server import LocalServer
from slime_ppo.rollout.sglang.server_args import ServerSpec

_WATCH_S = 0.5


def main(argv: list[str]) -> int:
    """Serve until a signal comes or the server dies. Returns the exit code."""
    given = _parser().parse_args(argv)
    try:
        with interrupts_raise(), tempfile.TemporaryDirectory(prefix="reward_model_") as links:
            return serve(_spec(given, _whole_folder(Path(given.folder), Path(links))))
    except Interrupted as interrupt:
        return interrupt.exit_code
    except SlimePpoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError | CheckpointError) else 1


def serve(spec: ServerSpec) -> int:
    """Start the server, print its address, and wait until it is dead."""
    server = LocalServer(spec)
    try:
        print(f"starting, the log is {spec.log_file}", flush=True)
        url = server.start().url
        print(f"serving {spec.hf_folder} at {url}\nuse it with: --rm-type reward_model --rm-url {url}", flush=True)
        while (problem := server.problem()) is None:
            time.sleep(_WATCH_S)
    finally:
        server.stop()
    print(f"error: the server is dead: {problem}", file=sys.stderr)
    return 1


def _whole_folder(folder: Path, links: Path) -> Path:
    """`folder`, or where its score lacks the bias, `links` made the same model with a zero bias."""
    check_one_label(folder)
    if not lacks_score_bias(folder):
        return folder.resolve()
    link_with_zero_bias(folder, links)
    return links


def _spec(given: argparse.Namespace, folder: Path) -> ServerSpec:
    config = read_classifier_config(folder)
    if config.max_positions is None:
        raise CheckpointError(f"{given.folder}/config.json tells no max_position_embeddings, expected the longest input")
    return ServerSpec(
        hf_folder=str(folder),
        dtype=saved_dtype(folder) if given.dtype == "auto" else given.dtype,
        device=("cuda" if torch.cuda.is_available() else "cpu") if given.device == "auto" else given.device,
        tp_size=given.tp_size,
        host=given.host,
        port=given.port,
        max_positions=config.max_positions,
        api_key=read_api_key(given.api_key_file, flag="--api-key-file"),
        is_reward_model=True,
        kv_tokens=given.kv_tokens,
        log_file=given.log_file,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("folder", metavar="FOLDER", help="model folder")
    parser.add_argument("--port", type=int, help="a free one is taken when none is given")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at [127.0.0.1: this machine only]")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto", help="auto = cuda when there is one")
    parser.add_argument("--dtype", choices=["auto", "float32", "bfloat16", "float16"], default="auto", help="auto = as saved")
    parser.add_argument("--tp-size", type=int, default=1, help="GPUs that share the model [1]")
    parser.add_argument("--api-key-file", metavar="FILE", help="file with a key that requests must carry (--rm-api-key-file)")
    parser.add_argument("--log-file", default="reward_model.log", metavar="FILE", help="what the server writes [reward_model.log]")
    parser.add_argument("--kv-tokens", type=int, help="size of the KV cache in tokens [what fits into GPU memory]")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
