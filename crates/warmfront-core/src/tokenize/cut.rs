//! Where a text may be cut so that its parts tokenize to the very ids of the whole.
//!
//! Two kinds of places are safe for the pre-tokenizers listed here. Between a line break and a letter: every pattern
//! ends a match at the break, and a letter starts the next. Between a letter and a space that another letter follows: a
//! run of letters ends at the space, and the space joins the word behind it. No pattern looks behind, none looks further
//! ahead than one character, and no normalizer accepted here composes across these places. A tokenizer with any other
//! pattern, normalizer or added token is not cut at all.
//!
//! The places chosen depend on the text before them only, so texts that begin alike are cut alike.

use serde_json::Value;

/// A piece is at least so long, except near the start of a text, where short requests gain from shorter ones.
const PIECE_BYTES_MIN: usize = 2048;
const FIRST_PIECE_BYTES_MIN: usize = 192;
/// Line breaks are preferred up to here; then the next word ends the piece.
const PIECE_BYTES_PREFERRED: usize = 4096;

/// Patterns of `Split` pre-tokenizers for which both places are safe.
const SAFE_PATTERNS: &[&str] = &[
    // DeepSeek V3
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
    // Llama 3, GLM 4
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    // Qwen 2 and 3
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    // Qwen 3.5
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    // gpt-oss, Llama 4
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    // Mistral (tekken)
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
];

/// Cuts texts for one tokenizer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cutter {
    /// At both kinds of places.
    LinesAndWords,
    /// Between words only: the pattern of GPT-2 splits runs of line breaks by what follows them.
    Words,
    /// Nowhere.
    Whole,
}

impl Cutter {
    /// What is safe for a `tokenizer.json`.
    pub(super) fn of(tokenizer: &Value) -> Self {
        let is_safe = is_byte_level_bpe(tokenizer)
            && has_harmless_normalizer(&tokenizer["normalizer"])
            && tokenizer["added_tokens"].as_array().is_none_or(|tokens| tokens.iter().all(is_harmless_added_token));
        if is_safe { of_pre_tokenizer(&tokenizer["pre_tokenizer"]) } else { Self::Whole }
    }

    /// The end of the piece that starts at `from`.
    pub(super) fn piece_end(self, text: &str, from: usize) -> usize {
        let bytes = text.as_bytes();
        if self == Self::Whole {
            return bytes.len();
        }
        let earliest = from + (from / 4).clamp(FIRST_PIECE_BYTES_MIN, PIECE_BYTES_MIN);
        if earliest >= bytes.len() {
            return bytes.len();
        }
        let preferred = (from + PIECE_BYTES_PREFERRED).min(bytes.len());
        let line = if self == Self::LinesAndWords { line_start(bytes, earliest, preferred) } else { None };
        line.or_else(|| {
            let words_from = if self == Self::Words { earliest } else { preferred };
            word_end(bytes, words_from, self == Self::LinesAndWords)
        })
        .unwrap_or(bytes.len())
    }
}

fn of_pre_tokenizer(pre_tokenizer: &Value) -> Cutter {
    let one = std::slice::from_ref(pre_tokenizer);
    let steps = pre_tokenizer["pretokenizers"].as_array().map_or(one, Vec::as_slice);
    let Some((last, splits)) = steps.split_last() else {
        return Cutter::Whole;
    };
    if last["type"] != "ByteLevel" || last["add_prefix_space"] != false {
        return Cutter::Whole;
    }
    // An absent `use_regex` means true.
    let has_regex = last["use_regex"].as_bool().unwrap_or(true);
    match (has_regex, splits.is_empty(), splits.iter().all(is_safe_split)) {
        (true, true, _) => Cutter::Words,
        (false, false, true) => Cutter::LinesAndWords,
        _ => Cutter::Whole,
    }
}

fn is_safe_split(step: &Value) -> bool {
    step["type"] == "Split"
        && step["behavior"] == "Isolated"
        && step["invert"] == false
        && step["pattern"]["Regex"].as_str().is_some_and(|pattern| SAFE_PATTERNS.contains(&pattern))
}

/// A merge never crosses a pre-token, and byte-level vocabularies need no unknown token that could fuse.
fn is_byte_level_bpe(tokenizer: &Value) -> bool {
    let model = &tokenizer["model"];
    (model["type"] == "BPE" || model["merges"].is_array())
        && ["continuing_subword_prefix", "end_of_word_suffix"]
            .iter()
            .all(|key| model[*key].as_str().is_none_or(str::is_empty))
        && model["dropout"].as_f64().is_none_or(|rate| rate == 0.0)
}

fn has_harmless_normalizer(normalizer: &Value) -> bool {
    match normalizer["type"].as_str() {
        None => normalizer.is_null(),
        Some("NFC") => true,
        Some("Sequence") => {
            normalizer["normalizers"].as_array().is_some_and(|steps| steps.iter().all(has_harmless_normalizer))
        }
        Some(_) => false,
    }
}

