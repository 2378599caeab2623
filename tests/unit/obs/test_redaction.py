from __future__ import annotations

import io
import json
import logging
from pathlib import Path

import pytest
from warmfront.obs import logs
from warmfront.obs.redaction import redacted

SAMPLES = json.loads((Path(__file__).parents[2] / "fixtures" / "redaction.json").read_text(encoding="utf-8"))


@pytest.mark.bug(166)
@pytest.mark.parametrize(("given", "expected"), SAMPLES)
def test_credentials_are_masked_as_the_core_masks_them(given: str, expected: str) -> None:
    assert redacted(given) == expected


@pytest.mark.bug(166)
def test_neither_message_nor_traceback_of_a_log_line_shows_a_key() -> None:
    text = io.StringIO()
    formatter = logs.JsonFormatter()
    handler = logging.StreamHandler(text)
    handler.setFormatter(formatter)
    logger = logging.Logger("test")
    logger.addHandler(handler)
    try:
        raise ValueError("refused: Authorization: Bearer hush-hush")
    except ValueError:
        logger.exception("sent %s", {"x-api-key": "hush-hush"})
    line = json.loads(text.getvalue())
    assert "hush" not in text.getvalue()
    assert line["message"] == "sent {'x-api-key': '***'}"
    assert "refused: Authorization: Bearer ***" in line["error"]
