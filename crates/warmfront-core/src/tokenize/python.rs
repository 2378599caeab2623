//! Values as Python would have them in a template.
//!
//! Templates print, compare and re-encode what the engine hands them as Python objects. Maps keep their order, printing
//! a list gives Python's `repr`, and `tojson` is `json.dumps` without HTML escapes.

use std::fmt::{self, Write as _};
use std::sync::Arc;

use minijinja::value::{Enumerator, Kwargs, Object, ObjectRepr, Value, ValueKind};
use minijinja::{Error, ErrorKind};

use crate::http::json::Json;

/// Nesting that `tojson` and `repr` follow. Bodies are bounded already; templates can build deeper values.
const DEPTH_MAX: usize = 256;

/// A Python dict.
#[derive(Debug)]
pub(super) struct Dict(pub Vec<(Arc<str>, Value)>);

impl Dict {
    fn find(&self, key: &str) -> Option<&Value> {
        self.0.iter().find(|(name, _)| &**name == key).map(|(_, value)| value)
    }
}

impl Object for Dict {
    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.find(key.as_str()?).cloned()
    }

    fn get_value_by_str(self: &Arc<Self>, key: &str) -> Option<Value> {
        self.find(key).cloned()
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Values(self.0.iter().map(|(key, _)| Value::from(Arc::clone(key))).collect())
    }

    fn render(self: &Arc<Self>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&repr(&Value::from_dyn_object(Arc::clone(self))))
    }
}

/// A Python list.
#[derive(Debug)]
pub(super) struct List(pub Vec<Value>);

impl Object for List {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Seq
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.0.get(key.as_usize()?).cloned()
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Seq(self.0.len())
    }

    fn render(self: &Arc<Self>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&repr(&Value::from_dyn_object(Arc::clone(self))))
    }
}

/// The value a template sees for a piece of JSON. Strings are shared.
pub(super) fn value(json: &Json) -> Value {
    match json {
        Json::Null => Value::from(()),
        Json::Bool(value) => Value::from(*value),
        Json::Int(value) => i64::try_from(*value).map_or_else(|_| Value::from(*value), Value::from),
        Json::Float(value) => Value::from(*value),
        Json::Str(text) => Value::from(Arc::clone(text)),
        Json::List(items) => list(items.iter().map(value).collect()),
        Json::Map(pairs) => dict(pairs.iter().map(|(key, item)| (Arc::clone(key), value(item))).collect()),
    }
}

pub(super) fn dict(pairs: Vec<(Arc<str>, Value)>) -> Value {
    Value::from_object(Dict(pairs))
}

pub(super) fn list(items: Vec<Value>) -> Value {
    Value::from_object(List(items))
}

/// Python's `repr` of a value.
pub(super) fn repr(value: &Value) -> String {
    let mut out = String::new();
    write_repr(&mut out, value, 0);
    out
}

fn write_repr(out: &mut String, value: &Value, depth: usize) {
    if depth > DEPTH_MAX {
        out.push_str("...");
        return;
    }
    match value.kind() {
        ValueKind::String => quote(out, value.as_str().unwrap_or_default()),
        ValueKind::Seq => {
            out.push('[');
            for (at, item) in value.try_iter().into_iter().flatten().enumerate() {
                out.push_str(if at == 0 { "" } else { ", " });
                write_repr(out, &item, depth + 1);
            }
            out.push(']');
        }
        ValueKind::Map => {
            out.push('{');
            for (at, key) in value.try_iter().into_iter().flatten().enumerate() {
                out.push_str(if at == 0 { "" } else { ", " });
                write_repr(out, &key, depth + 1);
                out.push_str(": ");
                write_repr(out, &value.get_item(&key).unwrap_or_default(), depth + 1);
            }
            out.push('}');
        }
        ValueKind::Number => out.push_str(&number(value)),
        _ => {
            let _ = write!(out, "{value}");
        }
    }
}

/// A string as Python quotes it: single quotes unless only double ones avoid an escape.
fn quote(out: &mut String, text: &str) {
    let mark = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(mark);
    for c in text.chars() {
        match c {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c if c == mark => {
                out.push('\\');
                out.push(c);
            }
            c if (c as u32) < 0x20 || ('\u{7f}'..='\u{a0}').contains(&c) => {
                let _ = write!(out, "\\x{:02x}", c as u32);
            }
            c => out.push(c),
        }
    }
    out.push(mark);
}

/// A number as Python prints it.
pub(super) fn number(value: &Value) -> String {
    if value.is_integer() {
        return value.to_string();
    }
    f64::try_from(value.clone()).map_or_else(|_| value.to_string(), float)
}

/// The shortest decimal that reads back, in Python's layout: exponents below 1e-4 and from 1e16 on.
fn float(value: f64) -> String {
    if value.is_nan() {
        return "nan".to_owned();
    }
    if value.is_infinite() {
        return if value > 0.0 { "inf" } else { "-inf" }.to_owned();
    }
    let magnitude = value.abs();
    if magnitude != 0.0 && !(1e-4..1e16).contains(&magnitude) {
        let scientific = format!("{value:e}");
        let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
        let (sign, exponent) = exponent.strip_prefix('-').map_or(('+', exponent), |exponent| ('-', exponent));
        return format!("{digits}e{sign}{exponent:0>2}");
    }
    let plain = value.to_string();
    if plain.contains('.') { plain } else { plain + ".0" }
}

/// Layout of one `json.dumps` call.
struct Layout {
    ensure_ascii: bool,
    indent: Option<String>,
    item: String,
    key: String,
    sort_keys: bool,
}

