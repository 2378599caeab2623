//! Reads along while an answer passes: counts the events of a stream, notices the first token, finds the usage.
//!
//! Nothing is changed or delayed; the bytes have already gone on when they are looked at. Chunks may cut events anywhere,
//! also inside a character. The cost of a usual chunk (one whole event) is one search for line ends and one for the word
//! `"usage"`; JSON is parsed only where a usage object begins. What one would get wrong: in valid JSON the bytes
//! `"usage"` cannot occur inside a string (its quotes would be escaped), so looking for them is safe.

use memchr::{memchr_iter, memmem};
use serde::Deserialize;
use serde_json::value::RawValue;

use crate::mailbox::Usage;

/// Longest unfinished event kept, and longest tail of a JSON body. Usage stands near the end of either.
pub(crate) const TAIL_BYTES_MAX: usize = 64 * 1024;
/// A data event this far into the stream counts as the first token, whatever it carries.
const FIRST_TOKEN_EVENT_MAX: u32 = 4;

/// Keys whose non-empty string (or list) value means that tokens have arrived, in any of the streamed protocols. Cheaper
/// than parsing and independent of nesting: a chat stream's first chunk has only `"role"` and an empty `"content"`.
const TOKEN_KEYS: [&[u8]; 9] = [
    b"\"content\"",           // chat
    b"\"reasoning_content\"", // chat, reasoning models
    b"\"reasoning\"",         // the same, newer
    b"\"text\"",              // completions; messages
    b"\"delta\"",             // responses: a string there
    b"\"tool_calls\"",        // chat
    b"\"thinking\"",          // messages
    b"\"partial_json\"",      // messages, tool use
    b"\"token_ids\"",         // with return_token_ids
];

/// What kind of answer passes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Events,
    Json,
    /// Compressed or of another type, or nobody wants its usage.
    Opaque,
}

/// What a chunk brought.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Seen {
    /// Data events that ended in it; comments and the end marker do not count.
    pub events: u32,
    /// The first token is in it; true once.
    pub first_token: bool,
}

/// Follows one answer.
#[derive(Debug)]
pub(crate) struct Observer {
    kind: Kind,
    /// The unfinished event, or the tail of a JSON body.
    tail: Vec<u8>,
    events: u32,
    has_first_token: bool,
    /// The stream has said that it is complete.
    is_done: bool,
    usage: Option<Usage>,
    /// The last byte was a line end, seen across chunks.
    line_is_empty: bool,
}

impl Observer {
    pub(crate) fn new(kind: Kind) -> Self {
        Self {
            kind,
            tail: Vec::new(),
            events: 0,
            has_first_token: false,
            is_done: false,
            usage: None,
            line_is_empty: true,
        }
    }

    pub(crate) fn kind(&self) -> Kind {
        self.kind
    }

    /// Data events so far.
    pub(crate) fn events(&self) -> u32 {
        self.events
    }

    /// The stream said that it is complete: a client that leaves now has everything.
    pub(crate) fn is_done(&self) -> bool {
        self.is_done
    }

    /// The stream stands inside an event.
    pub(crate) fn is_inside_event(&self) -> bool {
        self.kind == Kind::Events && !(self.tail.is_empty() && self.line_is_empty)
    }

    pub(crate) fn chunk(&mut self, bytes: &[u8]) -> Seen {
        match self.kind {
            Kind::Events => self.stream_chunk(bytes),
            Kind::Json | Kind::Opaque => {
                if self.kind == Kind::Json {
                    self.keep_tail(bytes);
                }
                let first_token = !self.has_first_token && !bytes.is_empty();
                self.has_first_token |= first_token;
                Seen { events: 0, first_token }
            }
        }
    }

    /// The usage that the answer reported. Call at the end.
    pub(crate) fn usage(&mut self) -> Option<Usage> {
        if self.kind == Kind::Json {
            note_usage(&self.tail, &mut self.usage);
        }
        self.usage
    }

