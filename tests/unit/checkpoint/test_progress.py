"""What a checkpoint says of the loop, and what a resumed loop takes from it."""

import json
from dataclasses import replace

from slime_ppo.checkpoint.progress import Progress
from slime_ppo.config.ppo import PpoConfig
from slime_ppo.ppo_utils.kl_controller import AdaptiveKL, FixedKL
from tests.helpers.saved_runs import make_sample

ADAPTIVE = PpoConfig(kl_controller="adaptive", kl_coef=0.1, kl_target=1.0, kl_horizon=64.0)
SAMPLES = (make_sample(4, full=True),)
STOPPED = Progress(
    kl=AdaptiveKL(0.125, target=1.0, horizon=64.0),
    prompts={"epoch": 1, "position": 3},
    rollout_id=7,
    version=5,
    skipped_in_a_row={"actor": 2, "critic": 1},
    samples=SAMPLES,
)


def test_restored_from_what_was_saved_is_the_same_progress() -> None:
    state = json.loads(json.dumps(STOPPED.state_dict()))
    assert Progress.restored(state, SAMPLES, ADAPTIVE) == STOPPED


def test_restored_with_a_fixed_beta_has_that_of_the_config_and_all_else_as_saved() -> None:
    restored = Progress.restored(STOPPED.state_dict(), SAMPLES, PpoConfig(kl_coef=0.3))
    assert restored == replace(STOPPED, kl=FixedKL(0.3))


def test_samples_come_with_the_place_behind_their_draw_and_leave_when_they_have_trained() -> None:
    progress = Progress.start(ADAPTIVE, {"position": 0})
    progress.has_collected(list(SAMPLES), {"position": 8})
    assert (progress.rollout_id, progress.samples, progress.prompts) == (0, SAMPLES, {"position": 8})
    progress.has_trained()
    assert (progress.rollout_id, progress.samples, progress.prompts) == (1, (), {"position": 8})
