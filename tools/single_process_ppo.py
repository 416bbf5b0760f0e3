"""PPO of the quickstart recipe in one process: no Ray, no Megatron, no engine. The yardstick of bench_iteration.py.

    python tools/single_process_ppo.py MODEL --prompts configs/data/openers_train.jsonl --iterations 25 --seed 0

One padded batch per pass, transformers' model and cache, torch's AdamW: what a careful researcher writes in an afternoon.
Prints one JSON line per iteration with the mean reward and the CPU seconds it took.
"""

import argparse
import json
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from transformers import DynamicCache, LlamaForCausalLM
from transformers.utils import logging as transformers_logging
from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

BATCH, RESPONSE, EPOCHS, CRITIC_ONLY = 128, 16, 2, 3
GAMMA, LAMBD, CLIP, VALUE_CLIP, KL_COEF, LR = 1.0, 0.95, 0.2, 0.2, 0.02, 1e-3


@dataclass
class Batch:
    """ids, attended [B, P + R] left padded; `prompt` = P; tokens [B, R] and what was sampled with them."""

    ids: torch.Tensor
    attended: torch.Tensor
    prompt: int

    @property
    def responses(self) -> torch.Tensor:
        return self.ids[:, self.prompt :]


class Critic(torch.nn.Module):
    """A copy of the policy's trunk with a value head that starts at zero."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.trunk = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).model
        self.head = torch.nn.Linear(self.trunk.config.hidden_size, 1, bias=False)
        torch.nn.init.zeros_(self.head.weight)

    def forward(self, batch: Batch) -> torch.Tensor:
        """Values before each response token, [B, R]."""
        hidden = self.trunk(
            input_ids=batch.ids, attention_mask=batch.attended, position_ids=_positions(batch.attended)
        ).last_hidden_state
        return self.head(hidden[:, batch.prompt - 1 : -1]).squeeze(-1)


def _positions(attended: torch.Tensor) -> torch.Tensor:
    return (attended.cumsum(1) - 1).clamp(min=0)


@torch.inference_mode()
def generate(model: LlamaForCausalLM, prompts: list[list[int]], generator: torch.Generator) -> Batch:
    """RESPONSE tokens for each prompt at temperature 1."""
    longest = max(map(len, prompts))
    ids = torch.zeros(len(prompts), longest, dtype=torch.long)
    attended = torch.zeros(len(prompts), longest + RESPONSE, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        attended[row, longest - len(prompt) :] = 1
    positions, cache, step, seen = _positions(attended), DynamicCache(config=model.config), ids, 0
    pieces = [ids]
    for _ in range(RESPONSE):
        begin, seen = seen, seen + step.shape[1]
        logits = model(
            input_ids=step, attention_mask=attended[:, :seen], position_ids=positions[:, begin:seen],
            past_key_values=cache, use_cache=True, logits_to_keep=1,
        ).logits[:, -1]  # fmt: skip
        step = torch.multinomial(logits.softmax(-1), 1, generator=generator)
        pieces.append(step)
    return Batch(torch.cat(pieces, 1), attended, longest)


def log_probs(model: LlamaForCausalLM, batch: Batch) -> torch.Tensor:
    """Log-probs of the response tokens, [B, R]."""
    logits = model(
        input_ids=batch.ids, attention_mask=batch.attended, position_ids=_positions(batch.attended), logits_to_keep=RESPONSE + 1
    ).logits[:, :-1]
    return logits.log_softmax(-1).gather(-1, batch.responses[..., None]).squeeze(-1)


def advantages_of(rewards: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Whitened GAE advantages, and returns; all [B, R]."""
    advantages, last = torch.zeros_like(rewards), torch.zeros(len(rewards))
    following = torch.cat([values[:, 1:], torch.zeros(len(values), 1)], 1)
    for t in reversed(range(rewards.shape[1])):
        last = rewards[:, t] + GAMMA * following[:, t] - values[:, t] + GAMMA * LAMBD * last
        advantages[:, t] = last
    return (advantages - advantages.mean()) / (advantages.var() + 1e-8).sqrt(), advantages + values


def update(optimizer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter], loss: torch.Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer.step()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--iterations", type=int, default=25)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()
    torch.manual_seed(options.seed)
    draw, generator = random.Random(options.seed), torch.Generator().manual_seed(options.seed)
    tokenizer = Tokenizer.from_file(str(Path(options.model) / "tokenizer.json"))
    texts = [json.loads(line)["prompt"] for line in Path(options.prompts).read_text(encoding="utf-8").splitlines()]
    prompts = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    actor, reference = (LlamaForCausalLM.from_pretrained(options.model, dtype=torch.float32) for _ in range(2))
    critic, judge = Critic(options.model), SentimentIntensityAnalyzer()
    actor_parameters, critic_parameters = list(actor.parameters()), list(critic.parameters())
    actor_optimizer, critic_optimizer = (
        torch.optim.AdamW(p, LR, betas=(0.9, 0.95), weight_decay=0.0) for p in (actor_parameters, critic_parameters)
    )
    for iteration in range(options.iterations):
        start = time.process_time()
        batch = generate(actor, [prompts[draw.randrange(len(prompts))] for _ in range(BATCH)], generator)
        batch = Batch(batch.ids.clone(), batch.attended.clone(), batch.prompt)
        scores = torch.tensor([judge.polarity_scores(tokenizer.decode(row))["compound"] for row in batch.responses.tolist()])
        with torch.no_grad():
            old, values = log_probs(actor, batch), critic(batch)
            rewards = -KL_COEF * (old - log_probs(reference, batch))
            rewards[:, -1] += scores
            advantages, returns = advantages_of(rewards, values)
        trained = iteration - CRITIC_ONLY
        for epoch in range(EPOCHS):
            new = critic(batch)
            clipped = values + (new - values).clamp(-VALUE_CLIP, VALUE_CLIP)
            update(critic_optimizer, critic_parameters, 0.5 * torch.maximum((new - returns) ** 2, (clipped - returns) ** 2).mean())
            if trained >= 0:
                for group in actor_optimizer.param_groups:
                    group["lr"] = LR * min(1.0, (trained * EPOCHS + epoch + 1) / 10)
                ratio = (log_probs(actor, batch) - old).exp()
                loss = F.relu(-advantages * ratio.clamp(1 - CLIP, 1 + CLIP) + advantages * ratio) - advantages * ratio
                update(actor_optimizer, actor_parameters, loss.mean())
        record = {"iteration": iteration, "reward": scores.mean().item(), "cpu_s": time.process_time() - start}
        print(json.dumps(record), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