    fn stream_chunk(&mut self, bytes: &[u8]) -> Seen {
        let mut seen = Seen::default();
        let mut start = 0;
        let mut line_start = 0;
        for end in memchr_iter(b'\n', bytes) {
            let line = &bytes[line_start..end];
            let is_empty = matches!(line, [] | [b'\r']) && self.line_is_empty;
            line_start = end + 1;
            self.line_is_empty = true;
            if is_empty {
                let event_end = end + 1;
                if self.tail.is_empty() {
                    self.event(&bytes[start..event_end], &mut seen);
                } else {
                    self.keep_tail(&bytes[start..event_end]);
                    let event = std::mem::take(&mut self.tail);
                    self.event(&event, &mut seen);
                    self.tail = event;
                    self.tail.clear();
                }
                start = event_end;
            }
        }
        if !matches!(&bytes[line_start..], [] | [b'\r']) {
            self.line_is_empty = false; // a lone carriage return may be a line end cut in two
        }
        self.keep_tail(&bytes[start..]);
        seen
    }

    fn event(&mut self, event: &[u8], seen: &mut Seen) {
        let event = event.trim_ascii_start();
        if event.is_empty() || (event[0] == b':' && memmem::find(event, b"\ndata:").is_none()) {
            return; // a comment, such as a keep-alive
        }
        if ends_stream(event) {
            self.is_done = true;
        }
        if !event.starts_with(b"data: [DONE]") && !event.starts_with(b"data:[DONE]") {
            self.events += 1;
            seen.events += 1;
            if !self.has_first_token && (self.events >= FIRST_TOKEN_EVENT_MAX || carries_tokens(event)) {
                self.has_first_token = true;
                seen.first_token = true;
            }
            note_usage(event, &mut self.usage);
        }
    }

    /// Appends, and keeps the last [`TAIL_BYTES_MAX`] bytes (at most twice as many for a moment).
    fn keep_tail(&mut self, bytes: &[u8]) {
        if bytes.is_empty() {
            return;
        }
        if bytes.len() >= TAIL_BYTES_MAX {
            self.tail.clear();
            self.tail.extend_from_slice(&bytes[bytes.len() - TAIL_BYTES_MAX..]);
            return;
        }
        self.tail.extend_from_slice(bytes);
        if self.tail.len() >= 2 * TAIL_BYTES_MAX {
            self.tail.drain(..self.tail.len() - TAIL_BYTES_MAX);
        }
    }
}

/// The end markers of the four streamed protocols.
fn ends_stream(event: &[u8]) -> bool {
    let Some(first_line) = event.split(|byte| matches!(byte, b'\r' | b'\n')).next() else { return false };
    let Some(colon) = memchr::memchr(b':', first_line) else { return false };
    let value = first_line[colon + 1..].trim_ascii();
    match &first_line[..colon] {
        b"data" => value == b"[DONE]",
        b"event" => {
            matches!(value, b"message_stop" | b"response.completed" | b"response.incomplete" | b"response.failed")
        }
        _ => false,
    }
}

fn carries_tokens(event: &[u8]) -> bool {
    TOKEN_KEYS.iter().any(|key| memmem::find_iter(event, key).any(|at| has_content(&event[at + key.len()..])))
}

/// Whether what follows a key is a non-empty string or list.
fn has_content(rest: &[u8]) -> bool {
    let Some(rest) = rest.trim_ascii_start().strip_prefix(b":") else { return false };
    match rest.trim_ascii_start() {
        [b'"', next, ..] => *next != b'"',
        [b'[', list @ ..] => list.trim_ascii_start().first().is_some_and(|next| *next != b']'),
        _ => false,
    }
}

/// Reads every usage object in `text`; later ones overrule field by field.
fn note_usage(text: &[u8], usage: &mut Option<Usage>) {
    const KEY: &[u8] = b"\"usage\"";
    for at in memmem::find_iter(text, KEY) {
        let Some(rest) = text[at + KEY.len()..].trim_ascii_start().strip_prefix(b":") else { continue };
        let rest = rest.trim_ascii_start();
        if rest.first() != Some(&b'{') {
            continue; // null, as in most chunks
        }
        if let Some(Ok(counts)) = serde_json::Deserializer::from_slice(rest).into_iter::<Counts<'_>>().next() {
            merge_usage(counts.usage(), usage);
        }
    }
}

