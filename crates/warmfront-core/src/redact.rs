//! Masks what looks like a credential in text that leaves the process.
//!
//! A second line of defence: nothing logs keys on purpose. The rules are those of `python/warmfront/obs/redaction.py`; a
//! test feeds both with `tests/fixtures/redaction.json`. Prompts cannot be told from other text, so they must never be put
//! into a message.

use std::borrow::Cow;
use std::sync::OnceLock;

use regex::{Captures, Regex};

const CREDENTIALS: &str = r#"(?ix)
    (?P<before>
        \b(?:bearer|basic)[\ ]+
        | \b(?:authorization|x-api-key|api[-_]?key|x-warmfront-gateway-secret)["']?[\ ]*[:=][\ ]*["']?(?:(?:bearer|basic)[\ ]+)?
    )
    [^\s"',;)}\]]+
    | \b(?:wfk_|sk-)[A-Za-z0-9_-]{8,}
"#;

/// The text with every credential replaced by `***`.
pub(crate) fn redacted(text: &str) -> Cow<'_, str> {
    static PATTERN: OnceLock<Regex> = OnceLock::new();
    let pattern = PATTERN.get_or_init(|| Regex::new(CREDENTIALS).expect("a constant pattern is valid"));
    pattern.replace_all(text, |found: &Captures<'_>| {
        let before = found.name("before").map_or("", |before| before.as_str());
        format!("{before}***")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    // bug 166
    #[test]
    fn credentials_are_masked_as_the_python_half_masks_them() {
        let samples: Vec<(String, String)> =
            serde_json::from_str(include_str!("../../../tests/fixtures/redaction.json")).unwrap();
        assert!(!samples.is_empty());
        for (given, expected) in samples {
            assert_eq!(redacted(&given), expected);
        }
    }
}
