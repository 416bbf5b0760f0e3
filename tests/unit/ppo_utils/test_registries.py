"""The registries: what each name stands for, the user's own by dotted path, and that every path leads to a function."""

import inspect
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from slime_ppo.errors import ConfigError
from slime_ppo.ppo_utils.registries import (
    ADVANTAGE_ESTIMATORS,
    POLICY_LOSSES,
    EstimatorSpec,
    PolicyLossSpec,
    load,
    resolve_estimator,
    resolve_policy_loss,
)

FLAG = "--policy-loss"
PPO = POLICY_LOSSES.entries["ppo"]


@pytest.mark.parametrize(
    ("name", "critic", "whitens", "token_rewards", "groups"),
    [
        ("gae", True, True, True, False),
        ("grpo", False, False, False, True),
        ("rloo", False, False, False, True),
        ("reinforce_plus_plus", False, True, True, False),
        ("reinforce_plus_plus_baseline", False, False, False, True),
    ],
)
def test_resolve_estimator_says_what_it_needs(name: str, critic: bool, whitens: bool, token_rewards: bool, groups: bool) -> None:
    spec = resolve_estimator(name, origin="--advantage-estimator")
    assert spec.path == f"slime_ppo.ppo_utils.advantages.{name}_advantages"
    assert (spec.needs_critic, spec.whitens, spec.uses_token_rewards, spec.uses_groups) == (critic, whitens, token_rewards, groups)


@pytest.mark.parametrize(
    ("name", "path", "low", "high", "dual", "reduction"),
    [
        ("ppo", "policy_loss.clipped_policy_loss", 0.2, None, True, "token-mean"),
        ("gspo", "gspo.gspo_policy_loss", 3e-4, 4e-4, False, "seq-mean-token-mean"),
        ("cispo", "cispo.cispo_policy_loss", None, 0.2, False, "token-mean"),
    ],
)
def test_resolve_policy_loss_says_its_defaults(
    name: str, path: str, low: float | None, high: float | None, dual: bool, reduction: str
) -> None:
    spec = resolve_policy_loss(name, origin=FLAG)
    assert spec.path == f"slime_ppo.ppo_utils.{path}"
    assert (spec.eps_clip, spec.eps_clip_high, spec.dual_clip, spec.reduction) == (low, high, dual, reduction)


@pytest.mark.parametrize("spec", [*ADVANTAGE_ESTIMATORS.entries.values(), *POLICY_LOSSES.entries.values()], ids=lambda s: s.path)
def test_load_every_registered_path_is_a_function_of_inputs_and_settings(spec: EstimatorSpec | PolicyLossSpec) -> None:
    function = load(spec.path)
    assert function.__name__ == spec.path.rpartition(".")[2]
    expected = ["inputs", "settings"] if isinstance(spec, EstimatorSpec) else ["inputs", "clip"]
    assert list(inspect.signature(function).parameters) == expected


def test_resolve_unknown_name_lists_the_known_and_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"--advantage-estimator: no advantage estimator.*'grpp'.*mean 'grpo'.*Known: gae, grpo"):
        resolve_estimator("grpp", origin="--advantage-estimator")
    with pytest.raises(ConfigError, match=r"--policy-loss: no policy loss.*Known: cispo, gspo, ppo"):
        resolve_policy_loss("clip", origin=FLAG)


