//! Logs: one JSON line a record to stderr, with the same keys as the Python half writes.
//!
//! Keys are `time level logger message`, and `request_id` and `replica` where the record has them. Any other field of a
//! record is appended to the message as `name=value`, so that the set of keys stays fixed. Prompt text, API keys and
//! bodies are never logged; should a key reach a record all the same, it is masked here.

use std::fmt;

use serde_json::{Map, Value};
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

use crate::config::LogConfig;
use crate::error::CoreError;
use crate::redact::redacted;

/// Installs the subscriber for the whole process. A second call changes nothing: an embedding host may log its own way.
pub fn init(config: &LogConfig) -> Result<(), CoreError> {
    let level: LevelFilter =
        config.level.parse().map_err(|_| CoreError::Config(format!("log.level: unknown level {:?}", config.level)))?;
    // A record that cannot be written is lost. Its complaint would go to stderr too, and panic there: a closed pipe
    // behind stderr would end the thread that listens to signals.
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(level)
        .with_writer(std::io::stderr)
        .log_internal_errors(false)
        .event_format(JsonLine)
        .finish();
    if tracing::subscriber::set_global_default(subscriber).is_err() {
        tracing::debug!("a log subscriber is already installed");
    }
    Ok(())
}

/// Formats one record as one line.
struct JsonLine;

impl<S, N> FormatEvent<S, N> for JsonLine
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(&self, _: &FmtContext<'_, S, N>, mut writer: Writer<'_>, event: &Event<'_>) -> fmt::Result {
        let mut time = String::new();
        SystemTime.format_time(&mut Writer::new(&mut time))?;
        let mut fields = Fields::default();
        event.record(&mut fields);
        let metadata = event.metadata();
        let mut line = Map::new();
        line.insert("time".to_owned(), time.into());
        line.insert("level".to_owned(), level_name(*metadata.level()).into());
        line.insert("logger".to_owned(), metadata.target().replace("::", ".").into());
        line.insert("message".to_owned(), redacted(&(fields.message + &fields.rest)).into_owned().into());
        for (key, value) in [("request_id", fields.request_id), ("replica", fields.replica)] {
            if let Some(value) = value {
                line.insert(key.to_owned(), value.into());
            }
        }
        writeln!(writer, "{}", Value::Object(line))
    }
}

fn level_name(level: Level) -> &'static str {
    match level {
        Level::ERROR => "error",
        Level::WARN => "warning",
        Level::INFO => "info",
        Level::DEBUG | Level::TRACE => "debug",
    }
}

#[derive(Default)]
struct Fields {
    message: String,
    rest: String,
    request_id: Option<String>,
    replica: Option<String>,
}

impl Fields {
    fn put(&mut self, field: &Field, value: String) {
        match field.name() {
            "message" => self.message = value,
            "request_id" => self.request_id = Some(value),
            "replica" => self.replica = Some(value),
            name => self.rest.extend([" ", name, "=", &value]),
        }
    }
}

impl Visit for Fields {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.put(field, value.to_owned());
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.put(field, format!("{value:?}"));
    }
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::Arc;

    use parking_lot::Mutex;

    use super::*;

    #[derive(Clone, Default)]
    struct Sink(Arc<Mutex<Vec<u8>>>);

    impl io::Write for Sink {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_record_is_one_json_line_with_fixed_keys() {
        let sink = Sink::default();
        let writer = sink.clone();
        let subscriber = tracing_subscriber::fmt().with_writer(move || writer.clone()).event_format(JsonLine).finish();
        tracing::subscriber::with_default(subscriber, || {
            tracing::warn!(request_id = "r1", replica = "http://a", attempts = 3, "cannot connect:\n{}", "refused");
        });
        let text = String::from_utf8(sink.0.lock().clone()).unwrap();
        assert_eq!(text.lines().count(), 1, "{text}");
        let line: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(line["level"], "warning");
        assert_eq!(line["message"], "cannot connect:\nrefused attempts=3");
        assert_eq!(line["request_id"], "r1");
        assert_eq!(line["replica"], "http://a");
        assert!(line["logger"].as_str().unwrap().starts_with("warmfront_core.log"), "{text}");
        assert!(line["time"].as_str().unwrap().ends_with('Z'), "{text}");
    }

    #[test]
    fn an_unknown_level_is_named() {
        let error = init(&LogConfig { level: "loud".to_owned() }).unwrap_err();
        assert!(error.to_string().contains("loud"), "{error}");
    }

    /// Runs itself once more, with a stderr that nobody reads.
    #[test]
    fn a_log_that_nobody_reads_stops_nothing() {
        const CHILD: &str = "WARMFRONT_TEST_LOGS_INTO_A_CLOSED_PIPE";
        if std::env::var_os(CHILD).is_some() {
            init(&LogConfig { level: "info".to_owned() }).unwrap();
            tracing::warn!("lost");
            return;
        }
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let mut child = std::process::Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", "log::tests::a_log_that_nobody_reads_stops_nothing", "--nocapture"]);
        let ended = child.env(CHILD, "1").stdout(std::process::Stdio::null()).stderr(writer).status().unwrap();
        assert!(ended.success(), "{ended}");
    }
}
