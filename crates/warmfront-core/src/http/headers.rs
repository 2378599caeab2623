//! Which headers pass: all end-to-end ones, in order, repeated ones included; none that belong to one connection.
//!
//! Hop-by-hop are the fixed set of RFC 9110 section 7.6.1 and every name that `Connection` lists. `Host`, the length and
//! the framing are written anew for the next hop, `Expect` is answered here.

use http::header::{CONNECTION, CONTENT_LENGTH, EXPECT, HOST, HeaderName, HeaderValue, TRANSFER_ENCODING};
use http::{HeaderMap, StatusCode};
use xxhash_rust::xxh3::xxh3_64;

/// Longest `x-request-id` that is kept; longer ones are replaced.
const REQUEST_ID_BYTES_MAX: usize = 128;
/// Longest flow key that is kept.
const FLOW_BYTES_MAX: usize = 128;

pub(crate) const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
pub(crate) const REPLICA: HeaderName = HeaderName::from_static("x-warmfront-replica");
pub(crate) const PREDICTED: HeaderName = HeaderName::from_static("x-warmfront-predicted-cached-tokens");
/// Names the flow of fair queueing; set by a gateway in front that knows the tenant.
pub(crate) const FLOW: HeaderName = HeaderName::from_static("x-warmfront-flow");
/// vLLM's own header for priorities; lower is served earlier there, and it overrules the body.
pub(crate) const PRIORITY: HeaderName = HeaderName::from_static("x-vllm-priority");
pub(crate) const RANK: HeaderName = HeaderName::from_static("x-data-parallel-rank");

/// Headers of a request as the engine gets them; `Host` and `x-request-id` are left to the caller.
pub(crate) fn for_engine(headers: &HeaderMap) -> HeaderMap {
    end_to_end(headers, |name| *name == HOST || *name == CONTENT_LENGTH || *name == EXPECT || *name == REQUEST_ID)
}

/// Headers of an answer as the client gets them. The length stays, since the body passes unchanged, except where it says
/// nothing about the body: beside `Transfer-Encoding`, which overrules it (passing it on would cut the body or let two
/// answers be read as one), and in an answer that has none.
pub(crate) fn for_client(status: StatusCode, headers: HeaderMap) -> HeaderMap {
    let is_length_void = status == StatusCode::NO_CONTENT || headers.contains_key(TRANSFER_ENCODING);
    let is_dropped = |name: &HeaderName| *name == REQUEST_ID || (is_length_void && *name == CONTENT_LENGTH);
    let passes_whole = !headers.keys().any(|name| is_hop_by_hop(name.as_str()) || is_dropped(name));
    if passes_whole { headers } else { end_to_end(&headers, is_dropped) }
}

fn end_to_end(headers: &HeaderMap, also_drop: impl Fn(&HeaderName) -> bool) -> HeaderMap {
    let listed = listed_in_connection(headers);
    let mut kept = HeaderMap::with_capacity(headers.len() + 4);
    for (name, value) in headers {
        let is_listed = listed.iter().any(|listed| listed.eq_ignore_ascii_case(name.as_str()));
        if !is_hop_by_hop(name.as_str()) && !is_listed && !also_drop(name) {
            kept.append(name.clone(), value.clone());
        }
    }
    kept
}

fn listed_in_connection(headers: &HeaderMap) -> Vec<&str> {
    let values = headers.get_all(CONNECTION).iter().filter_map(|value| value.to_str().ok());
    values.flat_map(|value| value.split(',')).map(str::trim).filter(|name| !name.is_empty()).collect()
}

fn is_hop_by_hop(name: &str) -> bool {
    matches!(name, "connection" | "keep-alive" | "te" | "trailer" | "transfer-encoding" | "upgrade")
        || name.starts_with("proxy-")
}

/// The client's request id if it is short and plain, otherwise one made of `fresh`.
pub(crate) fn request_id(headers: &HeaderMap, fresh: u64) -> HeaderValue {
    let given = headers.get(REQUEST_ID).filter(|value| {
        let bytes = value.as_bytes();
        (1..=REQUEST_ID_BYTES_MAX).contains(&bytes.len()) && bytes.iter().all(u8::is_ascii_graphic)
    });
    given.cloned().unwrap_or_else(|| {
        HeaderValue::try_from(format!("wf-{fresh:016x}")).expect("hexadecimal digits are a header value")
    })
}

