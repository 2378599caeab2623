//! Which headers pass: all end-to-end ones, in order, repeated ones included; none that belong to one connection.
//!
//! Hop-by-hop are the fixed set of RFC 9110 section 7.6.1 and every name that `Connection` lists. `Host`, the length and
//! the framing are written anew for the next hop, `Expect` is answered here. What is addressed to us (`x-warmfront-…`)
//! ends here, and [`EngineHeaders`] says what else an operator keeps from engines.

use http::header::{
    ACCEPT, ACCEPT_ENCODING, CONNECTION, CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE, EXPECT, HOST, HeaderName,
    HeaderValue, TRANSFER_ENCODING, VIA,
};
use http::{HeaderMap, StatusCode};
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

use crate::config::HeaderRules;
use crate::error::CoreError;

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
/// Most urgent priority that this request may have; set by `access`, which knows the caller.
pub(crate) const PRIORITY_LIMIT: HeaderName = HeaderName::from_static("x-warmfront-priority-limit");
pub(crate) const RANK: HeaderName = HeaderName::from_static("x-data-parallel-rank");

/// Headers that say how a body is read; an allow-list need not name them.
const ALWAYS_ALLOWED: [HeaderName; 4] = [ACCEPT, ACCEPT_ENCODING, CONTENT_ENCODING, CONTENT_TYPE];
/// What we add to a request, as RFC 9110 section 7.6.3 asks of a gateway.
const VIA_US: HeaderValue = HeaderValue::from_static("1.1 warmfront");

/// An operator's rules for client headers on their way to engines.
#[derive(Debug, Default)]
pub(crate) struct EngineHeaders {
    removed: Vec<HeaderName>,
    /// `None`: all that are not removed.
    allowed: Option<Vec<HeaderName>>,
}

impl EngineHeaders {
    /// # Errors
    ///
    /// Something is no header name.
    pub(crate) fn new(rules: &HeaderRules) -> Result<Self, CoreError> {
        let parse = |name: &String| {
            HeaderName::try_from(name.as_str())
                .map_err(|_| CoreError::Config(format!("front.headers: {name:?} is no header name")))
        };
        let names = |names: &[String]| names.iter().map(parse).collect::<Result<Vec<_>, _>>();
        let allowed = rules.allow.as_deref().map(names).transpose()?;
        Ok(Self { removed: names(&rules.remove)?, allowed })
    }

    fn drops(&self, name: &HeaderName) -> bool {
        let is_allowed = |allowed: &Vec<HeaderName>| allowed.contains(name) || ALWAYS_ALLOWED.contains(name);
        self.removed.contains(name) || !self.allowed.as_ref().is_none_or(is_allowed)
    }
}

/// Headers of a request as the engine gets them; `Host` and `x-request-id` are left to the caller.
pub(crate) fn for_engine(headers: &HeaderMap, rules: &EngineHeaders) -> HeaderMap {
    let is_ours = |name: &HeaderName| {
        *name == HOST
            || *name == CONTENT_LENGTH
            || *name == EXPECT
            || *name == REQUEST_ID
            || name.as_str().starts_with("x-warmfront-")
    };
    let mut kept = end_to_end(headers, |name| is_ours(name) || rules.drops(name));
    kept.append(VIA, VIA_US);
    kept
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

/// An affinity key as it counts inside one flow: nobody can steer or watch the conversations of another tenant.
pub(crate) fn within_flow(key: u64, flow: &str) -> u64 {
    xxh3_64_with_seed(flow.as_bytes(), key)
}

/// The flow this request queues in.
pub(crate) fn flow(headers: &HeaderMap) -> String {
    let given = headers.get(FLOW).and_then(|value| value.to_str().ok());
    given.filter(|flow| (1..=FLOW_BYTES_MAX).contains(&flow.len())).unwrap_or("default").to_owned()
}

pub(crate) fn priority(headers: &HeaderMap) -> Option<i64> {
    number(headers, &PRIORITY)
}

/// The priority that counts where `asked` is asked for, and whether it is another one.
pub(crate) fn bounded_priority(headers: &HeaderMap, asked: i64) -> (i64, bool) {
    let limit = number(headers, &PRIORITY_LIMIT).unwrap_or(i64::MIN);
    (asked.max(limit), asked < limit)
}

fn number(headers: &HeaderMap, name: &HeaderName) -> Option<i64> {
    headers.get(name)?.to_str().ok()?.trim().parse().ok()
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

    // bugs 61, 66
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
            names(&for_engine(&given, &EngineHeaders::default())),
            [("x-b", "1"), ("x-b", "3"), ("authorization", "Bearer k"), ("x-a", "2"), ("via", "1.1 warmfront")]
        );
    }

    #[test]
    fn what_is_addressed_to_the_router_ends_there() {
        let given =
            headers(&[("x-warmfront-flow", "a"), ("x-warmfront-other", "b"), ("via", "1.0 proxy"), ("x-a", "1")]);
        assert_eq!(
            names(&for_engine(&given, &EngineHeaders::default())),
            [("via", "1.0 proxy"), ("via", "1.1 warmfront"), ("x-a", "1")]
        );
    }

    #[test]
    fn rules_remove_headers_or_let_only_named_ones_pass() {
        let given = headers(&[("content-type", "a/b"), ("cookie", "c"), ("x-a", "1"), ("x-b", "2")]);
        let rules = |remove: &[&str], allow: Option<&[&str]>| {
            let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
            EngineHeaders::new(&HeaderRules { remove: names(remove), allow: allow.map(names) })
        };
        let kept = |rules: EngineHeaders| {
            let kept = for_engine(&given, &rules);
            kept.keys().map(|name| name.as_str().to_owned()).collect::<Vec<_>>()
        };
        assert_eq!(kept(rules(&["Cookie"], None).unwrap()), ["content-type", "x-a", "x-b", "via"]);
        assert_eq!(kept(rules(&["x-b"], Some(&["x-a", "x-b"])).unwrap()), ["content-type", "x-a", "via"]);
        assert!(rules(&["no name"], None).is_err());
    }

    // bug 173
    #[test]
    fn one_session_name_in_two_flows_is_two_sessions() {
        assert_ne!(within_flow(7, "a"), within_flow(7, "b"));
        assert_eq!(within_flow(7, "a"), within_flow(7, "a"));
        assert_ne!(within_flow(7, "a"), within_flow(8, "a"));
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
        assert_eq!(bounded_priority(&HeaderMap::new(), -5), (-5, false));
        let limited = headers(&[("x-warmfront-priority-limit", "2")]);
        assert_eq!([-5, 2, 9].map(|asked| bounded_priority(&limited, asked)), [(2, true), (2, false), (9, false)]);
    }
}
