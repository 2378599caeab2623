//! JSON as Python's `json.loads` reads it, since that is what the engine reads bodies with.
//!
//! More lenient than the standard on purpose: `NaN` and `Infinity` are numbers, a repeated key takes its last value at
//! its first position, control characters inside strings pass. What such a tree cannot hold (a lone surrogate, nesting
//! beyond [`DEPTH_MAX`], an integer beyond 128 bits) is read all the same and remembered as a [`Flaw`]: the body is still
//! forwarded, but its tokens cannot be reproduced.

use std::cell::Cell;
use std::sync::Arc;

/// Nesting that is turned into a tree. Deeper values are skipped; the engine's own limit is about 1,000.
pub const DEPTH_MAX: usize = 200;

/// Values that are turned into a tree, about 100 bytes each: a prompt of a million token ids. The rest is skipped.
pub const VALUES_MAX: usize = 1 << 20;

/// Nesting that is refused: no engine reads it, and some spend a stack on trying.
pub const NESTING_MAX: usize = 1024;

/// Objects with more keys than this are checked for repeated keys through a set.
const LINEAR_KEYS_MAX: usize = 24;

/// One JSON value. Strings are shared, so that templates hold them without copies.
#[derive(Clone, Debug, PartialEq)]
pub enum Json {
    Null,
    Bool(bool),
    Int(i128),
    Float(f64),
    Str(Arc<str>),
    List(Vec<Json>),
    /// In order of first appearance.
    Map(Vec<(Arc<str>, Json)>),
}

/// An object's keys and values, in order of first appearance.
pub type Fields = Vec<(Arc<str>, Json)>;

/// What was read but could not be kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flaw {
    /// `\ud800` without its other half, or bytes that are not UTF-8.
    Surrogate,
    /// Nesting beyond [`DEPTH_MAX`].
    Depth,
    /// An integer beyond 128 bits.
    Number,
    /// More than [`VALUES_MAX`] values.
    Size,
}

/// The text is not JSON.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Malformed {
    /// Byte offset of the first thing that does not fit.
    pub offset: usize,
    /// It is nested beyond [`NESTING_MAX`], whatever else it is.
    pub is_too_deep: bool,
}

impl Json {
    /// The value under `key`; `None` when this is no object or has no such key.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<&Json> {
        match self {
            Self::Map(pairs) => pairs.iter().find(|(name, _)| &**name == key).map(|(_, value)| value),
            _ => None,
        }
    }

    /// Like [`Json::get`], with JSON `null` counted as absent.
    #[must_use]
    pub fn some(&self, key: &str) -> Option<&Json> {
        self.get(key).filter(|value| !matches!(value, Self::Null))
    }

    #[must_use]
    pub fn as_str(&self) -> Option<&Arc<str>> {
        match self {
            Self::Str(text) => Some(text),
            _ => None,
        }
    }

    #[must_use]
    pub fn as_list(&self) -> Option<&[Json]> {
        match self {
            Self::List(items) => Some(items),
            _ => None,
        }
    }

    #[must_use]
    pub fn as_int(&self) -> Option<i128> {
        match self {
            Self::Int(value) => Some(*value),
            _ => None,
        }
    }

    /// Whether Python would take the value as true.
    #[must_use]
    pub fn is_truthy(&self) -> bool {
        match self {
            Self::Null => false,
            Self::Bool(value) => *value,
            Self::Int(value) => *value != 0,
            Self::Float(value) => *value != 0.0,
            Self::Str(text) => !text.is_empty(),
            Self::List(items) => !items.is_empty(),
            Self::Map(pairs) => !pairs.is_empty(),
        }
    }

    /// An object of these pairs, in this order.
    pub fn map<const N: usize>(pairs: [(&str, Json); N]) -> Self {
        Self::Map(pairs.into_iter().map(|(key, value)| (Arc::from(key), value)).collect())
    }

    pub fn text(text: &str) -> Self {
        Self::Str(Arc::from(text))
    }
}

/// Reads one whole JSON text into a tree.
///
/// # Errors
/// The text is not JSON as Python reads it, or something follows the value.
pub fn parse(text: &str) -> Result<(Json, Option<Flaw>), Malformed> {
    let mut reader = Reader::new(text);
    let value = reader.value(0)?;
    reader.end()?;
    Ok((value, reader.flaw))
}

