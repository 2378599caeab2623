//! Text to token ids.
//!
//! `fastokens` does the work where it reads the tokenizer and agrees with `tokenizers`, the engine's own library, on a
//! set of samples; otherwise `tokenizers` does, at a fraction of the speed, and the log says so. Text is cut into pieces
//! (see `cut`), and the ids of pieces seen before come from the cache.

use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;

use serde_json::Value;
use xxhash_rust::xxh3::xxh3_128_with_seed;

use super::cache::SegmentCache;
use super::cut::Cutter;

/// Text on which both libraries must agree before the fast one is used.
const SAMPLES: &[&str] = &[
    "",
    "Hello, world!",
    "  two  spaces   and\ttabs\t\tand \n\n\nlines \r\n\r\n end  ",
    "don't I'LL we've '90s it''s",
    "0 12 345 6789 1234567890 3.14159 ١٢٣ ½ Ⅷ",
    "日本語のテキスト、中文文本。한국어 문장 カタカナ 龥龦",
    "Grüße, naïve café e\u{301} n\u{303} \u{1e9b}\u{323} ﬁ Å \u{212b}",
    "Привет мир, Γειά σου, שלום עולם, مرحبا, नमस्ते, ไทย",
    "😀 👩‍👩‍👧‍👦 🇩🇪 ❤️ ☃ \u{200b}zero\u{feff}width\u{a0}nbsp\u{3000}wide",
    "fn main() {\n    let x = vec![1, 2];\n\tprintln!(\"{:?}\", x);\n}\n",
    "{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Zürich\"}}",
    "https://example.org/a/b?c=d&e=%20f#g <b>bold</b> &amp; $HOME /* c */ // d",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa ==================== ....................",
    "CamelCase snake_case kebab-case SCREAMING x1y2z3 a.b.c",
    "<|im_start|>user\nhi<|im_end|>\n<|eot_id|> <s> </s> [INST] <｜User｜>",
    "\u{0} \u{1} \u{7f} \u{85} \u{2028} \u{fffd} \u{10ffff}",
];

/// Tokens in one sample that covers added tokens.
const ADDED_TOKENS_PER_SAMPLE: usize = 64;

/// Ids around the prompt when special tokens are asked for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Surround {
    pub(super) before: Vec<u32>,
    pub(super) after: Vec<u32>,
}

enum Backend {
    Fast(Box<fastokens::Tokenizer>),
    Plain(Box<tokenizers::Tokenizer>),
}

/// A tokenizer with its cutter and its share of the cache.
pub(super) struct Encoder {
    backend: Backend,
    cutter: Cutter,
    surround: Surround,
    cache: Arc<SegmentCache>,
    /// Keeps the entries of tokenizers that share a cache apart, and hashes unknown to clients.
    seed: u64,
}

impl Encoder {
    /// Builds both libraries' tokenizers from a `tokenizer.json` and keeps the better one that is right.
    ///
    /// # Errors
    /// Neither library reads the file, in words.
    pub(super) fn new(mut file: Value, cache: Arc<SegmentCache>) -> Result<Self, String> {
        // The engine sets both for each call.
        file["truncation"] = Value::Null;
        file["padding"] = Value::Null;
        let cutter = Cutter::of(&file);
        let added: Vec<String> = file["added_tokens"]
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(|token| token["content"].as_str().map(str::to_owned))
            .collect();
        let bytes = serde_json::to_vec(&file).map_err(|error| error.to_string())?;
        let plain = tokenizers::Tokenizer::from_bytes(&bytes).map_err(|error| error.to_string())?;
        let surround = surround(&plain)?;
        let backend = match fast_if_right(file, &plain, &added) {
            Ok(fast) => Backend::Fast(Box::new(fast)),
            Err(reason) => {
                tracing::warn!(reason, "fastokens is not used for this tokenizer: tokenizing is slower");
                Backend::Plain(Box::new(plain))
            }
        };
        Ok(Self { backend, cutter, surround, cache, seed: RandomState::new().hash_one(0u8) })
    }

    pub(super) fn is_fast(&self) -> bool {
        matches!(self.backend, Backend::Fast(_))
    }

    pub(super) fn is_cut(&self) -> bool {
        self.cutter != Cutter::Whole
    }

    pub(super) fn cache(&self) -> &Arc<SegmentCache> {
        &self.cache
    }

    pub(super) fn set_surround(&mut self, surround: Surround) {
        self.surround = surround;
    }

    pub(super) fn surround(&self) -> &Surround {
        &self.surround
    }

    pub(super) fn id_of(&self, token: &str) -> Option<u32> {
        match &self.backend {
            Backend::Fast(fast) => fast.token_to_id(token),
            Backend::Plain(plain) => plain.token_to_id(token),
        }
    }

    /// Ids of a text, without special tokens around it. Added tokens inside the text become their ids, as in the engine.
    ///
    /// # Errors
    /// The library fails on this text, in words.
    pub(super) fn encode(&self, text: &str) -> Result<Vec<u32>, String> {
        let mut ids = Vec::with_capacity(text.len() / 3 + 8);
        let mut from = 0;
        while from < text.len() {
            let end = self.cutter.piece_end(text, from);
            self.piece(&text[from..end], &mut ids)?;
            from = end;
        }
        Ok(ids)
    }

    /// The same without cuts and cache.
    pub(super) fn encode_whole(&self, text: &str) -> Result<Vec<u32>, String> {
        match &self.backend {
            Backend::Fast(fast) => fast.encode(text).map_err(|error| error.to_string()),
            Backend::Plain(plain) => plain_ids(plain, text, false),
        }
    }

    fn piece(&self, piece: &str, ids: &mut Vec<u32>) -> Result<(), String> {
        let key = xxh3_128_with_seed(piece.as_bytes(), self.seed);
        if self.cache.append(key, piece.len(), ids) {
            return Ok(());
        }
        let fresh = self.encode_whole(piece)?;
        self.cache.remember(key, &fresh);
        ids.extend_from_slice(&fresh);
        Ok(())
    }
}

fn plain_ids(plain: &tokenizers::Tokenizer, text: &str, special: bool) -> Result<Vec<u32>, String> {
    plain.encode_fast(text, special).map(|encoding| encoding.get_ids().to_vec()).map_err(|error| error.to_string())
}

fn fast_if_right(file: Value, plain: &tokenizers::Tokenizer, added: &[String]) -> Result<fastokens::Tokenizer, String> {
    let fast = fastokens::Tokenizer::from_json(file).map_err(|error| error.to_string())?;
    let around_added = added.chunks(ADDED_TOKENS_PER_SAMPLE).map(|tokens| {
        let mentions: Vec<String> =
            tokens.iter().map(|token| format!("x {token} y{token}{token}\n{token} 1")).collect();
        mentions.concat()
    });
    for sample in SAMPLES.iter().map(|&sample| sample.to_owned()).chain(around_added) {
        let ids = fast.encode(&sample).map_err(|error| error.to_string())?;
        if ids != plain_ids(plain, &sample, false)? {
            return Err(format!("it disagrees with the reference on {sample:?}"));
        }
    }
    Ok(fast)
}

/// What the post-processor puts around a text, found by comparing with and without.
fn surround(plain: &tokenizers::Tokenizer) -> Result<Surround, String> {
    let (bare, full) = (plain_ids(plain, "a", false)?, plain_ids(plain, "a", true)?);
    let at =
        full.windows(bare.len().max(1)).position(|window| window == bare).ok_or("post-processor changes the text")?;
    Ok(Surround { before: full[..at].to_vec(), after: full[at + bare.len()..].to_vec() })
}
