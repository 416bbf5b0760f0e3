"""The command line: precedence, origins, mistakes, exit codes, and a help that imports nothing heavy."""

import subprocess
import sys
from pathlib import Path

import pytest

from slime_ppo.config.cli import ParsedCommand, parse_config, print_config_text, run_cli
from slime_ppo.config.root import OPTIONS
from slime_ppo.errors import ConfigError, RolloutError

REQUIRED = ("--hf-checkpoint", "model", "--prompt-data", "prompts.jsonl")
REPOSITORY = Path(__file__).resolve().parents[3]
QUICKSTART = "configs/quickstart_cpu.yaml"


def _yaml(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)


def _run(*argv: str) -> subprocess.CompletedProcess[str]:
    """A script of the shape of scripts/train_ppo.py, in a process of its own."""
    code = (
        "import sys\n"
        "from slime_ppo.config.cli import run_cli\n"
        "try:\n    status = run_cli(sys.argv[1:], lambda parsed: 0)\n"
        "finally:\n    heavy = {'torch', 'ray', 'megatron', 'transformers', 'numpy'} & set(sys.modules)\n"
        "    sys.stderr.write(f'heavy={sorted(heavy)}\\n')\n"
        "sys.exit(status)\n"
    )
    return subprocess.run([sys.executable, "-c", code, *argv], cwd=REPOSITORY, capture_output=True, text=True, check=False)


def test_parse_config_without_files_takes_flags_and_defaults_with_origins() -> None:
    parsed = parse_config([*REQUIRED, "--lr=1e-5", "--no-rollout-shuffle", "--critic-lr", "1e-3", "--rollout-top-k", "-1"])
    assert (parsed.config.optimizer.lr, parsed.config.data.shuffle, parsed.config.critic.lr) == (1e-5, False, 1e-3)
    assert parsed.config.rollout.rollout_top_k == -1
    origins = {key: parsed.origins[key] for key in ("optimizer.lr", "data.shuffle", "critic.lr", "run.seed")}
    assert origins == {
        "optimizer.lr": "--lr",
        "data.shuffle": "--no-rollout-shuffle",
        "critic.lr": "--critic-lr",
        "run.seed": "default",
    }
    assert list(parsed.origins) == [spec.key for spec in OPTIONS]
    assert (parsed.print_config, parsed.dry_run) == (False, False)


def test_parse_config_merges_files_left_to_right_and_flags_win(tmp_path: Path) -> None:
    first = _yaml(tmp_path, "a.yaml", "run:\n  seed: 1\n  num_rollout: 10\noptimizer:\n  lr: 1e-3\n")
    second = _yaml(tmp_path, "b.yaml", "run:\n  num_rollout: 20\n  save: here\n")
    parsed = parse_config([*REQUIRED, "--config", first, second, "--save", "there", "--print-config", "--dry-run"])
    run = parsed.config.run
    assert (run.seed, run.num_rollout, run.save, parsed.config.optimizer.lr) == (1, 20, "there", 1e-3)
    assert [parsed.origins[f"run.{name}"] for name in ("seed", "num_rollout", "save")] == [f"{first}:2", f"{second}:2", "--save"]
    assert (parsed.print_config, parsed.dry_run) == (True, True)
    again = parse_config([*REQUIRED, "--config", second, "--config", first])
    assert again.config.run.num_rollout == 10


