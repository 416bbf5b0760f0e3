"""Scores of a real SGLang server, started by `scripts/serve_reward_model.py` on a Qwen2 classifier that transformers has saved."""

import json
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification

from slime_ppo.config.reward import RewardConfig
from slime_ppo.data.tokenizer import load_tokenizer
from slime_ppo.errors import ConfigError
from slime_ppo.rewards.resolve import resolve_reward
from slime_ppo.rewards.runner import RewardOutcome, RewardRunner
from slime_ppo.types.sample import FinishReason, Prompt, Sample, one_version
from tests.helpers.tiny_classifier import MAX_POSITION, VOCAB_SIZE, make_tiny_classifier
from tests.helpers.tiny_llama import EOS_ID

REPOSITORY = Path(__file__).resolve().parents[2]
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Served:
    """A running server, the folder that the script was given, and the file of its key."""

    url: str
    folder: Path
    key_file: Path

    def post(self, path: str, body: dict[str, object] | None = None) -> dict[str, object]:
        """The server's answer; a GET without a body."""
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self.key_file.read_text(encoding='utf-8')}"}
        content = None if body is None else json.dumps(body).encode()
        with urllib.request.urlopen(urllib.request.Request(self.url + path, content, headers), timeout=60) as answer:
            found: dict[str, object] = json.loads(answer.read())
        return found


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    home = tmp_path_factory.mktemp("reward_model")
    folder, key_file, log = make_tiny_classifier(home / "saved"), home / "key", home / "server.log"
    key_file.write_text("a-key-of-the-test", encoding="utf-8")
    command = [sys.executable, str(REPOSITORY / "scripts" / "serve_reward_model.py"), str(folder), "--device", "cpu"]
    command += ["--api-key-file", str(key_file), "--log-file", str(log), "--kv-tokens", "4096"]
    script = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)
    assert script.stdout is not None
    lines: list[str] = []
    for line in script.stdout:  # ends with the script
        lines.append(line)
        if line.startswith("use it with: --rm-type reward_model --rm-url "):
            break
    assert script.poll() is None and lines, "".join(lines) + (log.read_text(encoding="utf-8")[-3000:] if log.exists() else "")
    processes = psutil.Process(script.pid).children(recursive=True)
    yield Served(lines[-1].split()[-1], folder, key_file)
    script.send_signal(signal.SIGTERM)
    assert script.wait(timeout=60) == 128 + signal.SIGTERM
    assert len(processes) >= 3
    assert psutil.wait_procs(processes, timeout=10)[1] == [], "the server outlived the script"


def sample(sample_id: int, prompt: str, response: str, folder: Path) -> Sample:
    tokenizer = load_tokenizer(folder)
    ids = np.append(tokenizer.encode(response), np.int32(EOS_ID))
    return Sample(
        sample_id=sample_id,
        group_id=sample_id,
        trajectory_id=sample_id,
        prompt=Prompt(sample_id, prompt, tokenizer.encode(prompt)),
        response_ids=ids,
        response_text=response,
        rollout_log_probs=np.zeros(len(ids), np.float32),
        support=None,
        loss_mask=np.ones(len(ids), np.bool_),
        finish=FinishReason.STOP,
        weight_versions=one_version(0, len(ids)),
    )


@pytest.fixture(scope="module")
def samples(served: Served) -> list[Sample]:
    """Of 4 to 112 tokens; the last is the first once more."""
    texts = [
        ("Say", "yes"),
        ("A", "b!"),
        ("Tell a long story. " * 4, "Once upon a time" * 2),
        ("Tell", " me"),
        ("Tell", " me more"),
        ("Say", "yes"),
    ]
    return [sample(index, prompt, response, served.folder) for index, (prompt, response) in enumerate(texts)]


def scored(served: Served, samples: list[Sample], *, rm_input: Literal["ids", "text"] = "ids", drop: bool = False) -> RewardOutcome:
    """The whole way: options, questions to the server, worker process, one request."""
    reward = RewardConfig(rm_type="reward_model", rm_url=served.url, rm_input=rm_input, rm_api_key_file=str(served.key_file))
    spec = resolve_reward(reward, policy_folder=str(served.folder))
    assert spec.warnings == ()
    with RewardRunner(spec, num_workers=1, batch_size=8, timeout_s=30.0, on_bad_sample="drop" if drop else "error") as runner:
        runner.start()
        return runner.score(samples)


def rewards(outcome: RewardOutcome) -> list[float]:
    return [one.reward for one in outcome.samples if one.reward is not None]