@pytest.fixture
def own_specs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of a user with specs of both kinds, and one thing that is neither."""
    (tmp_path / "my_specs.py").write_text(
        "from slime_ppo.ppo_utils.registries import ADVANTAGE_ESTIMATORS, POLICY_LOSSES\n"
        "LOSS, ESTIMATOR, NUMBER = POLICY_LOSSES.entries['ppo'], ADVANTAGE_ESTIMATORS.entries['gae'], 3\n",
        encoding="utf-8",
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    return "my_specs"


def test_resolve_dotted_path_gives_the_users_own_spec(own_specs: str) -> None:
    assert resolve_policy_loss(f"{own_specs}.LOSS", origin=FLAG) == POLICY_LOSSES.entries["ppo"]
    assert resolve_estimator(f"{own_specs}.ESTIMATOR", origin=FLAG) == ADVANTAGE_ESTIMATORS.entries["gae"]


BAD_SPECS: dict[str, tuple[Callable[[], object], str]] = {
    "estimator_path": (
        lambda: replace(ADVANTAGE_ESTIMATORS.entries["gae"], path="gae_advantages"),
        "the path of an EstimatorSpec: 'gae_advantages' is no dotted path; expected package.module.attribute",
    ),
    "loss_path": (lambda: replace(PPO, path="my/losses.py:loss"), "the path of a PolicyLossSpec: 'my/losses.py:loss' is no dotted"),
    "clip_zero": (lambda: replace(PPO, eps_clip=0.0), "PolicyLossSpec of .*clipped_policy_loss has eps_clip 0.0; expected .* <= 1"),
    "clip_above_1": (lambda: replace(PPO, eps_clip=1.5), "has eps_clip 1.5; expected a number > 0 and <= 1, or None"),
    "clip_nan": (lambda: replace(PPO, eps_clip=float("nan")), "has eps_clip nan"),
    "clip_high_negative": (lambda: replace(PPO, eps_clip_high=-0.2), "has eps_clip_high -0.2; expected a finite number > 0"),
    "clip_high_infinite": (lambda: replace(PPO, eps_clip_high=float("inf")), "has eps_clip_high inf"),
    "reduction": (
        lambda: PolicyLossSpec("a.b.c", eps_clip=0.2, eps_clip_high=None, dual_clip=False, reduction="mean"),  # type: ignore[arg-type]
        "PolicyLossSpec of a.b.c has reduction 'mean'; expected one of token-mean, seq-mean-token-mean",
    ),
}


@pytest.mark.parametrize("which", list(BAD_SPECS))
def test_spec_that_no_run_could_use_is_refused_when_it_is_made(which: str) -> None:
    make, message = BAD_SPECS[which]
    with pytest.raises(ConfigError, match=message):
        make()


def test_spec_at_the_ends_of_its_ranges_is_accepted() -> None:
    assert replace(PPO, eps_clip=1.0, eps_clip_high=1e-9).eps_clip == 1.0
    assert replace(PPO, eps_clip=None, eps_clip_high=None).eps_clip is None


def test_resolve_users_spec_that_is_refused_says_why_and_who_named_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_bad_spec.py").write_text(
        "from dataclasses import replace\n"
        "from slime_ppo.ppo_utils.registries import POLICY_LOSSES\n"
        "LOSS = replace(POLICY_LOSSES.entries['ppo'], reduction='mean')\n",
        encoding="utf-8",
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match="--policy-loss: my_bad_spec.LOSS cannot be used, .* has reduction 'mean'; expected one"):
        resolve_policy_loss("my_bad_spec.LOSS", origin=FLAG)


def test_resolve_dotted_path_to_another_kind_is_refused(own_specs: str) -> None:
    with pytest.raises(ConfigError, match=r"--policy-loss: my_specs\.ESTIMATOR is a EstimatorSpec; expected.*PolicyLossSpec"):
        resolve_policy_loss(f"{own_specs}.ESTIMATOR", origin=FLAG)
    with pytest.raises(ConfigError, match=r"my_specs\.NUMBER is a int; expected.*EstimatorSpec"):
        resolve_estimator(f"{own_specs}.NUMBER", origin=FLAG)
    with pytest.raises(ConfigError, match="has no 'MISSING'"):
        resolve_policy_loss(f"{own_specs}.MISSING", origin=FLAG)


def test_load_path_without_a_function_is_refused(own_specs: str) -> None:
    spec = replace(POLICY_LOSSES.entries["ppo"], path=f"{own_specs}.NUMBER")
    with pytest.raises(ConfigError, match=r"my_specs\.NUMBER, holds a int; expected a function"):
        load(spec.path)