/// Hash of the session that a header names: `x-session-id` and its vendor spellings (`x-…-session-id`).
pub(crate) fn session_key(headers: &HeaderMap) -> Option<u64> {
    let is_session = |name: &str| name.starts_with("x-") && name.ends_with("session-id");
    let value = headers.iter().find(|(name, value)| is_session(name.as_str()) && !value.is_empty())?.1;
    Some(xxh3_64(value.as_bytes()))
}

/// The flow this request queues in.
pub(crate) fn flow(headers: &HeaderMap) -> String {
    let given = headers.get(FLOW).and_then(|value| value.to_str().ok());
    given.filter(|flow| (1..=FLOW_BYTES_MAX).contains(&flow.len())).unwrap_or("default").to_owned()
}

pub(crate) fn priority(headers: &HeaderMap) -> Option<i64> {
    headers.get(PRIORITY)?.to_str().ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
        let pairs = pairs.iter().map(|(name, value)| (HeaderName::from_static(name), HeaderValue::from_static(value)));
        let mut headers = HeaderMap::new();
        for (name, value) in pairs {
            headers.append(name, value);
        }
        headers
    }

    fn names(headers: &HeaderMap) -> Vec<(&str, &str)> {
        headers.iter().map(|(name, value)| (name.as_str(), value.to_str().unwrap())).collect()
    }

    // bug 61, 66
    #[test]
    fn all_end_to_end_headers_reach_the_engine_in_order_and_repeated() {
        let given = headers(&[
            ("host", "client.example"),
            ("x-b", "1"),
            ("authorization", "Bearer k"),
            ("connection", "keep-alive, X-Secret"),
            ("x-secret", "s"),
            ("te", "trailers"),
            ("proxy-authorization", "p"),
            ("upgrade", "h2c"),
            ("expect", "100-continue"),
            ("content-length", "3"),
            ("x-a", "2"),
            ("x-b", "3"),
        ]);
        assert_eq!(
            names(&for_engine(&given)),
            [("x-b", "1"), ("x-b", "3"), ("authorization", "Bearer k"), ("x-a", "2")]
        );
    }

    #[test]
    fn an_answer_keeps_its_length_encoding_and_both_cookies() {
        let given = headers(&[
            ("set-cookie", "a=1"),
            ("content-encoding", "gzip"),
            ("content-length", "9"),
            ("keep-alive", "timeout=5"),
            ("set-cookie", "b=2"),
        ]);
        assert_eq!(
            names(&for_client(StatusCode::OK, given)),
            [("set-cookie", "a=1"), ("set-cookie", "b=2"), ("content-encoding", "gzip"), ("content-length", "9")]
        );
    }

    // bug 62
    #[test]
    fn a_length_that_does_not_measure_the_body_is_dropped() {
        let both = headers(&[("content-length", "3"), ("transfer-encoding", "chunked"), ("x-a", "1")]);
        assert_eq!(names(&for_client(StatusCode::OK, both)), [("x-a", "1")]);
        assert_eq!(for_client(StatusCode::NO_CONTENT, headers(&[("content-length", "5")])), HeaderMap::new());
    }

    #[test]
    fn a_sane_request_id_is_kept_and_any_other_replaced() {
        assert_eq!(request_id(&headers(&[("x-request-id", "abc-1")]), 5), "abc-1");
        for odd in ["", "a b", "\u{e9}"] {
            let mut given = HeaderMap::new();
            given.insert(REQUEST_ID, HeaderValue::from_bytes(odd.as_bytes()).unwrap());
            assert_eq!(request_id(&given, 5), "wf-0000000000000005");
        }
        assert_eq!(request_id(&HeaderMap::new(), 5), "wf-0000000000000005");
    }

    #[test]
    fn sessions_are_found_under_their_vendor_spellings() {
        let plain = session_key(&headers(&[("x-session-id", "s")]));
        assert!(plain.is_some());
        assert_eq!(session_key(&headers(&[("x-claude-code-session-id", "s")])), plain);
        assert_eq!(session_key(&headers(&[("session-id", "s"), ("x-session-id", "")])), None);
    }

    #[test]
    fn flow_and_priority_have_sane_defaults() {
        assert_eq!(flow(&HeaderMap::new()), "default");
        assert_eq!(flow(&headers(&[("x-warmfront-flow", "team-a")])), "team-a");
        assert_eq!(priority(&headers(&[("x-vllm-priority", "-5")])), Some(-5));
        assert_eq!(priority(&headers(&[("x-vllm-priority", "high")])), None);
    }
}
