//! Which headers pass: all end-to-end ones, in order, repeated ones included; none that belong to one connection.
//!
//! Hop-by-hop are the fixed set of RFC 9110 section 7.6.1 and every name that `Connection` lists. `Host`, the length and
//! the framing are written anew for the next hop, `Expect` is answered here. What is addressed to us (`x-warmfront-…`)
//! ends here, and [`EngineHeaders`] says what else an operator keeps from engines.

use std::hash::{BuildHasher as _, RandomState};

use http::header::{
    ACCEPT, ACCEPT_ENCODING, AUTHORIZATION, CONNECTION, CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE, EXPECT, HOST,
    HeaderName, HeaderValue, TRANSFER_ENCODING, VIA,
};
use http::{HeaderMap, StatusCode};
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

use crate::config::{HeaderRules, SessionConfig};
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
/// How long the client waits, in seconds; ours, and the name that some gateways use.
pub(crate) const TIMEOUT: HeaderName = HeaderName::from_static("x-warmfront-timeout-s");
const REQUEST_TIMEOUT: HeaderName = HeaderName::from_static("x-request-timeout");
/// W3C baggage: `session.id=a;property, other=b`.
const BAGGAGE: HeaderName = HeaderName::from_static("baggage");
/// Where Anthropic's clients put their key, and Azure's theirs.
pub(crate) const API_KEY: HeaderName = HeaderName::from_static("x-api-key");
pub(crate) const AZURE_API_KEY: HeaderName = HeaderName::from_static("api-key");
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

/// Where clients put the name of a conversation, as configured.
#[derive(Debug, Default)]
pub(crate) struct SessionRules {
    names: Vec<SessionName>,
    baggage: String,
}

#[derive(Debug)]
enum SessionName {
    Exact(HeaderName),
    Pattern { start: String, end: String },
}

impl SessionRules {
    /// Names that can be no header's match nothing; Python has checked them.
    pub(crate) fn new(config: &SessionConfig) -> Self {
        let rule = |name: &String| match name.split_once('*') {
            Some((start, end)) => Some(SessionName::Pattern { start: start.to_owned(), end: end.to_owned() }),
            None => HeaderName::try_from(name.as_str()).ok().map(SessionName::Exact),
        };
        Self { names: config.headers.iter().filter_map(rule).collect(), baggage: config.baggage.clone() }
    }

    /// What a header says of the conversation, and whether it was a header of its own or a member of `baggage`.
    pub(crate) fn find<'h>(&self, headers: &'h HeaderMap) -> Option<(&'static str, &'h [u8])> {
        let own = self.names.iter().find_map(|name| name.find(headers));
        own.map(|value| ("header", value)).or_else(|| Some(("baggage", self.in_baggage(headers)?)))
    }

    fn in_baggage<'h>(&self, headers: &'h HeaderMap) -> Option<&'h [u8]> {
        if self.baggage.is_empty() {
            return None;
        }
        let lists = headers.get_all(BAGGAGE).iter().filter_map(|value| value.to_str().ok());
        let members = lists.flat_map(|list| list.split(',')).filter_map(|member| member.split_once('='));
        let value = members.filter(|(name, _)| name.trim() == self.baggage).map(|(_, value)| value);
        value
            .filter_map(|value| value.split(';').next())
            .map(str::trim)
            .find(|value| !value.is_empty())
            .map(str::as_bytes)
    }
}

impl SessionName {
    fn find<'h>(&self, headers: &'h HeaderMap) -> Option<&'h [u8]> {
        let value = match self {
            Self::Exact(name) => headers.get_all(name).iter().find(|value| !value.is_empty()),
            Self::Pattern { start, end } => {
                let matches = |name: &str| {
                    name.len() > start.len() + end.len() && name.starts_with(&**start) && name.ends_with(&**end)
                };
                headers.iter().find(|(name, value)| matches(name.as_str()) && !value.is_empty()).map(|(_, value)| value)
            }
        };
        value.map(HeaderValue::as_bytes)
    }
}

