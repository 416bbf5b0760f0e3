"""Impossible and dangerous layouts as a user types them, each refused before a device is used, with both numbers and a way out."""

from pathlib import Path

import pytest

from slime_ppo.config.cli import parse_config
from slime_ppo.config.launcher import RankPlace, chosen_launcher
from slime_ppo.config.preflight import preflight
from slime_ppo.errors import ConfigError
from tests.helpers.configs import write_model_folder

# (flags, parts of the message)
ROWS: dict[str, tuple[str, tuple[str, ...]]] = {
    "tp above the ranks": (
        "--tensor-model-parallel-size 2",
        ("the actor has 1 ranks", "--tensor-model-parallel-size 2 does not divide", "Use 1, or 2 ranks"),
    ),
    "tp that does not divide the ranks": (
        "--actor-num-gpus-per-node 6 --tensor-model-parallel-size 4",
        ("the actor has 6 ranks", "--tensor-model-parallel-size 4 does not divide", "Use 1 or 2 or 3 or 6, or 8 ranks"),
    ),
    "tp x cp above the ranks": (
        "--actor-num-gpus-per-node 2 --tensor-model-parallel-size 2 --context-parallel-size 2",
        ("--tensor-model-parallel-size 2 x --context-parallel-size 2 = 4 does not divide", "or 4 ranks"),
    ),
    "tp x pp above the ranks": (
        "--actor-num-gpus-per-node 2 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2",
        ("--tensor-model-parallel-size 2 x --pipeline-model-parallel-size 2 = 4 does not divide", "or 4 ranks"),
    ),
    "critic on fewer ranks than its stages": (
        "--actor-num-gpus-per-node 2 --pipeline-model-parallel-size 2 --critic-num-gpus-per-node 1",
        ("the critic has 1 ranks", "--critic-pipeline-model-parallel-size 2 does not divide", "Use 1, or 2 ranks"),
    ),
    "virtual stages without a pipeline": (
        "--num-virtual-stages-per-pipeline-rank 2",
        ("--num-virtual-stages-per-pipeline-rank 2", "--pipeline-model-parallel-size is 1", "or use --num-virtual-stages"),
    ),
    "critic without the actor's pipeline but with its virtual stages": (
        "--actor-num-gpus-per-node 2 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 "
        "--critic-pipeline-model-parallel-size 1",
        ("--critic-pipeline-model-parallel-size is 1", "or use --critic-num-virtual-stages-per-pipeline-rank 1"),
    ),
    "more stages than layers": (
        "--actor-num-gpus-per-node 8 --pipeline-model-parallel-size 8",
        ("--pipeline-model-parallel-size 8", "does not divide the 4 layers", "Use 1 or 2 or 4 stages"),
    ),
    "stages that do not divide the layers": (
        "--actor-num-gpus-per-node 3 --pipeline-model-parallel-size 3 --global-batch-size 32",
        ("--pipeline-model-parallel-size 3", "does not divide the 4 layers", "Use 1 or 2 or 4 stages"),
    ),
    "virtual stages that do not divide the layers": (
        "--actor-num-gpus-per-node 2 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 3",
        ("--num-virtual-stages-per-pipeline-rank 3 = 6 stages", "the 4 layers", "Use 1 or 2 or 4 stages"),
    ),
    "tp that does not divide the key-value heads": (
        "--actor-num-gpus-per-node 4 --tensor-model-parallel-size 4",
        ("--tensor-model-parallel-size 4", "the 2 key-value heads", "Use 1 or 2"),
    ),
    "tensor-parallel group over two nodes": (
        "--actor-num-nodes 2 --tensor-model-parallel-size 2",
        ("--tensor-model-parallel-size 2 does not divide the 1 ranks of the actor on each of 2 nodes", "on two nodes"),
    ),
    "no sequence parallelism": (
        "--actor-num-gpus-per-node 2 --tensor-model-parallel-size 2 --no-sequence-parallel",
        ("--no-sequence-parallel with tensor-parallel size 2", "Leave the option out"),
    ),
    "nothing to split by sequence parallelism": (
        "--sequence-parallel",
        ("--sequence-parallel", "tensor-parallel size 1", "nothing to split"),
    ),
    "steps that dp does not divide": (
        "--actor-num-gpus-per-node 3 --global-batch-size 128",
        ("--global-batch-size 128 is not a multiple of the 3 data-parallel ranks", "3 ranks / tensor-parallel size 1"),
    ),
    "token cap without dynamic batches": (
        "--max-tokens-per-gpu 4096",
        ("--max-tokens-per-gpu 4096", "--use-dynamic-batch-size"),
    ),
    "dynamic batches without a token cap": (
        "--use-dynamic-batch-size",
        ("--use-dynamic-batch-size needs --max-tokens-per-gpu", "The longest sample has 48"),
    ),
    "another layout for the critic without Ray": (
        "--launcher local --actor-num-gpus-per-node 2 --critic-pipeline-model-parallel-size 2",
        ("the actor has 1 pipeline stages, the critic 2", "their layouts must be equal", "--launcher ray"),
    ),
    "more ranks than processes without Ray": (
        "--launcher local --actor-num-gpus-per-node 2",
        ("the run asks for 2 ranks", "there is 1", "torchrun"),
    ),
    "devices of their own without Ray": (
        "--launcher local --no-colocate",
        ("--no-colocate without Ray", "share their devices"),
    ),
    "transformer-engine on a CPU": (
        "--device cpu --transformer-impl transformer_engine",
        ("--transformer-impl transformer_engine", "CPU"),
    ),
}