/// Reads the top level of an object and only those of its values that `wanted` names.
///
/// The rest is skipped by brackets and quotes without a further look.
///
/// # Errors
/// The text is not JSON, or not an object.
pub fn parse_fields(text: &str, wanted: impl Fn(&str) -> bool) -> Result<(Fields, Option<Flaw>), Malformed> {
    let mut reader = Reader::new(text);
    let fields = reader.object(0, Some(&wanted))?;
    reader.end()?;
    Ok((fields, reader.flaw))
}

thread_local! {
    /// Where strings with escapes are put together: fresh memory for each would cost more than the copy out of it.
    static SCRATCH: Cell<String> = const { Cell::new(String::new()) };
}

/// A scratch larger than this is not kept.
const SCRATCH_BYTES_MAX: usize = 1 << 20;

struct Reader<'a> {
    text: &'a str,
    bytes: &'a [u8],
    at: usize,
    /// Read into the tree so far.
    values: usize,
    flaw: Option<Flaw>,
}

impl<'a> Reader<'a> {
    fn new(text: &'a str) -> Self {
        let text = text.strip_prefix('\u{feff}').unwrap_or(text);
        Self { text, bytes: text.as_bytes(), at: 0, values: 0, flaw: None }
    }

    fn fail<T>(&self) -> Result<T, Malformed> {
        Err(Malformed { offset: self.at, is_too_deep: false })
    }

    fn flawed(&mut self, flaw: Flaw) {
        self.flaw.get_or_insert(flaw);
    }

    fn peek(&self) -> Option<u8> {
        self.bytes.get(self.at).copied()
    }

    fn space(&mut self) {
        while matches!(self.peek(), Some(b' ' | b'\n' | b'\r' | b'\t')) {
            self.at += 1;
        }
    }

    fn expect(&mut self, byte: u8) -> Result<(), Malformed> {
        if self.peek() == Some(byte) {
            self.at += 1;
            return Ok(());
        }
        self.fail()
    }

    fn end(&mut self) -> Result<(), Malformed> {
        self.space();
        if self.at == self.bytes.len() { Ok(()) } else { self.fail() }
    }

    /// Whether the tree has all the values it may have; what follows is read and thrown away.
    fn is_full(&mut self) -> bool {
        let is_full = self.values >= VALUES_MAX;
        if is_full {
            self.flaw = Some(Flaw::Size); // outweighs all others: what is missing may be any field
        }
        is_full
    }

    fn value(&mut self, depth: usize) -> Result<Json, Malformed> {
        self.space();
        self.values += 1;
        match self.peek() {
            Some(b'"') => self.string().map(Json::Str),
            Some(b'{' | b'[') if depth >= DEPTH_MAX => {
                self.flawed(Flaw::Depth);
                self.skip()?;
                Ok(Json::Null)
            }
            Some(b'{') => self.object(depth, None).map(Json::Map),
            Some(b'[') => self.list(depth).map(Json::List),
            Some(b't') => self.word("true", Json::Bool(true)),
            Some(b'f') => self.word("false", Json::Bool(false)),
            Some(b'n') => self.word("null", Json::Null),
            Some(b'N') => self.word("NaN", Json::Float(f64::NAN)),
            Some(b'I') => self.word("Infinity", Json::Float(f64::INFINITY)),
            Some(b'-') if self.bytes.get(self.at + 1) == Some(&b'I') => {
                self.word("-Infinity", Json::Float(f64::NEG_INFINITY))
            }
            Some(b'-' | b'0'..=b'9') => self.number(),
            _ => self.fail(),
        }
    }

    fn word(&mut self, word: &str, value: Json) -> Result<Json, Malformed> {
        if self.bytes[self.at..].starts_with(word.as_bytes()) {
            self.at += word.len();
            return Ok(value);
        }
        self.fail()
    }

    fn list(&mut self, depth: usize) -> Result<Vec<Json>, Malformed> {
        self.expect(b'[')?;
        let mut items = Vec::new();
        self.space();
        if self.peek() == Some(b']') {
            self.at += 1;
            return Ok(items);
        }
        loop {
            if self.is_full() {
                self.skip()?;
            } else {
                items.push(self.value(depth + 1)?);
            }
            self.space();
            match self.peek() {
                Some(b',') => self.at += 1,
                Some(b']') => {
                    self.at += 1;
                    return Ok(items);
                }
                _ => return self.fail(),
            }
        }
    }

