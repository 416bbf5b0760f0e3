"""Examples of fine-tuning: which tokens follow the prompt, and which of them train."""

import json
from pathlib import Path

import numpy as np
import pytest

from slime_ppo.data.chat import load_chat_template
from slime_ppo.data.examples import ExampleFormat, example_batch
from slime_ppo.data.row import BrokenRow, RawRow
from slime_ppo.data.row_format import PromptRow, RowFormat
from slime_ppo.data.source import PromptSource, RowPolicy
from slime_ppo.data.tokenizer import TextTokenizer, load_tokenizer
from slime_ppo.errors import DataError
from slime_ppo.types.sample import Prompt
from tests.helpers.chat_templates import make_chat_tokenizer
from tests.helpers.tiny_llama import make_tiny_llama

CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}:{{ m.content }}</s>;{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant:{% endif %}"
)
FORGETFUL = (
    "{% for m in messages %}[{{ m.role }}:{{ m.content if loop.last or m.role == 'user' else '' }}]{% endfor %}"
    "{% if add_generation_prompt %}[assistant:{% endif %}"
)
USER, ANSWER = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}
TURNS = [USER, ANSWER, {"role": "user", "content": "so"}, {"role": "assistant", "content": "no"}]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    return load_tokenizer(make_tiny_llama(tmp_path_factory.mktemp("plain") / "model", seed=1))


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chat_tokenizer(tmp_path_factory.mktemp("chat"), CHAT)


def reader(tokenizer: TextTokenizer, prompts: RowFormat | None = None, **changes: object) -> ExampleFormat:
    values: dict = {"max_response_len": 64, "overlong_response": "broken", "append_eos": True} | changes
    return ExampleFormat(prompts or RowFormat("prompt"), "response", tokenizer, **values)


def chat_reader(folder: Path, **changes: object) -> ExampleFormat:
    return reader(load_tokenizer(folder), RowFormat("prompt", chat_template=load_chat_template(folder)), **changes)


def row(prompt: object, response: object = None) -> RawRow:
    return RawRow(3, "p.jsonl:4", {"prompt": prompt} | ({} if response is None else {"response": response}))


def follows(found: PromptRow) -> tuple[list[int], list[bool]]:
    ids, mask = json.loads(found.label or "")
    return ids, [bool(one) for one in mask]


def trained_text(tokenizer: TextTokenizer, found: PromptRow) -> str:
    ids, mask = follows(found)
    return tokenizer.backend.decode([i for i, trains in zip(ids, mask, strict=True) if trains], skip_special_tokens=False)


def test_read_prompt_and_response_gives_the_tokens_of_both_and_the_end(plain: TextTokenizer) -> None:
    found = reader(plain).read(row("ab", "cde"))
    ids, mask = follows(found)
    assert found.text == "ab" and found.metadata == {}
    assert ids == [*plain.encode_batch(["abcde"])[0][len(plain.encode_batch(["ab"])[0]) :].tolist(), plain.eos_ids[0]]
    assert mask == [True] * len(ids)
    without = follows(reader(plain, append_eos=False).read(row("ab", "cde")))[0]
    assert without == ids[:-1]


def test_read_response_that_would_melt_into_the_prompt_is_encoded_alone(tmp_path: Path) -> None:
    """With a token "bc" in the vocabulary "ab" + "cd" has other tokens at the border than the prompt, which is all a model gets."""
    from tokenizers import Tokenizer, models

    vocabulary = {name: number for number, name in enumerate(["a", "b", "c", "d", "bc", "<eos>"])}
    backend = Tokenizer(models.BPE(vocabulary, [("b", "c")]))
    tokenizer = TextTokenizer(tmp_path, (5,), 6, backend)
    assert tokenizer.encode_batch(["abcd"])[0].tolist() == [0, 4, 3]
    assert follows(reader(tokenizer).read(row("ab", "cd")))[0] == [2, 3, 5]
    assert follows(reader(tokenizer).read(row("a", "bcd")))[0] == [4, 3, 5]


def test_read_messages_train_every_turn_of_the_assistant_to_its_end(chat: Path) -> None:
    own = chat_reader(chat)
    found = own.read(row(TURNS))
    template = load_chat_template(chat)
    assert found.text == template.render([USER])
    ids, mask = follows(found)
    whole = template.render(TURNS, add_generation_prompt=False)
    assert own.tokenizer.backend.decode(ids, skip_special_tokens=False) == whole.removeprefix(found.text)
    assert trained_text(own.tokenizer, found) == "yes</s>no</s>"
    assert not mask[-1], "what the template writes behind the end is not the model's to choose"
    ended = own.read(row([USER, {"role": "assistant", "content": "yes</s>but"}]))
    assert trained_text(own.tokenizer, ended) == "yes</s>", "no engine goes on behind the first end"