def test_parse_config_null_on_the_command_line_undoes_a_file(tmp_path: Path) -> None:
    path = _yaml(tmp_path, "a.yaml", "critic:\n  lr: 1e-3\n")
    assert parse_config([*REQUIRED, "--config", path, "--critic-lr", "null"]).config.critic.lr is None


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        ((), ("--hf-checkpoint (or model.hf_checkpoint in a --config file)", "--prompt-data")),
        ((*REQUIRED, "--lrr", "1"), ("unknown flag --lrr", "Did you mean --lr?", "peak learning rate")),
        ((*REQUIRED, "--lrr=1"), ("unknown flag --lrr", "Did you mean --lr?")),
        ((*REQUIRED, "--num_rollout", "1"), ("unknown flag --num_rollout", "Did you mean --num-rollout?")),
        ((*REQUIRED, "--num-roll", "1"), ("unknown flag --num-roll", "Did you mean --num-rollout?")),
        ((*REQUIRED, "--no-shuffle"), ("unknown flag --no-shuffle", "Did you mean --no-rollout-shuffle?")),
        ((*REQUIRED, "--data.shuffle"), ("unknown flag --data.shuffle", "Did you mean --rollout-shuffle?")),
        ((*REQUIRED, "--critic-load-", "x"), ("Did you mean --critic-load?", "critic.load: local folder")),
        ((*REQUIRED, "--print-confg"), ("Did you mean --print-config?",)),
        ((*REQUIRED, "--zzzzzzzz"), ("unknown flag --zzzzzzzz", "`--help` lists the flags")),
        ((*REQUIRED, "--rollout-shuffle", "true"), ("'true' belongs to no flag", "--no-x for false")),
        ((*REQUIRED, "--lr"), ("--lr", "expected one argument")),
        ((*REQUIRED, "--lr", "fast"), ("--lr: optimizer.lr is 'fast', expected a number >= 0",)),
        ((*REQUIRED, "--lr", "inf"), ("--lr: optimizer.lr is inf, expected a number >= 0",)),
        ((*REQUIRED, "--seed", "1.5"), ("--seed: run.seed is '1.5', expected a whole number",)),
        ((*REQUIRED, "--seed", "null"), ("--seed: run.seed is 'null', expected a whole number",)),
        ((*REQUIRED, "--save", ""), ("--save: run.save is empty, expected a text",)),
        ((*REQUIRED, "--whiten-domain", "rolout"), ("expected one of rollout, step", "Did you mean rollout?")),
        ((*REQUIRED, "--rollout-temperature", "0"), ("expected a number > 0", "gradient would be exactly 0")),
        ((*REQUIRED, "--rollout-top-p", "0"), ("expected a number > 0 and <= 1", "gradient would be exactly 0")),
        ((*REQUIRED, "--rollout-top-p", "1.5"), ("expected a number > 0 and <= 1",)),
        ((*REQUIRED, "--rollout-engine", "vllm"), ("rollout.engine is vllm, expected one of embedded, sglang",)),
        ((*REQUIRED, "--eps-clip-c", "1"), ("expected a number > 1 or null",)),
        ((*REQUIRED, "--adaptive-lambd", "0"), ("expected a number > 0 or null",)),
        ((*REQUIRED, "--kl-target", "-1"), ("expected a number > 0 or null",)),
        ((*REQUIRED, "--kl-horizon", "0"), ("expected a whole number > 0 or null",)),
    ],
)
def test_parse_config_with_a_mistake_names_flag_and_fix(argv: tuple[str, ...], parts: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(argv)
    assert [part for part in parts if part not in str(caught.value)] == [], str(caught.value)


def test_parse_config_with_impossible_arithmetic_names_the_line_of_each_number(tmp_path: Path) -> None:
    path = _yaml(tmp_path, "a.yaml", "batch:\n  global_batch_size: 100\n")
    with pytest.raises(ConfigError) as caught:
        parse_config([*REQUIRED, "--config", path, "--rollout-batch-size", "96"])
    assert f"--global-batch-size 100 ({path}:2) does not divide the 96 samples" in str(caught.value)
    assert "--rollout-batch-size 96 x --n-samples-per-prompt 1 (default)" in str(caught.value)


def test_run_cli_returns_the_status_of_main() -> None:
    assert run_cli(REQUIRED, lambda parsed: parsed.config.run.num_rollout) == 25


def test_run_cli_turns_another_of_our_errors_into_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    def fail(parsed: ParsedCommand) -> int:
        raise RolloutError("the engine is gone")

    assert run_cli(REQUIRED, fail) == 1
    assert capsys.readouterr().err == "error: the engine is gone\n"


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (
            (*REQUIRED, "--golbal-batch-size", "8"),
            "error: command line: unknown flag --golbal-batch-size. Did you mean --global-batch-size?",
        ),
        ((*REQUIRED, "--global-batch-size", "100"), "error: --global-batch-size 100 does not divide the 128 samples"),
        ((*REQUIRED, "--config", "nowhere.yaml"), "error: --config nowhere.yaml: cannot be read"),
        (
            (*REQUIRED, "--advantage-estimator", "grppo"),
            "error: --advantage-estimator: no advantage estimator is called 'grppo'; did you mean 'grpo'?",
        ),
        ((*REQUIRED, "--policy-loss", "cispoo"), "error: --policy-loss: no policy loss is called 'cispoo'; did you mean 'cispo'?"),
    ],
)
def test_command_with_a_mistake_exits_2_with_one_line_and_no_heavy_import(argv: tuple[str, ...], part: str) -> None:
    done = _run(*argv)
    assert done.returncode == 2
    first, second = done.stderr.splitlines()
    assert first.startswith(part)
    assert second == "heavy=[]"


def test_command_help_lists_every_flag_and_imports_nothing_heavy() -> None:
    done = _run("--help")
    assert done.returncode == 0
    assert done.stderr == "heavy=[]\n"
    assert [spec.flag for spec in OPTIONS if f"  {spec.flag}" not in done.stdout] == []


def test_print_config_text_is_yaml_of_the_same_config_with_origins(tmp_path: Path) -> None:
    parsed = parse_config([*REQUIRED, "--lr", "1e-5"])
    text = print_config_text(parsed)
    [line] = [line for line in text.splitlines() if line.startswith("  lr: ") and "1.0e-05" in line]
    assert line.endswith("# --lr")
    assert len({line.index("  #") for line in text.splitlines() if "  #" in line}) == 1
    again = parse_config(["--config", _yaml(tmp_path, "a.yaml", text)])
    assert again.config == parsed.config


def test_resolved_yaml_of_a_parsed_config_parses_to_the_same_config(tmp_path: Path) -> None:
    parsed = parse_config(["--config", str(REPOSITORY / QUICKSTART), "--seed", "7"])
    assert parse_config(["--config", _yaml(tmp_path, "config.yaml", parsed.config.to_yaml())]).config == parsed.config


def test_quickstart_recipe_has_the_measured_numbers() -> None:
    config = parse_config(["--config", str(REPOSITORY / QUICKSTART)]).config
    assert (config.samples_per_rollout, config.steps_per_rollout, config.run.num_rollout) == (128, 2, 25)
    assert (config.rollout.rollout_max_response_len, config.rollout.rollout_temperature) == (16, 1.0)
    assert (config.role("actor").lr, config.role("critic").lr, config.role("actor").adam_betas) == (1e-3, 1e-3, (0.9, 0.95))
    assert (config.role("actor").lr_warmup_iters, config.role("critic").lr_warmup_iters) == (10, 0)
    assert (config.ppo.kl_coef, config.ppo.lambd, config.ppo.gamma, config.ppo.num_critic_only_steps) == (0.02, 0.95, 1.0, 3)
    assert (config.ppo.eps_clip, config.ppo.value_clip, config.optimizer.clip_grad, config.optimizer.weight_decay) == (
        0.2,
        0.2,
        1,
        0,
    )