/// Hash of a conversation's name as this caller uses it: the same name in another flow is another conversation, so that
/// callers cannot steer one another. So it is under another credential, as long as that is still here: where keys are
/// checked and not passed on, `access` has removed it, and the keys of one flow share their conversations. The same in
/// every router.
pub(crate) fn session_key(headers: &HeaderMap, session: &[u8]) -> u64 {
    let caller = credentials(headers).map_or(0, |value| xxh3_64(value.as_bytes()));
    let flow = headers.get(FLOW).map_or(0, |value| xxh3_64_with_seed(value.as_bytes(), caller));
    xxh3_64_with_seed(session, caller ^ flow.rotate_left(1))
}

/// The flow this request queues in: the one it names, or one for each credential. A name made of a credential depends on
/// a secret of the process, so that it gives nothing away.
pub(crate) fn flow(headers: &HeaderMap, secret: &RandomState) -> String {
    let given = headers.get(FLOW).and_then(|value| value.to_str().ok());
    if let Some(flow) = given.filter(|flow| (1..=FLOW_BYTES_MAX).contains(&flow.len())) {
        return flow.to_owned();
    }
    match credentials(headers) {
        Some(value) => format!("key-{:016x}", secret.hash_one(value.as_bytes())),
        None => "default".to_owned(),
    }
}

/// What tells callers apart: their API key, as OpenAI, Anthropic and Azure clients send it.
fn credentials(headers: &HeaderMap) -> Option<&HeaderValue> {
    [AUTHORIZATION, API_KEY, AZURE_API_KEY].iter().find_map(|name| headers.get(name)).filter(|value| !value.is_empty())
}

/// Seconds that the client is ready to wait for its answer, from the arrival of the request.
pub(crate) fn timeout_s(headers: &HeaderMap) -> Option<f64> {
    [TIMEOUT, REQUEST_TIMEOUT].iter().find_map(|name| seconds(headers.get(name)?.to_str().ok()?))
}

/// `2`, `2.5`, `2s` or `2500ms`; anything that is no positive time says nothing.
fn seconds(text: &str) -> Option<f64> {
    let text = text.trim();
    let (number, unit) = match text.strip_suffix("ms") {
        Some(number) => (number, 1e-3),
        None => (text.strip_suffix('s').unwrap_or(text), 1.0),
    };
    let seconds = number.trim_end().parse::<f64>().ok()? * unit;
    (seconds.is_finite() && seconds > 0.0).then_some(seconds)
}