def expected(folder: Path, ids: list[np.ndarray]) -> list[float]:
    """transformers' scores, each text alone, in float32."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return [float(model(torch.from_numpy(one).long()[None]).logits) for one in ids]


def all_ids(samples: list[Sample]) -> list[np.ndarray]:
    return [np.concatenate([one.prompt.token_ids, one.response_ids]) for one in samples]


def test_scores_of_a_batch_of_different_lengths_equal_transformers(served: Served, samples: list[Sample]) -> None:
    found, wanted = rewards(scored(served, samples)), expected(served.folder, all_ids(samples))
    assert np.abs(np.subtract(found, wanted)).max() < TOLERANCE
    assert np.std(wanted) > 0.1  # scores that hardly differ would show little


def test_scores_of_texts_are_those_of_the_servers_tokens_without_an_end(served: Served, samples: list[Sample]) -> None:
    found = rewards(scored(served, samples, rm_input="text"))
    assert np.abs(np.subtract(found, expected(served.folder, [ids[:-1] for ids in all_ids(samples)]))).max() < TOLERANCE


def test_served_folder_holds_a_zero_bias_and_the_saved_one_is_untouched(served: Served) -> None:
    path = Path(str(served.post("/model_info")["model_path"]))
    assert load_file(path / "score_bias.safetensors")["score.bias"].tolist() == [0.0]
    assert "score.bias" not in load_file(served.folder / "model.safetensors")
    assert not (served.folder / "model.safetensors.index.json").exists()


def test_missing_bias_keeps_what_the_server_had_and_the_start_check_refuses_it(
    served: Served, samples: list[Sample], tmp_path: Path
) -> None:
    """The trap: a folder without `score.bias` leaves the bias as it is. A bias of 0.25 stands for the random one of a start."""
    whole = str(served.post("/model_info")["model_path"])
    biased = make_tiny_classifier(tmp_path / "biased")
    tensors = load_file(biased / "model.safetensors") | {"score.bias": torch.tensor([0.25])}
    save_file(tensors, biased / "model.safetensors", metadata={"format": "pt"})
    try:
        served.post("/update_weights_from_disk", {"model_path": str(biased)})
        served.post("/update_weights_from_disk", {"model_path": str(served.folder)})
        ids = all_ids(samples)[0]
        answer = served.post("/classify", {"input_ids": ids.tolist()})
        offset = answer["embedding"][0] - expected(served.folder, [ids])[0]  # type: ignore[index]
        assert abs(offset - 0.25) < TOLERANCE
        with pytest.raises(ConfigError, match=f"serves {served.folder} with a random bias.*scripts/serve_reward_model.py"):
            scored(served, samples)
    finally:
        served.post("/update_weights_from_disk", {"model_path": whole})
    assert np.abs(np.subtract(rewards(scored(served, samples)), expected(served.folder, all_ids(samples)))).max() < TOLERANCE


@pytest.mark.parametrize("rm_input", ["ids", "text"])
def test_sample_that_is_too_long_is_named_and_the_others_keep_their_scores(
    served: Served, samples: list[Sample], rm_input: Literal["ids", "text"]
) -> None:
    long = sample(9, "x" * MAX_POSITION, "y" * 20, served.folder)
    outcome = scored(served, [samples[0], long, samples[1]], rm_input=rm_input, drop=True)
    assert [one.sample_id for one in outcome.samples] == [0, 1]
    assert np.abs(np.subtract(rewards(outcome), rewards(scored(served, samples[:2], rm_input=rm_input)))).max() < TOLERANCE
    reason = outcome.reasons[9]
    words = {"ids": "cannot send 128 prompt + 21 response tokens = 149", "text": "status 400: "}[rm_input]
    assert words in reason and ("takes at most" in reason or "148 tokens" in reason), reason


def test_token_that_would_end_the_server_is_not_sent(served: Served, samples: list[Sample]) -> None:
    unknown = sample(9, "x", "y", served.folder)
    unknown.response_ids[0] = VOCAB_SIZE
    outcome = scored(served, [samples[0], unknown], drop=True)
    assert f"cannot send token {VOCAB_SIZE}" in outcome.reasons[9]
    assert len(rewards(scored(served, samples[:1]))) == 1


def test_wrong_key_is_refused_at_the_start(served: Served, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("wrong", encoding="utf-8")
    reward = RewardConfig(rm_type="reward_model", rm_url=served.url, rm_api_key_file=str(tmp_path / "key"))
    with pytest.raises(ConfigError, match="answered status 401.*The key is wrong or missing"):
        resolve_reward(reward, policy_folder=str(served.folder))
