"""Write the built-in model of the embedded engine: `python scripts/make_sim_model.py`.

A byte-level BPE whose merges build every word of `warmfront.sim.words` as one token. Nothing is downloaded and
nothing random is used: the same words give the same files.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path

from warmfront.sim.tokens import END, MODEL_DIRECTORY, PIECE_PATTERN, START, STOP, byte_alphabet
from warmfront.sim.words import WORDS

TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
ENDINGS = ["ing", "ed", "er", "est", "ly", "tion", "ment", "ness", "able", "ous", "ive", "al", "ity", "ies", "es", "s"]
PUNCTUATION = [".", ",", ":", ";", "?", "!", "\n", "\n\n", " (", ")", " -", '."', "..."]
MODEL_TOKENS_MAX = 32768
"""Context of the made-up model; servers usually set a smaller one."""


def files() -> dict[str, str]:
    """Return the content of each file of the model directory."""
    alphabet = byte_alphabet()
    merges = train([_spell(text) for text in _texts()])
    names = [*alphabet, *(left + right for left, right in merges)]
    special = [STOP, START, END]
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": len(names) + rank,
                "content": name,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for rank, name in enumerate(special)
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": PIECE_PATTERN}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
            ],
        },
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {name: token for token, name in enumerate(names)},
            "merges": [f"{left} {right}" for left, right in merges],
        },
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": END,
        "pad_token": STOP,
        "clean_up_tokenization_spaces": False,
        "model_max_length": MODEL_TOKENS_MAX,
        "chat_template": TEMPLATE,
    }
    model = {"model_type": "warmfront-sim", "vocab_size": len(names) + len(special)}
    return {
        "tokenizer.json": _json(tokenizer),
        "tokenizer_config.json": _json(config),
        "config.json": _json(model | {"max_position_embeddings": MODEL_TOKENS_MAX}),
    }


def train(words: list[list[str]]) -> list[tuple[str, str]]:
    """Merge the most frequent pair, ties by spelling, until every word is one token."""
    merges: list[tuple[str, str]] = []
    while any(len(word) > 1 for word in words):
        counts = Counter(pair for word in words for pair in itertools.pairwise(word))
        best = min(counts, key=lambda pair: (-counts[pair], pair))
        merges.append(best)
        words = [_merged(word, best) if len(word) > 1 else word for word in words]
    return merges


def _merged(word: list[str], pair: tuple[str, str]) -> list[str]:
    merged: list[str] = []
    for part in word:
        # A part that is itself a merged pair cannot be one again: it is longer than either half.
        if merged and (merged[-1], part) == pair:
            merged[-1] += part
        else:
            merged.append(part)
    return merged


def _texts() -> list[str]:
    plain = [form for word in WORDS for form in (" " + word, word)]
    capital = [form for word in WORDS for form in (" " + word.capitalize(), word.capitalize())]
    return [*plain, *capital, *ENDINGS, *PUNCTUATION]


def _spell(text: str) -> list[str]:
    alphabet = byte_alphabet()
    return [alphabet[byte] for byte in text.encode()]


def _json(content: object) -> str:
    return json.dumps(content, ensure_ascii=False, indent=1) + "\n"


def main() -> None:
    """Write the files."""
    for name, text in files().items():
        Path(MODEL_DIRECTORY / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