# the same for a mixture of 8 experts of 96 columns
MIXTURE_ROWS: dict[str, tuple[str, tuple[str, ...]]] = {
    "more expert-parallel ranks than ranks": (
        "--expert-model-parallel-size 2",
        ("the actor has 1 ranks", "--expert-model-parallel-size 2 does not divide", "Use 1, or 2 ranks"),
    ),
    "ep that does not divide the experts": (
        "--actor-num-gpus-per-node 3 --expert-model-parallel-size 3 --global-batch-size 96 --rollout-batch-size 96",
        ("--expert-model-parallel-size 3", "does not divide the 8 experts", "Use 1 or 2"),
    ),
    "etp that does not divide the columns of an expert": (
        "--actor-num-gpus-per-node 5 --expert-tensor-parallel-size 5 --global-batch-size 80 --rollout-batch-size 80",
        ("--expert-tensor-parallel-size 5", "does not divide the 96 FFN columns of an expert", "Use 1 or 2 or 3 or 4"),
    ),
    "what megatron-core trains wrongly": (
        "--actor-num-gpus-per-node 2 --tensor-model-parallel-size 2 --expert-tensor-parallel-size 1",
        (
            "--expert-tensor-parallel-size 1 of the actor differs from --tensor-model-parallel-size 2",
            "over the wrong ranks, silently",
            "--expert-model-parallel-size 2 or more",
        ),
    ),
}
MIXTURE = {
    "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "norm_topk_prob": True,
}  # fmt: skip


@pytest.fixture
def command(tmp_path: Path) -> str:
    return _command(tmp_path)


@pytest.fixture
def mixture_command(tmp_path: Path) -> str:
    return _command(tmp_path / "mixture", **MIXTURE)


def _command(folder: Path, **changes: object) -> str:
    """Flags that alone make a run: the table's are added."""
    write_model_folder(folder / "model", **changes)
    (folder / "prompts.jsonl").write_text('{"prompt": "The clerk"}\n', encoding="utf-8")
    flags = {
        "hf-checkpoint": folder / "model",
        "prompt-data": folder / "prompts.jsonl",
        "save": folder / "run",
        "rm-type": "length",
        "rollout-max-prompt-len": 16,
        "rollout-max-response-len": 32,
        "init-value-head": "zeros",
    }
    return " ".join(f"--{name} {value}" for name, value in flags.items())


def _refusal(command: str) -> str:
    """Why the command is refused, in the order of a real start; empty when it is not."""
    try:
        config = parse_config(command.split()).config
        chosen_launcher(config, RankPlace())
        preflight(config)
    except ConfigError as error:
        return str(error)
    return ""


def test_command_without_the_tables_flags_is_not_refused(command: str, mixture_command: str) -> None:
    assert _refusal(command) == _refusal(mixture_command) == ""


@pytest.mark.parametrize("name", list(ROWS))
def test_bad_layout_is_refused_with_both_numbers_and_a_way_out(command: str, name: str) -> None:
    flags, parts = ROWS[name]
    message = _refusal(f"{command} {flags}")
    for part in parts:
        assert part in message


@pytest.mark.parametrize("name", list(MIXTURE_ROWS))
def test_bad_layout_of_experts_is_refused_with_both_numbers_and_a_way_out(
    mixture_command: str, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    flags, parts = MIXTURE_ROWS[name]
    monkeypatch.setattr("slime_ppo.config.layout_checks._megatron_version", lambda: "0.16.1")
    message = _refusal(f"{mixture_command} {flags}")
    for part in parts:
        assert part in message


def test_table_has_the_twenty_rows_it_promises() -> None:
    assert len(ROWS) >= 20