/// The priority that counts, and whether the engine must be told so. `in_body`: what the body asks for, and whether an
/// engine may find something else in it.
///
/// Where there is a limit, an engine must also be told what we cannot read for sure: it may read it as beyond the limit.
pub(crate) fn bounded_priority(headers: &HeaderMap, in_body: (Option<i64>, bool)) -> (i64, bool) {
    let in_header = number(headers, &PRIORITY);
    let asked = in_header.or(in_body.0).unwrap_or(0);
    let Some(limit) = number(headers, &PRIORITY_LIMIT) else { return (asked, false) };
    let is_unclear = match headers.get_all(PRIORITY).iter().count() {
        0 => in_body.1,
        1 => in_header.is_none(),
        _ => true,
    };
    (asked.max(limit), asked < limit || is_unclear)
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

    fn rules() -> SessionRules {
        let headers = ["x-session-id", "x-*-session-id"].map(str::to_owned).to_vec();
        SessionRules::new(&SessionConfig { headers, baggage: "session.id".to_owned() })
    }

    fn found(pairs: &[(&'static str, &'static str)]) -> Option<(&'static str, String)> {
        let headers = headers(pairs);
        let (source, value) = rules().find(&headers)?;
        Some((source, String::from_utf8(value.to_vec()).unwrap()))
    }

    #[test]
    fn sessions_are_found_under_their_vendor_spellings_and_in_baggage() {
        let session = |source| Some((source, "s".to_owned()));
        for name in ["x-session-id", "x-claude-code-session-id", "x-litellm-session-id"] {
            assert_eq!(found(&[(name, "s")]), session("header"), "{name}");
        }
        assert_eq!(found(&[("x-a-session-id", "other"), ("x-session-id", "s")]), session("header"));
        assert_eq!(found(&[("x-session-id", ""), ("baggage", "a=1, session.id = s;ttl=3")]), session("baggage"));
        assert_eq!(
            found(&[("session-id", "s"), ("x--session-id-x", "s"), ("baggage", "session.id=,xsession.id=s")]),
            None
        );
    }

    // bug 173
    #[test]
    fn the_same_session_name_is_another_key_for_another_caller_or_flow() {
        let key = |pairs: &[(&'static str, &'static str)]| session_key(&headers(pairs), b"s");
        let keys = [
            key(&[]),
            key(&[("authorization", "Bearer a")]),
            key(&[("authorization", "Bearer b")]),
            key(&[("x-api-key", "c")]),
            key(&[("authorization", "Bearer a"), ("x-warmfront-flow", "t")]),
            key(&[("x-warmfront-flow", "t")]),
        ];
        for (row, first) in keys.iter().enumerate() {
            assert!(keys[row + 1..].iter().all(|other| other != first), "{row}");
        }
        assert_eq!(keys[1], key(&[("authorization", "Bearer a"), ("x-other", "1")]), "the same in every router");
    }

    #[test]
    fn a_flow_is_named_by_its_header_or_made_of_the_credential_without_showing_it() {
        let secret = RandomState::new();
        let flow = |pairs: &[(&'static str, &'static str)]| flow(&headers(pairs), &secret);
        assert_eq!(flow(&[]), "default");
        assert_eq!(flow(&[("x-warmfront-flow", "team-a"), ("authorization", "Bearer k")]), "team-a");
        let (one, two) = (flow(&[("authorization", "Bearer k")]), flow(&[("x-api-key", "other")]));
        assert_ne!(one, two);
        assert_eq!(one, flow(&[("authorization", "Bearer k")]));
        assert!(one.starts_with("key-") && one.len() == 20, "{one}");
        assert_ne!(one, super::flow(&headers(&[("authorization", "Bearer k")]), &RandomState::new()), "no dictionary");
    }

    #[test]
    fn priorities_have_sane_defaults() {
        let body = |priority| (Some(priority), false);
        assert_eq!(bounded_priority(&headers(&[("x-vllm-priority", "-5")]), body(3)), (-5, false));
        assert_eq!(bounded_priority(&headers(&[("x-vllm-priority", "high")]), (None, false)), (0, false));
        assert_eq!(bounded_priority(&HeaderMap::new(), body(-5)), (-5, false));
        let limited = headers(&[("x-warmfront-priority-limit", "2")]);
        let bounded = [-5, 2, 9].map(|asked| bounded_priority(&limited, body(asked)));
        assert_eq!(bounded, [(2, true), (2, false), (9, false)]);
    }

    #[test]
    fn a_priority_that_is_not_read_for_sure_is_overruled_where_there_is_a_limit() {
        let with = |values: &[&'static str]| {
            let mut given = headers(&[("x-warmfront-priority-limit", "0")]);
            for value in values {
                given.append(PRIORITY, HeaderValue::from_static(value));
            }
            given
        };
        assert_eq!(bounded_priority(&with(&[]), (None, true)), (0, true));
        assert_eq!(bounded_priority(&with(&["-1_00"]), (None, false)), (0, true), "an integer for Python");
        assert_eq!(bounded_priority(&with(&["4", "-9"]), (None, false)), (4, true));
        assert_eq!(bounded_priority(&with(&["4"]), (None, true)), (4, false), "the header overrules the body");
        assert_eq!(bounded_priority(&HeaderMap::new(), (None, true)), (0, false), "no limit");
    }

    #[test]
    fn timeouts_are_read_in_seconds_and_nonsense_says_nothing() {
        let timeout = |value| timeout_s(&headers(&[("x-request-timeout", value)]));
        assert_eq!(timeout("2.5"), Some(2.5));
        assert_eq!(timeout(" 30s "), Some(30.0));
        assert_eq!(timeout("250ms"), Some(0.25));
        for nonsense in ["", "0", "-1", "soon", "inf", "nan", "1e999", "s"] {
            assert_eq!(timeout(nonsense), None, "{nonsense}");
        }
        assert_eq!(timeout_s(&headers(&[("x-request-timeout", "9"), ("x-warmfront-timeout-s", "4")])), Some(4.0));
    }
}
