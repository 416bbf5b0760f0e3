import json
import pickle
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from slime_ppo.data.tokenizer import TextTokenizer, load_tokenizer
from slime_ppo.errors import CheckpointError, DataError
from tests.helpers.tiny_llama import EOS_ID, make_tiny_llama


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny_llama(tmp_path / "model")


def write(file: Path, content: object) -> None:
    file.write_text(json.dumps(content), encoding="utf-8")


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    """One token per byte, so that a character may take several tokens, and token 256 is the special "<end>"."""
    folder = tmp_path_factory.mktemp("bytes")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={character: index for index, character in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<end>", special=True)])
    backend.enable_truncation(4)
    backend.enable_padding(length=32)
    backend.save(str(folder / "tokenizer.json"))
    write(folder / "tokenizer_config.json", {"eos_token": {"content": "<end>"}})
    return load_tokenizer(folder)


def test_encode_decode_round_trip(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    ids = tokenizer.encode("The clerk put")
    assert ids.dtype == np.int32
    assert len(ids) == 13  # one token per character, nothing in front or behind
    assert tokenizer.decode(ids) == "The clerk put"
    assert tokenizer.vocab_size == 100
    assert [batch.tolist() for batch in tokenizer.encode_batch(["The clerk put", ""])] == [ids.tolist(), []]


def test_decode_special_tokens_leave_no_trace(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    assert tokenizer.decode([*tokenizer.encode("so"), EOS_ID, 0]) == "so"


def test_encode_saved_truncation_and_padding_are_off(byte_level: TextTokenizer) -> None:
    assert len(byte_level.encode("more than four")) == 14


def test_tokenizer_pickled_encodes_the_same(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    copy = pickle.loads(pickle.dumps(tokenizer))
    assert copy.encode("abc").tolist() == tokenizer.encode("abc").tolist()
    assert copy.eos_ids == tokenizer.eos_ids


def test_token_strings_spell_out_special_tokens(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    assert tokenizer.token_strings([*tokenizer.encode("a b"), EOS_ID]) == ["a", " ", "b", "<eos>"]
    assert tokenizer.token_strings([]) == []


def test_token_strings_character_of_several_tokens_shows_at_its_last(byte_level: TextTokenizer) -> None:
    ids = byte_level.encode("né €")  # 1, 2, 1 and 3 bytes
    assert byte_level.token_strings(ids) == ["n", "", "é", " ", "", "", "€"]


def test_token_strings_unfinished_character_ends_the_text(byte_level: TextTokenizer) -> None:
    ids = byte_level.encode("a€")[:-1]
    strings = byte_level.token_strings(ids)
    assert len(strings) == 3
    assert "".join(strings) == byte_level.decode(ids)


def test_token_strings_joined_are_the_decoded_text(byte_level: TextTokenizer) -> None:
    text = "The “clerk” put 12 € — naïve, 你好 🙂 end"
    assert "".join(byte_level.token_strings(byte_level.encode(text))) == text


def test_eos_generation_config_may_list_several(folder: Path) -> None:
    write(folder / "generation_config.json", {"eos_token_id": [5, 3, 5]})
    assert load_tokenizer(folder).eos_ids == (5, 3)


def test_eos_config_is_next(folder: Path) -> None:
    write(folder / "generation_config.json", {"eos_token_id": None})
    write(folder / "config.json", {"eos_token_id": 7})
    assert load_tokenizer(folder).eos_ids == (7,)


def test_eos_tokenizer_config_is_last(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    write(folder / "config.json", {})
    write(folder / "tokenizer_config.json", {"eos_token": "<bos>"})
    assert load_tokenizer(folder).eos_ids == (2,)


def test_eos_as_object_with_content(byte_level: TextTokenizer) -> None:
    assert byte_level.eos_ids == (256,)


def test_eos_nowhere_is_refused(folder: Path) -> None:
    for name in ("generation_config.json", "config.json", "tokenizer_config.json"):
        write(folder / name, {})
    with pytest.raises(
        DataError, match='has no end-of-sequence token: none of generation_config.json.*Add "eos_token_id"'
    ) as error:
        load_tokenizer(folder)
    assert str(folder) in str(error.value)


def test_eos_outside_the_vocabulary_is_refused(folder: Path) -> None:
    write(folder / "generation_config.json", {"eos_token_id": [3, 100]})
    with pytest.raises(DataError, match=r"generation_config.json: eos_token_id 100 is not in tokenizer.json, which has 100 tokens"):
        load_tokenizer(folder)


def test_eos_word_outside_the_vocabulary_is_refused(folder: Path) -> None:
    write(folder / "generation_config.json", {})
    write(folder / "config.json", {})
    write(folder / "tokenizer_config.json", {"eos_token": "</s>"})
    with pytest.raises(DataError, match=r"tokenizer_config.json: eos_token '</s>' is not in the vocabulary"):
        load_tokenizer(folder)


def test_eos_of_wrong_type_is_refused(folder: Path) -> None:
    write(folder / "generation_config.json", {"eos_token_id": "3"})
    with pytest.raises(CheckpointError, match="generation_config.json: eos_token_id is '3', expected a token id or a list"):
        load_tokenizer(folder)


def test_config_broken_json_is_refused(folder: Path) -> None:
    (folder / "generation_config.json").write_text("{", encoding="utf-8")
    with pytest.raises(CheckpointError, match="generation_config.json is no valid JSON"):
        load_tokenizer(folder)


def test_config_not_an_object_is_refused(folder: Path) -> None:
    write(folder / "generation_config.json", [3])
    with pytest.raises(CheckpointError, match="generation_config.json holds a list, expected a JSON object"):
        load_tokenizer(folder)


def test_folder_missing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="model folder .*nowhere does not exist.*--hf-checkpoint"):
        load_tokenizer(tmp_path / "nowhere")


def test_folder_without_tokenizer_json_is_refused(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match="has no tokenizer.json. Save the tokenizer"):
        load_tokenizer(folder)


def test_tokenizer_json_broken_is_refused(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    with pytest.raises(DataError, match="tokenizer.json is no tokenizer that the tokenizers library can read"):
        load_tokenizer(folder)
