//! Chat templates, rendered as the engine's Jinja renders them.
//!
//! The environment is that of `transformers`: blocks trimmed, loop controls, `raise_exception`, `strftime_now`, `tojson`
//! without HTML escapes, Python's string methods and printing. A template cannot run for ever ([`FUEL`]) nor grow without
//! bound ([`OUTPUT_BYTES_MAX`]). Whatever fails to render is a fallback for that request, never a guess.

use std::io;
use std::sync::Arc;

use minijinja::value::{Kwargs, Value, ValueKind};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, State};

use super::Fallback;
use super::detect::{ContentFormat, content_format};
use super::python;
use super::version::Version;
use crate::clock::CivilTime;

/// Instructions one rendering may use: about a second of work, a thousand times a long conversation.
const FUEL: u64 = 20_000_000;

/// Text one rendering may produce: twice the largest body, for templates that repeat content.
const OUTPUT_BYTES_MAX: usize = 128 << 20;

/// Tells templates the local time of the engines.
pub type LocalTime = Arc<dyn Fn() -> CivilTime + Send + Sync>;

/// A compiled chat template.
pub(super) struct Template {
    environment: Environment<'static>,
    pub(super) source: Arc<str>,
    pub(super) format: ContentFormat,
    /// The role `developer` appears in it.
    pub(super) knows_developer: bool,
}

impl Template {
    /// Compiles a source.
    ///
    /// # Errors
    /// Its syntax is not Jinja's, in words.
    pub(super) fn compile(source: &str, local_time: &LocalTime, version: Version) -> Result<Self, String> {
        let plain = without_generation_tags(source);
        let mut environment = environment(local_time);
        environment.add_template_owned("chat", plain.clone()).map_err(|error| error.to_string())?;
        Ok(Self {
            environment,
            source: Arc::from(source),
            format: content_format(&plain, version),
            knows_developer: source.contains("\"developer\"") || source.contains("'developer'"),
        })
    }

    /// Whether a system message may stand behind the first place, as the engine finds out: it renders a probe in an
    /// environment without the functions that templates usually have.
    pub(super) fn takes_inline_systems(&self) -> bool {
        let plain = without_generation_tags(&self.source);
        let message = |role: &str| {
            python::dict(vec![(Arc::from("role"), Value::from(role)), (Arc::from("content"), Value::from("t"))])
        };
        let probe = python::list(["system", "user", "system", "user"].map(message).to_vec());
        let variables = python::dict(vec![
            (Arc::from("messages"), probe),
            (Arc::from("add_generation_prompt"), Value::from(false)),
        ]);
        plain == *self.source && base_environment().render_named_str("chat", &plain, variables).is_ok()
    }

    /// Renders with these variables. `bytes` is a guess at the size of the result.
    pub(super) fn render(&self, variables: Value, bytes: usize) -> Result<String, Fallback> {
        let template = self.environment.get_template("chat").map_err(|_| Fallback::TemplateError)?;
        let mut output = Bounded { text: Vec::with_capacity(bytes) };
        template.render_captured_to(variables, &mut output).map_err(|error| {
            tracing::debug!(%error, "chat template failed");
            Fallback::TemplateError
        })?;
        String::from_utf8(output.text).map_err(|_| Fallback::TemplateError)
    }
}

struct Bounded {
    text: Vec<u8>,
}

impl io::Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.text.len() + bytes.len() > OUTPUT_BYTES_MAX {
            return Err(io::Error::other("rendered text is too long"));
        }
        self.text.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn base_environment() -> Environment<'static> {
    let mut environment = Environment::new();
    environment.set_trim_blocks(true);
    environment.set_lstrip_blocks(true);
    environment.set_auto_escape_callback(|_| AutoEscape::None);
    environment.set_fuel(Some(FUEL));
    environment.set_unknown_method_callback(method);
    environment.set_formatter(|out, _, value| write_printed(out, value));
    environment.add_filter("tojson", |value: Value, kwargs: Kwargs| python::tojson(&value, &kwargs));
    environment.add_filter("string", |value: Value| Value::from(printed(&value)));
    environment
        .add_filter("trim", |text: &str, characters: Option<&str>| strip(text, characters, true, true).to_owned());
    environment.add_test("sequence", is_sequence);
    environment.add_test("iterable", is_sequence);
    environment
}