    fn object(&mut self, depth: usize, wanted: Option<&dyn Fn(&str) -> bool>) -> Result<Fields, Malformed> {
        self.space();
        self.expect(b'{')?;
        let mut pairs = Pairs::default();
        self.space();
        if self.peek() == Some(b'}') {
            self.at += 1;
            return Ok(pairs.pairs);
        }
        loop {
            self.space();
            let key = self.string()?;
            self.space();
            self.expect(b':')?;
            if wanted.is_none_or(|wanted| wanted(&key)) && !self.is_full() {
                let value = self.value(depth + 1)?;
                pairs.insert(key, value);
            } else {
                self.skip()?;
            }
            self.space();
            match self.peek() {
                Some(b',') => self.at += 1,
                Some(b'}') => {
                    self.at += 1;
                    return Ok(pairs.pairs);
                }
                _ => return self.fail(),
            }
        }
    }

    fn number(&mut self) -> Result<Json, Malformed> {
        let start = self.at;
        self.at += usize::from(self.peek() == Some(b'-'));
        let digits = self.at;
        self.digits();
        if self.at == digits || (self.bytes[digits] == b'0' && self.at > digits + 1) {
            return self.fail();
        }
        let mut is_float = false;
        if self.peek() == Some(b'.') && self.bytes.get(self.at + 1).is_some_and(u8::is_ascii_digit) {
            is_float = true;
            self.at += 1;
            self.digits();
        }
        if matches!(self.peek(), Some(b'e' | b'E')) {
            let sign = usize::from(matches!(self.bytes.get(self.at + 1), Some(b'+' | b'-')));
            if self.bytes.get(self.at + 1 + sign).is_some_and(u8::is_ascii_digit) {
                is_float = true;
                self.at += 1 + sign;
                self.digits();
            }
        }
        let literal = &self.text[start..self.at];
        if is_float {
            return literal.parse().map(Json::Float).or_else(|_| self.fail());
        }
        literal.parse().map(Json::Int).or_else(|_| {
            self.flawed(Flaw::Number);
            Ok(Json::Null)
        })
    }

    fn digits(&mut self) {
        while self.peek().is_some_and(|byte| byte.is_ascii_digit()) {
            self.at += 1;
        }
    }

    fn string(&mut self) -> Result<Arc<str>, Malformed> {
        self.expect(b'"')?;
        let start = self.at;
        let Some(stop) = memchr::memchr2(b'"', b'\\', &self.bytes[start..]) else {
            return self.fail();
        };
        self.at = start + stop;
        if self.bytes[self.at] == b'"' {
            self.at += 1;
            return Ok(Arc::from(&self.text[start..start + stop]));
        }
        self.escaped(start)
    }

    /// A string with at least one escape; `self.at` is at the first backslash.
    fn escaped(&mut self, start: usize) -> Result<Arc<str>, Malformed> {
        let mut out = SCRATCH.take();
        out.clear();
        let shared = self.unescape(start, &mut out).map(|()| Arc::from(out.as_str()));
        if out.capacity() <= SCRATCH_BYTES_MAX {
            SCRATCH.set(out);
        }
        shared
    }

    fn unescape(&mut self, start: usize, out: &mut String) -> Result<(), Malformed> {
        let mut from = start;
        loop {
            out.push_str(&self.text[from..self.at]);
            if self.bytes[self.at] == b'"' {
                self.at += 1;
                return Ok(());
            }
            self.at += 1;
            self.escape(out)?;
            from = self.at;
            // Escapes cluster (`\n\n`, `\"`), and between two of them there are few bytes: look near first.
            let near = self.bytes.len().min(from + 16);
            let found = self.bytes[from..near].iter().position(|byte| matches!(byte, b'"' | b'\\'));
            let found = match found {
                Some(found) => found,
                None => match memchr::memchr2(b'"', b'\\', &self.bytes[near..]) {
                    Some(found) => near - from + found,
                    None => return self.fail(),
                },
            };
            self.at = from + found;
        }
    }

    fn escape(&mut self, out: &mut String) -> Result<(), Malformed> {
        let Some(byte) = self.peek() else {
            return self.fail();
        };
        self.at += 1;
        out.push(match byte {
            b'n' => '\n',
            b't' => '\t',
            b'r' => '\r',
            b'"' => '"',
            b'\\' => '\\',
            b'/' => '/',
            b'b' => '\u{8}',
            b'f' => '\u{c}',
            b'u' => self.unicode()?,
            _ => return self.fail(),
        });
        Ok(())
    }