/// An added token must not straddle a cut, and must not swallow the space on the other side of one.
fn is_harmless_added_token(token: &Value) -> bool {
    let Some(content) = token["content"].as_str() else {
        return false;
    };
    let strips = token["lstrip"] == true || token["rstrip"] == true;
    let touches_letters =
        [content.chars().next(), content.chars().last()].into_iter().flatten().any(char::is_alphabetic);
    let straddles = content.is_empty() || content.contains(char::is_whitespace);
    let swallows = strips && touches_letters;
    !straddles && !swallows
}

/// The first place in `from..to` between a line break and a letter.
fn line_start(bytes: &[u8], from: usize, to: usize) -> Option<usize> {
    memchr::memchr_iter(b'\n', &bytes[from..to])
        .map(|at| from + at + 1)
        .find(|&at| bytes.get(at..).is_some_and(starts_with_letter))
}

/// The first place from `from` on between a letter and ` x`, or after a line break if `lines`.
fn word_end(bytes: &[u8], from: usize, lines: bool) -> Option<usize> {
    for at in memchr::memchr2_iter(b' ', b'\n', &bytes[from..]).map(|at| from + at) {
        let rest = &bytes[at + 1..];
        if bytes[at] == b'\n' && lines && starts_with_letter(rest) {
            return Some(at + 1);
        }
        let is_between = bytes[at] == b' ' && at > 0 && bytes[at - 1].is_ascii_alphabetic();
        if is_between && rest.first().is_some_and(u8::is_ascii_alphabetic) {
            return Some(at);
        }
    }
    None
}

/// An ASCII letter or a CJK ideograph (U+4E00 to U+8FFF by their first byte): neither composes with what stands before.
fn starts_with_letter(bytes: &[u8]) -> bool {
    match bytes.first() {
        Some(byte) if byte.is_ascii_alphabetic() => true,
        Some(0xe4) => bytes.get(1).is_some_and(|byte| *byte >= 0xb8),
        Some(0xe5..=0xe8) => true,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokenizer(pre_tokenizer: &Value) -> Value {
        serde_json::json!({
            "normalizer": {"type": "NFC"},
            "added_tokens": [{"content": "<|end|>", "lstrip": false, "rstrip": true}],
            "pre_tokenizer": pre_tokenizer,
            "model": {"type": "BPE", "dropout": null, "continuing_subword_prefix": ""},
        })
    }

    fn splits(pattern: &str) -> Value {
        serde_json::json!({"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false},
            {"type": "ByteLevel", "add_prefix_space": false, "use_regex": false},
        ]})
    }

    #[test]
    fn only_known_forms_are_cut() {
        let known = tokenizer(&splits(SAFE_PATTERNS[4]));
        assert_eq!(Cutter::of(&known), Cutter::LinesAndWords);
        assert_eq!(Cutter::of(&tokenizer(&splits(r"\w+"))), Cutter::Whole);
        let gpt2 = serde_json::json!({"type": "ByteLevel", "add_prefix_space": false, "use_regex": true});
        assert_eq!(Cutter::of(&tokenizer(&gpt2)), Cutter::Words);
        let prefixed = serde_json::json!({"type": "ByteLevel", "add_prefix_space": true, "use_regex": true});
        assert_eq!(Cutter::of(&tokenizer(&prefixed)), Cutter::Whole);
    }

    #[test]
    fn added_tokens_with_spaces_and_other_normalizers_forbid_cuts() {
        let mut spaced = tokenizer(&splits(SAFE_PATTERNS[4]));
        spaced["added_tokens"][0]["content"] = "end of text".into();
        assert_eq!(Cutter::of(&spaced), Cutter::Whole);
        let mut stripping = tokenizer(&splits(SAFE_PATTERNS[4]));
        stripping["added_tokens"][0]["content"] = "<end".into();
        assert_eq!(Cutter::of(&stripping), Cutter::Whole);
        let mut lowered = tokenizer(&splits(SAFE_PATTERNS[4]));
        lowered["normalizer"] = serde_json::json!({"type": "Lowercase"});
        assert_eq!(Cutter::of(&lowered), Cutter::Whole);
    }

    #[test]
    fn pieces_cover_the_text_and_equal_prefixes_are_cut_alike() {
        let text: String = (0..2_000).map(|line| format!("line {line} of some text\n")).collect();
        let ends = |text: &str| {
            let mut ends = vec![0];
            while ends[ends.len() - 1] < text.len() {
                let from = ends[ends.len() - 1];
                let end = Cutter::LinesAndWords.piece_end(text, from);
                assert!(end > from && text.is_char_boundary(end));
                ends.push(end);
            }
            ends
        };
        let (whole, half) = (ends(&text), ends(&text[..text.len() / 2]));
        assert_eq!(whole[..half.len() - 1], half[..half.len() - 1]);
        assert!(whole.len() > 10);
    }
}
