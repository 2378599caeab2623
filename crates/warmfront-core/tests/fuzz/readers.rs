//! The reader of request bodies.

use std::time::{Duration, Instant};

use bytes::Bytes;
use proptest::prelude::*;
use serde_json::Value;
use warmfront_core::http::json;
use warmfront_core::http::request::{Endpoint, parse};

use crate::seeds;

const ENDPOINTS: [Endpoint; 5] =
    [Endpoint::Chat, Endpoint::Completions, Endpoint::Responses, Endpoint::Messages, Endpoint::Other];

/// Much more than any body of this size needs, also unoptimised.
const TIME_MAX: Duration = Duration::from_secs(5);

fn read(body: &[u8]) {
    let start = Instant::now();
    for endpoint in ENDPOINTS {
        let read = parse(endpoint, &Bytes::copy_from_slice(body));
        let is_object = serde_json::from_slice::<Value>(body).is_ok_and(|value| value.is_object());
        assert!(read.is_ok() || !is_object, "an object is refused: {read:?}");
    }
    assert!(start.elapsed() < TIME_MAX, "{:?} for {} bytes", start.elapsed(), body.len());
}

#[test]
fn every_kept_body_is_read_or_refused() {
    for body in seeds::corpus("json") {
        read(&body);
    }
}

// bug 74
#[test]
fn bodies_nested_without_end_are_read_in_time_and_on_a_small_stack() {
    for (open, close) in [("[", "]"), ("{\"a\":", "}"), ("[{\"a\":[", "]}]")] {
        let nested = open.repeat(200_000);
        for body in [format!("{{\"messages\":{nested}"), format!("{{\"messages\":{nested}1{}}}", close.repeat(200_000))]
        {
            let small = std::thread::Builder::new().stack_size(512 * 1024);
            small
                .spawn(move || parse(Endpoint::Chat, &Bytes::from(body)).is_ok())
                .unwrap()
                .join()
                .expect("no overflow");
        }
    }
}

proptest! {
    #![proptest_config(seeds::config(256))]

    #[test]
    fn any_body_is_read_or_refused(body in seeds::input("json")) {
        read(&body);
    }

    /// What both read they read alike, as far as both can hold it.
    #[test]
    fn a_tree_has_the_keys_that_another_reader_finds(body in seeds::input("json")) {
        let (Ok(text), Ok(Value::Object(other))) = (std::str::from_utf8(&body), serde_json::from_slice(&body)) else {
            return Ok(());
        };
        let (fields, _) = json::parse_fields(text, |_| true).expect("an object");
        let names: Vec<&str> = fields.iter().map(|(name, _)| &**name).collect();
        let expected: Vec<&str> = other.keys().map(String::as_str).collect();
        prop_assert_eq!(names, expected);
    }
}