    fn unicode(&mut self) -> Result<char, Malformed> {
        let first = self.hex4()?;
        if !(0xd800..0xe000).contains(&first) {
            return char::from_u32(first).map_or_else(|| self.fail(), Ok);
        }
        let here = self.at;
        if first < 0xdc00 && self.bytes[self.at..].starts_with(b"\\u") {
            self.at += 2;
            let second = self.hex4()?;
            if (0xdc00..0xe000).contains(&second) {
                let code = 0x1_0000 + ((first - 0xd800) << 10) + (second - 0xdc00);
                return char::from_u32(code).map_or_else(|| self.fail(), Ok);
            }
            self.at = here;
        }
        self.flawed(Flaw::Surrogate);
        Ok(char::REPLACEMENT_CHARACTER)
    }

    fn hex4(&mut self) -> Result<u32, Malformed> {
        let Some(digits) = self.bytes.get(self.at..self.at + 4) else {
            return self.fail();
        };
        let mut code = 0;
        for &digit in digits {
            let Some(digit) = (digit as char).to_digit(16) else {
                return self.fail();
            };
            code = code * 16 + digit;
        }
        self.at += 4;
        Ok(code)
    }

    /// Steps over one value, however deep, by brackets and quotes alone.
    fn skip(&mut self) -> Result<(), Malformed> {
        self.space();
        let start = self.at;
        let mut depth = 0usize;
        loop {
            match self.peek() {
                None if depth == 0 && self.at > start => return Ok(()),
                None => return self.fail(),
                Some(b'"') => self.skip_string()?,
                Some(b'{' | b'[') => {
                    depth += 1;
                    if depth > NESTING_MAX {
                        return Err(Malformed { offset: self.at, is_too_deep: true });
                    }
                    self.at += 1;
                }
                Some(b'}' | b']' | b',') if depth == 0 => {
                    return if self.at > start { Ok(()) } else { self.fail() };
                }
                Some(b'}' | b']') => {
                    depth -= 1;
                    self.at += 1;
                    if depth == 0 {
                        return Ok(());
                    }
                }
                Some(_) => self.at += 1,
            }
        }
    }

    fn skip_string(&mut self) -> Result<(), Malformed> {
        self.at += 1;
        loop {
            let Some(stop) = memchr::memchr2(b'"', b'\\', &self.bytes[self.at..]) else {
                return self.fail();
            };
            self.at += stop;
            if self.bytes[self.at] == b'"' {
                self.at += 1;
                return Ok(());
            }
            self.at = (self.at + 2).min(self.bytes.len());
        }
    }
}

/// Pairs of an object, with repeated keys folded as a Python dict folds them.
#[derive(Default)]
struct Pairs {
    pairs: Fields,
    index: std::collections::HashMap<Arc<str>, usize>,
}

impl Pairs {
    fn insert(&mut self, key: Arc<str>, value: Json) {
        if let Some(slot) = self.position(&key) {
            self.pairs[slot].1 = value;
            return;
        }
        if self.pairs.len() >= LINEAR_KEYS_MAX {
            self.index.insert(Arc::clone(&key), self.pairs.len());
        }
        self.pairs.push((key, value));
    }