fn environment(local_time: &LocalTime) -> Environment<'static> {
    let mut environment = base_environment();
    environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, message))
    });
    let local_time = Arc::clone(local_time);
    environment.add_function("strftime_now", move |format: &str| {
        local_time()
            .strftime(format)
            .ok_or_else(|| Error::new(ErrorKind::InvalidOperation, format!("strftime_now: cannot format {format}")))
    });
    environment
}

fn write_printed(out: &mut minijinja::Output, value: &Value) -> Result<(), Error> {
    match value.as_str() {
        Some(text) => out.write_str(text).map_err(Error::from),
        None => out.write_str(&printed(value)).map_err(Error::from),
    }
}

/// What Python's `str` gives.
fn printed(value: &Value) -> String {
    match value.kind() {
        ValueKind::Number => python::number(value),
        ValueKind::Seq | ValueKind::Map => python::repr(value),
        _ => value.to_string(),
    }
}

/// In Jinja strings and mappings are sequences and iterable too, and so is the undefined value.
fn is_sequence(value: &Value) -> bool {
    matches!(
        value.kind(),
        ValueKind::String | ValueKind::Seq | ValueKind::Map | ValueKind::Iterable | ValueKind::Undefined
    )
}

/// Python methods; stripping is ours because Python also strips the separators U+001C to U+001F.
fn method(state: &State, value: &Value, name: &str, arguments: &[Value]) -> Result<Value, Error> {
    let sides = match name {
        "strip" => Some((true, true)),
        "lstrip" => Some((true, false)),
        "rstrip" => Some((false, true)),
        _ => None,
    };
    if let (Some((left, right)), Some(text)) = (sides, value.as_str()) {
        let characters: Option<&str> = match arguments {
            [] => None,
            [only] if only.is_none() => None,
            [only] => Some(only.as_str().ok_or_else(|| Error::from(ErrorKind::InvalidOperation))?),
            _ => return Err(Error::from(ErrorKind::TooManyArguments)),
        };
        let stripped = strip(text, characters, left, right);
        return Ok(if stripped.len() == text.len() { value.clone() } else { Value::from(stripped) });
    }
    minijinja_contrib::pycompat::unknown_method_callback(state, value, name, arguments)
}

fn strip<'t>(text: &'t str, characters: Option<&str>, left: bool, right: bool) -> &'t str {
    let strips = |c: char| match characters {
        Some(characters) => characters.contains(c),
        None => is_space(c),
    };
    let text = if left { text.trim_start_matches(strips) } else { text };
    if right { text.trim_end_matches(strips) } else { text }
}

/// Python's `str.isspace`.
pub(super) fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

