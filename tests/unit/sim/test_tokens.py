from __future__ import annotations

import json
from random import Random

import pytest
import tokenizers
from warmfront.errors import InvalidRequestError
from warmfront.sim.answers import AnswerWriter
from warmfront.sim.tokens import MODEL_DIRECTORY, PIECE_PATTERN, BuiltinTokenizer, render
from warmfront.sim.words import WORDS

ODD = [
    "é",
    "日本",
    "½",
    "\n",
    "\t",
    "  ",
    "\u00a0",
    "\x1c",
    "<|im_end|>",
    "<|im_start|>",
    "123",
    '"x',
    "😀",
    "'",
    "\r\n",
    "_",
]


@pytest.fixture(scope="module")
def builtin() -> BuiltinTokenizer:
    return BuiltinTokenizer()


def test_plain_python_encodes_as_the_hugging_face_library(builtin: BuiltinTokenizer) -> None:
    library = tokenizers.Tokenizer.from_file(str(MODEL_DIRECTORY / "tokenizer.json"))
    random = Random(1)
    for _ in range(500):
        parts = [
            random.choice([random.choice(WORDS), " " + random.choice(WORDS), random.choice(ODD)]) for _ in range(20)
        ]
        text = "".join(parts)
        assert builtin.encode(text) == library.encode(text, add_special_tokens=False).ids, text
        assert builtin.decode(builtin.encode(text)) == text


def test_every_word_is_one_token(builtin: BuiltinTokenizer) -> None:
    for word in WORDS:
        for form in (word, " " + word, word.capitalize(), " " + word.capitalize()):
            assert len(builtin.encode(form)) == 1, form


def test_files_and_code_use_the_same_pieces(builtin: BuiltinTokenizer) -> None:
    content = json.loads((MODEL_DIRECTORY / "tokenizer.json").read_text(encoding="utf-8"))
    assert content["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] == PIECE_PATTERN
    assert builtin.vocabulary_size == 1 + max(token["id"] for token in content["added_tokens"])


def test_an_answer_encodes_to_its_own_tokens_inside_the_next_turn(builtin: BuiltinTokenizer) -> None:
    writer = AnswerWriter(builtin, seed=3)
    for length in (1, 7, 60):
        question = [{"role": "user", "content": "why?"}]
        prompt = builtin.encode(render(question))
        answer = writer.write(prompt, tokens_max=length, ignore_stop=True)
        assert len(answer.tokens) == length
        turn = [*question, {"role": "assistant", "content": builtin.decode(answer.tokens)}]
        assert builtin.encode(render([*turn, *question]))[: len(prompt) + length] == prompt + answer.tokens


def test_answers_depend_on_prompt_choice_and_seed_only(builtin: BuiltinTokenizer) -> None:
    first, other = AnswerWriter(builtin, seed=1), AnswerWriter(builtin, seed=2)
    answer = first.write([1, 2, 3], tokens_max=40)
    assert AnswerWriter(builtin, seed=1).write([1, 2, 3], tokens_max=40) == answer
    assert first.write([1, 2, 4], tokens_max=40) != answer
    assert first.write([1, 2, 3], tokens_max=40, choice=1) != answer
    assert other.write([1, 2, 3], tokens_max=40) != answer


def test_an_answer_that_ends_by_itself_ends_with_the_stop_token(builtin: BuiltinTokenizer) -> None:
    answer = AnswerWriter(builtin).write([1, 2, 3], tokens_max=100_000)
    assert answer.reason == "stop"
    assert answer.tokens[-1] == builtin.stop_token


def test_messages_are_normalised_as_vllm_does() -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None},
        {"role": "developer", "content": "rule"},
    ]
    assert render(messages, add_generation_prompt=False) == (
        "<|im_start|>system\nrule<|im_end|>\n<|im_start|>user\na\nb<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n"
    )


def test_a_developer_turn_merges_all_system_texts_but_systems_alone_stay_apart() -> None:
    systems = [{"role": "system", "content": text} for text in ("a", "", "b")]
    assert render(systems, add_generation_prompt=False).count("system") == 3
    merged = render([*systems, {"role": "developer", "content": "c"}], add_generation_prompt=False)
    assert merged == "<|im_start|>system\na\n\nb\n\nc<|im_end|>\n"


def test_a_billing_header_leaves_a_system_text() -> None:
    content = "x-anthropic-billing-header: 1\nbe kind"
    assert render([{"role": "system", "content": content}], add_generation_prompt=False) == (
        "<|im_start|>system\nbe kind<|im_end|>\n"
    )


def test_the_final_message_can_be_left_open() -> None:
    text = render(
        [{"role": "assistant", "content": "so far"}], add_generation_prompt=False, continue_final_message=True
    )
    assert text == "<|im_start|>assistant\nso far"


@pytest.mark.parametrize(
    "message", [{"content": "x"}, {"role": "user", "content": 3}, {"role": "user", "content": [{}]}]
)
def test_messages_that_are_not_text_are_refused(message: dict[str, object]) -> None:
    with pytest.raises(InvalidRequestError):
        render([message])