/// `tojson` of chat templates: `json.dumps(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False)`.
pub(super) fn tojson(value: &Value, kwargs: &Kwargs) -> Result<Value, Error> {
    let indent = match kwargs.get::<Option<Value>>("indent")? {
        None => None,
        Some(indent) if indent.kind() == ValueKind::None => None,
        Some(indent) => Some(match indent.as_usize() {
            Some(width) => " ".repeat(width.min(64)),
            None => indent.as_str().unwrap_or_default().to_owned(),
        }),
    };
    let (item, key) = match kwargs.get::<Option<Vec<String>>>("separators")?.as_deref() {
        Some([item, key]) => (item.clone(), key.clone()),
        Some(_) => {
            return Err(Error::new(ErrorKind::InvalidOperation, "separators must be a pair"));
        }
        None if indent.is_some() => (",".to_owned(), ": ".to_owned()),
        None => (", ".to_owned(), ": ".to_owned()),
    };
    let ensure_ascii = kwargs.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false);
    let sort_keys = kwargs.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    kwargs.assert_all_used()?;
    let mut out = String::new();
    Layout { ensure_ascii, indent, item, key, sort_keys }.write(&mut out, value, 0)?;
    Ok(Value::from(out))
}

/// `json.dumps(x)` with Python's defaults, of a tree that is not in a template.
pub(super) fn dumps(json: &Json, ensure_ascii: bool) -> String {
    let layout = Layout { ensure_ascii, indent: None, item: ", ".to_owned(), key: ": ".to_owned(), sort_keys: false };
    let mut out = String::new();
    // A tree of JSON has no value that `json.dumps` refuses.
    let _ = layout.write(&mut out, &value(json), 0);
    out
}

impl Layout {
    fn write(&self, out: &mut String, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > DEPTH_MAX {
            return Err(Error::new(ErrorKind::InvalidOperation, "value nests too deeply for tojson"));
        }
        match value.kind() {
            ValueKind::None => out.push_str("null"),
            ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => out.push_str(match number(value).as_str() {
                "nan" => "NaN",
                "inf" => "Infinity",
                "-inf" => "-Infinity",
                plain => plain,
            }),
            ValueKind::String => self.string(out, value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => {
                let items: Vec<Value> = value.try_iter()?.collect();
                self.group(out, ['[', ']'], &items, depth, |out, item| self.write(out, item, depth + 1))?;
            }
            ValueKind::Map => {
                let mut keys: Vec<Value> = value.try_iter()?.collect();
                if self.sort_keys {
                    keys.sort();
                }
                self.group(out, ['{', '}'], &keys, depth, |out, key| {
                    self.string(out, &key.to_string());
                    out.push_str(&self.key);
                    self.write(out, &value.get_item(key)?, depth + 1)
                })?;
            }
            kind => {
                return Err(Error::new(ErrorKind::InvalidOperation, format!("{kind} is not JSON serializable")));
            }
        }
        Ok(())
    }

    fn group(
        &self,
        out: &mut String,
        [open, close]: [char; 2],
        items: &[Value],
        depth: usize,
        mut write: impl FnMut(&mut String, &Value) -> Result<(), Error>,
    ) -> Result<(), Error> {
        out.push(open);
        for (at, item) in items.iter().enumerate() {
            out.push_str(if at == 0 { "" } else { &self.item });
            self.line(out, depth + 1);
            write(out, item)?;
        }
        if !items.is_empty() {
            self.line(out, depth);
        }
        out.push(close);
        Ok(())
    }

    fn line(&self, out: &mut String, depth: usize) {
        if let Some(indent) = &self.indent {
            out.push('\n');
            for _ in 0..depth {
                out.push_str(indent);
            }
        }
    }

    fn string(&self, out: &mut String, text: &str) {
        out.push('"');
        for c in text.chars() {
            match c {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\u{8}' => out.push_str("\\b"),
                '\u{c}' => out.push_str("\\f"),
                c if (c as u32) < 0x20 || (self.ensure_ascii && !c.is_ascii()) => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        let _ = write!(out, "\\u{unit:04x}");
                    }
                }
                c => out.push(c),
            }
        }
        out.push('"');
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::json;

    fn of(text: &str) -> Value {
        value(&json::parse(text).expect("JSON").0)
    }

    #[test]
    fn printing_gives_what_python_prints() {
        let printed = of(r#"{"b":[1,2.0,true,null,"it's","q\"","x\n"],"a":{}}"#).to_string();
        assert_eq!(printed, r#"{'b': [1, 2.0, True, None, "it's", 'q"', 'x\n'], 'a': {}}"#);
    }

    #[test]
    fn floats_print_as_in_python() {
        for (value, printed) in [
            (1.0, "1.0"),
            (0.1, "0.1"),
            (1e16, "1e+16"),
            (1.5e-5, "1.5e-05"),
            (123_456.789, "123456.789"),
            (1e22, "1e+22"),
        ] {
            assert_eq!(float(value), printed);
        }
    }

    #[test]
    fn json_is_written_as_python_writes_it() {
        let tree = json::parse(r#"{"z":"ü<\u0001","a":[1,{}],"e":[]}"#).expect("JSON").0;
        assert_eq!(dumps(&tree, false), r#"{"z": "ü<\u0001", "a": [1, {}], "e": []}"#);
        assert_eq!(dumps(&Json::text("ü😀"), true), r#""\u00fc\ud83d\ude00""#);
    }
}