/// `{% generation %}` only marks spans for training; its body renders as if in a scope of its own.
fn without_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(open) = rest.find("{%") {
        let Some(length) = rest[open + 2..].find("%}") else {
            break; // looked for behind the opening, since `{%}` is no tag
        };
        let tag = &rest[open + 2..open + 2 + length];
        let replacement = match tag.trim_matches(['-', '+']).trim() {
            "generation" => tag.replace("generation", "with"),
            "endgeneration" => tag.replace("endgeneration", "endwith"),
            _ => tag.to_owned(),
        };
        out.push_str(&rest[..open + 2]);
        out.push_str(&replacement);
        out.push_str("%}");
        rest = &rest[open + 2 + length + 2..];
    }
    out.push_str(rest);
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::json;

    fn compile(source: &str) -> Template {
        let noon: LocalTime = Arc::new(|| CivilTime::of_unix_s(1_796_029_200));
        Template::compile(source, &noon, Version::default()).expect("template")
    }

    fn render(source: &str, variables: &str) -> Result<String, Fallback> {
        compile(source).render(python::value(&json::parse(variables).expect("JSON").0), 0)
    }

    // bug 154
    #[test]
    fn values_print_as_python_prints_them() {
        let variables = r#"{"n":null,"t":true,"f":1.0,"l":["a",1],"m":{"k":"v"}}"#;
        let text = render("{{ n }} {{ t }} {{ f }} {{ l }} {{ m }} {{ l | string }} {{ u }}|", variables);
        assert_eq!(text.as_deref(), Ok("None True 1.0 ['a', 1] {'k': 'v'} ['a', 1] |"));
    }

    // bug 153
    #[test]
    fn tojson_keeps_order_and_escapes_no_html() {
        let variables = r#"{"m":{"z":"<ü>","a":[1,2]}}"#;
        assert_eq!(render("{{ m | tojson }}", variables).as_deref(), Ok(r#"{"z": "<ü>", "a": [1, 2]}"#));
        assert_eq!(
            render("{{ m | tojson(indent=2) }}", variables).as_deref(),
            Ok("{\n  \"z\": \"<ü>\",\n  \"a\": [\n    1,\n    2\n  ]\n}")
        );
        assert_eq!(
            render("{{ m | tojson(separators=(',', ':'), sort_keys=true, ensure_ascii=true) }}", variables).as_deref(),
            Ok(r#"{"a":[1,2],"z":"<\u00fc>"}"#)
        );
    }

    #[test]
    fn generation_blocks_render_their_body() {
        let source = "a\n{%- generation %}\nb\n{% endgeneration -%}\nc";
        assert_eq!(render(source, "{}").as_deref(), Ok("ab\nc"));
    }

    #[test]
    fn a_tag_that_closes_at_once_is_an_error_of_the_template() {
        let midnight: LocalTime = Arc::new(|| CivilTime::of_unix_s(0));
        assert!(Template::compile("{%}{% endmacro %}", &midnight, Version::default()).is_err());
    }

    #[test]
    fn the_clock_is_handed_in() {
        assert_eq!(render("{{ strftime_now('%d %b %Y') }}", "{}").as_deref(), Ok("30 Nov 2026"));
        assert_eq!(render("{{ strftime_now('%Q') }}", "{}"), Err(Fallback::TemplateError));
    }

    #[test]
    fn strings_and_maps_are_iterable_as_in_jinja() {
        let source = "{{ 'x' is iterable }} {{ 'x' is sequence }} {{ m is sequence }} {{ 1 is iterable }}";
        assert_eq!(render(source, r#"{"m":{}}"#).as_deref(), Ok("True True True False"));
    }

    #[test]
    fn loops_and_growth_are_bounded() {
        let endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}";
        assert_eq!(render(endless, "{}"), Err(Fallback::TemplateError));
        let growing = "{% for a in range(9999) %}{{ x }}{% endfor %}";
        let variables = format!(r#"{{"x":"{}"}}"#, "y".repeat(1 << 16));
        assert_eq!(render(growing, &variables), Err(Fallback::TemplateError));
    }

    #[test]
    fn raised_exceptions_are_template_errors() {
        assert_eq!(render("{{ raise_exception('no') }}", "{}"), Err(Fallback::TemplateError));
        assert_eq!(render("{{ a.b.c }}", "{}"), Err(Fallback::TemplateError));
    }

    #[test]
    fn python_strips_what_python_strips() {
        assert_eq!(render("{{ x.strip() }}|{{ x | trim }}", "{\"x\":\"\\u001f a \\u00a0\"}").as_deref(), Ok("a|a"));
        assert_eq!(render("{{ x.rstrip('ab') }}", r#"{"x":"xxabba"}"#).as_deref(), Ok("xx"));
    }
}