/// A usage object, its values unread. Chat and completions (vLLM, `SGLang`), Responses, and Anthropic Messages each spell
/// the counts differently.
#[derive(Deserialize)]
struct Counts<'a> {
    #[serde(borrow)]
    prompt_tokens: Option<&'a RawValue>,
    input_tokens: Option<&'a RawValue>,
    completion_tokens: Option<&'a RawValue>,
    output_tokens: Option<&'a RawValue>,
    prompt_tokens_details: Option<&'a RawValue>,
    input_tokens_details: Option<&'a RawValue>,
    cache_read_input_tokens: Option<&'a RawValue>,
    cached_tokens: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct Details<'a> {
    #[serde(borrow)]
    cached_tokens: Option<&'a RawValue>,
}

impl Counts<'_> {
    fn usage(&self) -> Usage {
        let in_details = |details: Option<&RawValue>| {
            serde_json::from_str::<Details<'_>>(details?.get()).ok().and_then(|details| count(details.cached_tokens))
        };
        Usage {
            prompt_tokens: count(self.prompt_tokens).or_else(|| count(self.input_tokens)),
            cached_tokens: in_details(self.prompt_tokens_details)
                .or_else(|| in_details(self.input_tokens_details))
                .or_else(|| count(self.cache_read_input_tokens))
                .or_else(|| count(self.cached_tokens)),
            output_tokens: count(self.completion_tokens).or_else(|| count(self.output_tokens)),
        }
    }
}

/// A value that is a whole number; anything else counts as absent.
fn count(value: Option<&RawValue>) -> Option<u32> {
    let number: u64 = value?.get().parse().ok()?;
    Some(u32::try_from(number).unwrap_or(u32::MAX))
}