def test_read_response_under_its_key_is_the_next_turn_and_earlier_ones_do_not_train(chat: Path) -> None:
    own = chat_reader(chat)
    found = own.read(row(TURNS[:3], "no"))
    assert found.text == load_chat_template(chat).render(TURNS[:3])
    assert trained_text(own.tokenizer, found) == "no</s>"
    assert own.read(row("hi", "yes")).text == load_chat_template(chat).render([USER])


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ({"prompt": "a"}, r"no key 'response' \(--response-key\); the line has \['prompt'\]"),
        ({"prompt": "a", "response": ""}, r"'response' \(--response-key\) is ''; expected a text that is not empty"),
        ({"prompt": "a", "response": 7}, "is 7; expected a text"),
        ({"prompt": "a", "response": "\ud800"}, r"'response' \(--response-key\) is no text"),
        ({"prompt": [USER, ANSWER]}, r"'prompt' \(--input-key\) is .*; expected a string, or messages with --apply-chat-template"),
        ({"response": "a"}, r"no key 'prompt' \(--input-key\)"),
        ({"prompt": "a", "response": "b" * 65}, r"66 tokens follow the prompt, the limit is 64 \(--max-response-len\)"),
    ],
)
def test_read_row_without_an_example_is_broken(plain: TextTokenizer, content: dict, problem: str) -> None:
    with pytest.raises(BrokenRow, match=problem):
        reader(plain).read(RawRow(3, "p.jsonl:4", content))


def test_read_overlong_response_cut_trains_its_first_tokens(plain: TextTokenizer) -> None:
    whole, cut = (
        follows(reader(plain, **own).read(row("a", "bcdefg"))) for own in ({}, {"max_response_len": 3, "overlong_response": "cut"})
    )
    assert cut == (whole[0][:3], [True] * 3)


def test_read_messages_that_cannot_train_are_broken(chat: Path, tmp_path: Path) -> None:
    with pytest.raises(BrokenRow, match="begins with the assistant"):
        chat_reader(chat).read(row([ANSWER]))
    forgetful = chat_reader(make_chat_tokenizer(tmp_path, FORGETFUL))
    with pytest.raises(BrokenRow, match="renders message 1 otherwise in the whole conversation than at its time"):
        forgetful.read(row(TURNS))
    assert trained_text(forgetful.tokenizer, forgetful.read(row(TURNS[:3], "no"))) == "no]"


def test_example_batch_has_each_examples_own_mask() -> None:
    labels = ("[[7,8],[1,0]]", "[[3],[1]]", "[[9,9,3],[0,1,1]]")
    batch = example_batch(0, [Prompt(number, "q", np.array([5], np.int32), label) for number, label in enumerate(labels)])
    assert batch.response_ids.tolist() == [7, 8, 3, 9, 9, 3]
    assert batch.loss_mask.tolist() == [True, False, True, False, True, True]


def test_source_of_examples_gives_batches_and_notices_other_responses(plain: TextTokenizer, tmp_path: Path) -> None:
    def source(responses: list[str], **policy: object) -> PromptSource:
        file = tmp_path / "e.jsonl"
        file.write_text("".join(json.dumps({"prompt": "ab", "response": one}) + "\n" for one in responses))
        return PromptSource(
            str(file), plain, row_format=reader(plain, max_response_len=5), policy=RowPolicy(8, **policy), shuffle=False, seed=0
        )

    kept = source(["c", "defg", "x" * 9], broken_row="skip")
    assert len(kept) == 2 and "1 broken rows left out" in kept.left_out[0]
    with pytest.raises(DataError, match=r"e.jsonl:3: 10 tokens follow the prompt, the limit is 5"):
        source(["c", "defg", "x" * 9])
    batch = example_batch(7, source(["c", "defg"]).next_prompts(3))
    assert (batch.rollout_id, batch.sample_ids.tolist(), batch.response_lens.tolist()) == (7, [0, 1, 0], [2, 5, 2])
    assert batch.prompt_lens.tolist() == [2, 2, 2] and batch.loss_mask.all()
    assert batch.response_ids[[1, 6, 8]].tolist() == [plain.eos_ids[0]] * 3
    assert len(np.unique(batch.trajectory_ids)) == 3, "a row that is drawn twice counts twice"
    with pytest.raises(DataError, match="fingerprint was"):
        source(["c", "defx"]).load_state_dict(source(["c", "defg"]).state_dict())