    fn position(&mut self, key: &str) -> Option<usize> {
        if self.pairs.len() < LINEAR_KEYS_MAX {
            return self.pairs.iter().position(|(name, _)| &**name == key);
        }
        if self.index.is_empty() {
            self.index = self.pairs.iter().enumerate().map(|(slot, (name, _))| (Arc::clone(name), slot)).collect();
        }
        self.index.get(key).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value(text: &str) -> Json {
        parse(text).expect("valid").0
    }

    #[test]
    fn a_tree_has_a_bounded_number_of_values_and_the_rest_is_read_past() {
        let many = format!("[{}1]", "0,".repeat(VALUES_MAX + 10));
        let (tree, flaw) = parse(&many).unwrap();
        assert_eq!((tree.as_list().map(<[Json]>::len), flaw), (Some(VALUES_MAX - 1), Some(Flaw::Size)));
        let text = format!("{{\"a\":{many},\"model\":\"m\"}}");
        let (fields, flaw) = parse_fields(&text, |field| field == "model").unwrap();
        assert_eq!((fields.len(), flaw), (1, None), "what nobody wants is not counted");
        assert!(parse(&many[..many.len() - 1]).is_err());
    }

    #[test]
    fn nesting_that_no_engine_reads_is_refused_wherever_it_is() {
        let nested = |depth: usize| format!("{}{}", "[".repeat(depth), "]".repeat(depth));
        let of = |value: &str| parse_fields(&format!("{{\"a\":{value}}}"), |_| false);
        assert!(of(&nested(NESTING_MAX)).is_ok());
        assert!(of(&nested(NESTING_MAX + 1)).unwrap_err().is_too_deep);
        let bomb = "[".repeat(1 << 20);
        assert!(of(&bomb).unwrap_err().is_too_deep && parse(&bomb).unwrap_err().is_too_deep);
    }

    #[test]
    fn reads_what_python_reads_and_the_standard_does_not() {
        assert!(matches!(value("NaN"), Json::Float(number) if number.is_nan()));
        assert_eq!(value("[-Infinity, Infinity]").as_list().map(<[Json]>::len), Some(2));
        assert_eq!(value(r#"{"a":1,"b":2,"a":3}"#), Json::map([("a", Json::Int(3)), ("b", Json::Int(2))]));
        assert_eq!(value("\u{feff} 1 "), Json::Int(1));
        assert_eq!(value("\"a\tb\""), Json::text("a\tb"));
    }

    #[test]
    fn escapes_become_characters() {
        assert_eq!(value(r#""a\n\u00fc\ud83d\ude00\"\\\/""#), Json::text("a\nü😀\"\\/"));
    }

    #[test]
    fn lone_surrogates_and_depth_and_huge_integers_are_flaws_and_not_errors() {
        assert_eq!(parse(r#""\ud800""#).expect("json").1, Some(Flaw::Surrogate));
        assert_eq!(parse(r#""\ud800\u0041""#).expect("json"), (Json::text("\u{fffd}A"), Some(Flaw::Surrogate)));
        let deep = "[".repeat(1000) + &"]".repeat(1000);
        assert_eq!(parse(&deep).expect("json").1, Some(Flaw::Depth));
        assert_eq!(parse(&"9".repeat(60)).expect("json").1, Some(Flaw::Number));
    }

    #[test]
    fn what_python_refuses_is_malformed() {
        for text in ["", " ", "{", "[1,]", "{\"a\"}", "01", "1 2", "'a'", "{a:1}", "\"\\x\"", "nul", "-", "\"abc"] {
            assert!(parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn repeated_keys_of_a_large_object_fold_too() {
        let many: Vec<String> = (0..200).map(|key| format!("\"k{}\":{key}", key % 60)).collect();
        let Json::Map(pairs) = value(&format!("{{{}}}", many.join(","))) else { unreachable!("an object") };
        assert_eq!(pairs.len(), 60);
        assert_eq!(pairs[3], (Arc::from("k3"), Json::Int(183)));
    }

    #[test]
    fn unwanted_fields_are_stepped_over() {
        let text = r#"{"x":{"y":["}",1,{"z":"\"]"}]},"model":"m","q":-1.5e3 ,"model":"n"}"#;
        let (fields, flaw) = parse_fields(text, |key| key == "model").expect("object");
        assert_eq!((fields, flaw), (vec![(Arc::from("model"), Json::text("n"))], None));
    }

    proptest::proptest! {
        #[test]
        fn any_text_is_read_or_refused_without_a_panic(text in "\\PC*") {
            let _ = parse(&text);
            let _ = parse_fields(&text, |key| key.len() % 2 == 0);
        }

        #[test]
        fn json_like_text_is_read_or_refused_without_a_panic(text in "[\\[\\]{}\",:\\\\u0-9a-f eEn.+-]{0,60}") {
            let _ = parse(&text);
            let _ = parse_fields(&text, |_| false);
        }

        #[test]
        fn agrees_with_serde_on_standard_json(text in "[\\PC\\n\\t\"\\\\]{0,80}", number in proptest::num::i64::ANY) {
            let original = serde_json::json!({"text": text, "list": [number, null, true, {"k": "v"}]});
            let read = value(&original.to_string());
            proptest::prop_assert_eq!(read.get("text"), Some(&Json::text(&text)));
            proptest::prop_assert_eq!(read.get("list").and_then(|list| list.as_list()).map(|list| list[0].clone()), Some(Json::Int(number.into())));
        }
    }
}