fn merge_usage(found: Usage, usage: &mut Option<Usage>) {
    if found == Usage::default() {
        return;
    }
    let known = usage.get_or_insert_default();
    known.prompt_tokens = found.prompt_tokens.or(known.prompt_tokens);
    known.cached_tokens = found.cached_tokens.or(known.cached_tokens);
    known.output_tokens = found.output_tokens.or(known.output_tokens);
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const CHAT: &str = concat!(
        ": keep-alive\n\n",
        "data: {\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}],\"usage\":null}\n\n",
        "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"h\u{e9} \\\"usage\\\":{\"}}]}\n\n",
        "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"x\"}}]}\r\n\r\n",
        "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":9,\"completion_tokens\":2,",
        "\"prompt_tokens_details\":{\"cached_tokens\":8}}}\n\n",
        "data: [DONE]\n\n",
    );

    fn follow(chunks: &[&[u8]]) -> (Observer, Vec<Seen>) {
        let mut observer = Observer::new(Kind::Events);
        let seen = chunks.iter().map(|chunk| observer.chunk(chunk)).collect();
        (observer, seen)
    }

    fn usage(prompt: u32, cached: Option<u32>, output: u32) -> Usage {
        Usage { prompt_tokens: Some(prompt), cached_tokens: cached, output_tokens: Some(output) }
    }

    #[test]
    fn a_chat_stream_is_counted_and_its_usage_found() {
        let (mut observer, _) = follow(&[CHAT.as_bytes()]);
        assert_eq!((observer.events(), observer.is_done(), observer.is_inside_event()), (4, true, false));
        assert_eq!(observer.usage(), Some(usage(9, Some(8), 2)));
    }

    #[test]
    fn the_role_chunk_is_not_the_first_token() {
        let chunks: Vec<&[u8]> = CHAT.split_inclusive("\n\n").map(str::as_bytes).collect();
        let (_, seen) = follow(&chunks);
        let first: Vec<bool> = seen.iter().map(|seen| seen.first_token).collect();
        assert_eq!(&first[..3], [false, false, true]);
        assert_eq!(first.iter().filter(|first| **first).count(), 1);
    }

    #[test]
    fn tokens_are_recognised_in_every_protocol() {
        for (event, expected) in [
            (r#"data: {"choices":[{"text":" a"}]}"#, true),
            (r#"data: {"choices":[{"text": ""}]}"#, false),
            (r#"data: {"choices":[{"delta":{"tool_calls":[{"index":0}]}}]}"#, true),
            (r#"data: {"choices":[{"delta":{"tool_calls":[]}}]}"#, false),
            (r#"data: {"choices":[{"delta":{"reasoning_content":"hm"}}]}"#, true),
            (r#"data: {"type":"response.output_text.delta","delta":"a"}"#, true),
            (r#"data: {"type":"response.created","response":{"output":[]}}"#, false),
            (r#"data: {"type":"content_block_delta","delta":{"type":"text_delta","text":"a"}}"#, true),
            (r#"data: {"type":"content_block_start","content_block":{"type":"text","text":""}}"#, false),
        ] {
            assert_eq!(carries_tokens(event.as_bytes()), expected, "{event}");
        }
    }

    #[test]
    fn usage_of_messages_is_merged_over_its_events() {
        let (mut observer, _) = follow(&[
            b"event: message_start\ndata: {\"message\":{\"usage\":{\"input_tokens\":7,\"cache_read_input_tokens\":4,\"output_tokens\":0}}}\n\n",
            b"event: message_delta\ndata: {\"usage\":{\"output_tokens\":5}}\n\n",
            b"event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n",
        ]);
        assert_eq!(observer.usage(), Some(usage(7, Some(4), 5)));
        assert!(observer.is_done());
    }

    #[test]
    fn usage_of_a_long_responses_event_is_found_in_its_tail() {
        let text = "a".repeat(5 * TAIL_BYTES_MAX);
        let event = format!(
            "event: response.completed\ndata: {{\"response\":{{\"output\":\"{text}\",\"usage\":{{\"input_tokens\":3,\"output_tokens\":1,\"input_tokens_details\":{{\"cached_tokens\":2}}}}}}}}\n\n"
        );
        let chunks: Vec<&[u8]> = event.as_bytes().chunks(10_000).collect();
        let (mut observer, _) = follow(&chunks);
        assert_eq!(observer.usage(), Some(usage(3, Some(2), 1)));
        assert!(observer.tail.capacity() <= 4 * TAIL_BYTES_MAX);
    }

    #[test]
    fn usage_of_a_json_body_is_found_whatever_stands_before() {
        let mut observer = Observer::new(Kind::Json);
        let body = format!(
            "{{\"choices\":[{{\"text\":\"{}\"}}],\"usage\": {{\"prompt_tokens\":5,\"completion_tokens\":1}},\"x\":null}}",
            "b".repeat(200_000)
        );
        let seen: Vec<Seen> = body.as_bytes().chunks(9_000).map(|chunk| observer.chunk(chunk)).collect();
        assert!(seen[0].first_token && !seen[1].first_token);
        assert_eq!(observer.usage(), Some(usage(5, None, 1)));
    }

    #[test]
    fn a_count_that_is_no_whole_number_counts_as_absent() {
        let mut usage = None;
        note_usage(br#""usage":{"prompt_tokens":"7","input_tokens":3,"completion_tokens":2.5,"x":[{}]}"#, &mut usage);
        note_usage(br#""usage":{"prompt_tokens_details":null,"cached_tokens":9999999999}"#, &mut usage);
        let expected = Usage { prompt_tokens: Some(3), cached_tokens: Some(u32::MAX), output_tokens: None };
        assert_eq!(usage, Some(expected));
    }

    #[test]
    fn an_unfinished_event_is_noticed() {
        let (observer, _) = follow(&[b"data: {\"a\":1}\n\n", b"data: {\"b\""]);
        assert!(observer.is_inside_event());
        assert_eq!(observer.events(), 1);
    }

    proptest! {
        #[test]
        fn any_cutting_of_a_stream_gives_the_same_result(cuts in proptest::collection::vec(0..CHAT.len(), 0..20)) {
            let mut cuts = cuts;
            cuts.extend([0, CHAT.len()]);
            cuts.sort_unstable();
            let chunks: Vec<&[u8]> = cuts.windows(2).map(|pair| &CHAT.as_bytes()[pair[0]..pair[1]]).collect();
            let (mut observer, seen) = follow(&chunks);
            prop_assert_eq!(observer.events(), 4);
            prop_assert_eq!(seen.iter().map(|seen| seen.events).sum::<u32>(), 4);
            prop_assert_eq!(seen.iter().filter(|seen| seen.first_token).count(), 1);
            prop_assert!(observer.is_done() && !observer.is_inside_event());
            prop_assert_eq!(observer.usage(), Some(usage(9, Some(8), 2)));
        }

        #[test]
        fn no_bytes_make_the_observer_panic(chunks in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..40), 0..8)) {
            for kind in [Kind::Events, Kind::Json, Kind::Opaque] {
                let mut observer = Observer::new(kind);
                for chunk in &chunks {
                    observer.chunk(chunk);
                }
                observer.usage();
            }
        }
    }
}
