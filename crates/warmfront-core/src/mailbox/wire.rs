//! Events and commands as `MessagePack` arrays `[tag, field, ...]`.
//!
//! Written by hand instead of derived: the arrays are the contract with `python/warmfront/types.py` and with recordings,
//! so their layout must not follow from the order of a Rust struct's fields by accident. Decoding is strict: a command
//! comes from our own router, and a wrong one is a bug that should be seen at once, with the place named.

use bytes::Bytes;
use rmp::Marker;
use rmp::decode::{self, RmpRead as _};
use rmp::encode;

use super::{Basis, Choice, Command, Event, RequestFacts, Route, Slot, Standing, Usage};
use crate::error::CoreError;

/// Batches are bounded by `queues.batch_max` events; a command batch may answer all that wait, so this only stops
/// nonsense lengths.
const COMMANDS_MAX: u32 = 1 << 20;
/// A dispatch names at most all slots of a pool.
const CHOICES_MAX: u32 = 1 << 16;

/// Encodes a batch as one array of events.
#[must_use]
pub fn encode_events(events: &[Event]) -> Vec<u8> {
    let mut out = Out(Vec::with_capacity(32 + events.len() * 96));
    out.array(events.len());
    for event in events {
        encode_event(&mut out, event);
    }
    out.0
}

fn encode_event(out: &mut Out, event: &Event) {
    match event {
        Event::Arrived(facts) => {
            out.tagged("arrived", 1);
            encode_facts(out, facts);
        }
        Event::Moved { id, time_s, slot } => {
            out.tagged("moved", 3);
            out.uint(*id).float(*time_s).uint(u64::from(*slot));
        }
        Event::FirstToken { id, time_s, slot } => {
            out.tagged("first_token", 3);
            out.uint(*id).float(*time_s).uint(u64::from(*slot));
        }
        Event::Finished { id, time_s, slot, status, usage, chunks } => {
            out.tagged("finished", 6);
            out.uint(*id).float(*time_s).uint(u64::from(*slot)).uint(u64::from(*status));
            match usage {
                Some(usage) => encode_usage(out, usage),
                None => out.nil(),
            }
            out.uint(u64::from(*chunks));
        }
        Event::Failed { id, time_s, failure, tried, began } => {
            out.tagged("failed", 8);
            out.uint(*id).float(*time_s).text(&failure.error);
            out.uints(tried).boolean(*began).maybe_uint(failure.status.map(u64::from));
            out.maybe_float(failure.retry_after_s).boolean(failure.accepted);
        }
        Event::Cancelled { id, time_s } => {
            out.tagged("cancelled", 2);
            out.uint(*id).float(*time_s);
        }
        Event::FleetChanged { time_s, fleet } => {
            out.tagged("fleet_changed", 2);
            out.float(*time_s).0.extend_from_slice(fleet); // already MessagePack
        }
        Event::ConfigChanged { time_s, config } => {
            out.tagged("config_changed", 2);
            out.float(*time_s).bytes(config);
        }
        Event::Paced { time_s, pool, slots, gaps, gap_seconds } => {
            out.tagged("paced", 5);
            out.float(*time_s).text(pool);
            out.uints(slots).uints(gaps).array(gap_seconds.len());
            for seconds in gap_seconds {
                out.float(*seconds);
            }
        }
        Event::Tick { time_s } => {
            out.tagged("tick", 1);
            out.float(*time_s);
        }
        Event::Asked { id, time_s, question, request, payload } => {
            out.tagged("asked", 5);
            out.uint(*id).float(*time_s).text(question);
            match request {
                Some(facts) => encode_facts(out, facts),
                None => out.nil(),
            }
            out.bytes(payload);
        }
        Event::Stopping { time_s, grace_s } => {
            out.tagged("stopping", 2);
            out.float(*time_s).float(*grace_s);
        }
    }
}

fn encode_facts(out: &mut Out, facts: &RequestFacts) {
    out.array(18);
    out.uint(facts.id).float(facts.time_s).text(&facts.pool).text(&facts.model);
    out.maybe_text(facts.adapter.as_deref()).text(&facts.flow).int(facts.priority);
    out.text(match facts.route {
        Route::Prefix => "prefix",
        Route::Load => "load",
    });
    out.text(match facts.basis {
        Basis::Tokens => "tokens",
        Basis::Bytes => "bytes",
        Basis::None => "none",
    });
    out.uint(u64::from(facts.prompt_tokens)).uint(u64::from(facts.blocks)).uint(u64::from(facts.turn));
    out.maybe_uint(facts.output_tokens_max.map(u64::from)).maybe_uint(facts.affinity_key);
    out.uint(facts.prefix_key).boolean(facts.stream).maybe_text(facts.fallback.as_deref());
    out.maybe_float(facts.deadline_s);
}

fn encode_usage(out: &mut Out, usage: &Usage) {
    out.array(3);
    for count in [usage.prompt_tokens, usage.cached_tokens, usage.output_tokens] {
        out.maybe_uint(count.map(u64::from));
    }
}

/// A buffer whose writes cannot fail, so that the encoder reads as a list of fields.
struct Out(Vec<u8>);

const INFALLIBLE: &str = "writing to a vector cannot fail";

impl Out {
    fn tagged(&mut self, tag: &str, fields: usize) {
        self.array(fields + 1);
        self.text(tag);
    }

    fn array(&mut self, len: usize) {
        let len = u32::try_from(len).expect("batches are bounded far below 2^32");
        encode::write_array_len(&mut self.0, len).expect(INFALLIBLE);
    }

    fn uint(&mut self, value: u64) -> &mut Self {
        encode::write_uint(&mut self.0, value).expect(INFALLIBLE);
        self
    }

    fn int(&mut self, value: i64) -> &mut Self {
        encode::write_sint(&mut self.0, value).expect(INFALLIBLE);
        self
    }

    fn float(&mut self, value: f64) -> &mut Self {
        encode::write_f64(&mut self.0, value).expect(INFALLIBLE);
        self
    }

    fn text(&mut self, value: &str) -> &mut Self {
        encode::write_str(&mut self.0, value).expect(INFALLIBLE);
        self
    }

    fn bytes(&mut self, value: &[u8]) {
        encode::write_bin(&mut self.0, value).expect(INFALLIBLE);
    }

    fn boolean(&mut self, value: bool) -> &mut Self {
        encode::write_bool(&mut self.0, value).expect(INFALLIBLE);
        self
    }

    fn nil(&mut self) {
        encode::write_nil(&mut self.0).expect(INFALLIBLE);
    }

    fn uints(&mut self, values: &[u32]) -> &mut Self {
        self.array(values.len());
        for value in values {
            self.uint(u64::from(*value));
        }
        self
    }

    fn maybe_text(&mut self, value: Option<&str>) -> &mut Self {
        if let Some(value) = value {
            return self.text(value);
        }
        self.nil();
        self
    }

    fn maybe_float(&mut self, value: Option<f64>) -> &mut Self {
        if let Some(value) = value {
            return self.float(value);
        }
        self.nil();
        self
    }

    fn maybe_uint(&mut self, value: Option<u64>) -> &mut Self {
        if let Some(value) = value {
            return self.uint(value);
        }
        self.nil();
        self
    }
}

/// Decodes a batch `[[tag, ...], ...]`.
pub fn decode_commands(bytes: &[u8]) -> Result<Vec<Command>, CoreError> {
    let mut input = In(bytes);
    let count = input.array("batch", COMMANDS_MAX)?;
    let mut commands = Vec::with_capacity(count.min(1024) as usize);
    for position in 0..count {
        let command = decode_command(&mut input)
            .map_err(|error| CoreError::Command(format!("command {position}: {}", error.0)))?;
        commands.push(command);
    }
    if input.0.is_empty() {
        Ok(commands)
    } else {
        Err(CoreError::Command(format!("{} bytes after the batch", input.0.len())))
    }
}

fn decode_command(input: &mut In<'_>) -> Result<Command, Bad> {
    let fields = input.array("command", 16)?;
    let tag = input.text("tag")?;
    let expect = |wanted: u32| {
        if fields == wanted { Ok(()) } else { Err(Bad(format!("{tag}: expected {wanted} fields, got {fields}"))) }
    };
    match tag {
        "dispatch" => {
            expect(4)?;
            let id = input.uint("dispatch.id")?;
            let choices = decode_choices(input)?;
            Ok(Command::Dispatch { id, choices, reason: input.text("dispatch.reason")?.to_owned() })
        }
        "shed" => {
            expect(4)?;
            let id = input.uint("shed.id")?;
            let code = input.text("shed.code")?.to_owned();
            Ok(Command::Shed { id, code, retry_after_s: input.maybe_float("shed.retry_after_s")? })
        }
        "answered" => {
            expect(4)?;
            let id = input.uint("answered.id")?;
            let status = input.uint("answered.status")?;
            Ok(Command::Answered { id, status, body: Bytes::copy_from_slice(input.bytes("answered.body")?) })
        }
        "deliver" => {
            expect(2)?;
            Ok(Command::Deliver { id: input.uint("deliver.id")? })
        }
        "standing" => {
            expect(3)?;
            let pool = input.text("standing.pool")?.to_owned();
            Ok(Command::Standing { pool, rows: decode_standings(input)? })
        }
        other => Err(Bad(format!("unknown tag {other:?}"))),
    }
}

fn decode_choices(input: &mut In<'_>) -> Result<Vec<Choice>, Bad> {
    let count = input.array("dispatch.choices", CHOICES_MAX)?;
    if count == 0 {
        return Err(Bad("dispatch.choices: empty".to_owned()));
    }
    let mut choices = Vec::with_capacity(count.min(1024) as usize);
    for _ in 0..count {
        if input.array("choice", 3)? != 3 {
            return Err(Bad("choice: expected 3 fields".to_owned()));
        }
        choices.push(Choice {
            slot: input.uint("choice.slot")?,
            cached_tokens: input.uint("choice.cached_tokens")?,
            prefill_slot: input.maybe_uint("choice.prefill_slot")?,
        });
    }
    Ok(choices)
}

fn decode_standings(input: &mut In<'_>) -> Result<Vec<Standing>, Bad> {
    let count = input.array("standing.rows", CHOICES_MAX)?;
    let mut rows = Vec::with_capacity(count.min(1024) as usize);
    for _ in 0..count {
        if input.array("standing row", 3)? != 3 {
            return Err(Bad("standing row: expected 3 fields".to_owned()));
        }
        rows.push(Standing {
            slot: input.uint::<Slot>("standing.slot")?,
            state: input.text("standing.state")?.to_owned(),
            reason: input.text("standing.reason")?.to_owned(),
        });
    }
    Ok(rows)
}

/// What is wrong and where, in words.
struct Bad(String);

impl From<Bad> for CoreError {
    fn from(bad: Bad) -> Self {
        Self::Command(bad.0)
    }
}

/// The rest of the input.
struct In<'a>(&'a [u8]);

impl<'a> In<'a> {
    fn array(&mut self, place: &str, max: u32) -> Result<u32, Bad> {
        let count = decode::read_array_len(&mut self.0).map_err(|error| Bad(format!("{place}: {error}")))?;
        if count <= max { Ok(count) } else { Err(Bad(format!("{place}: {count} elements, at most {max}"))) }
    }

    fn uint<T: TryFrom<u64>>(&mut self, place: &str) -> Result<T, Bad> {
        let value: u64 = decode::read_int(&mut self.0).map_err(|error| Bad(format!("{place}: {error}")))?;
        T::try_from(value).map_err(|_| Bad(format!("{place}: {value} is too large")))
    }

    fn maybe_uint<T: TryFrom<u64>>(&mut self, place: &str) -> Result<Option<T>, Bad> {
        if self.take_nil() { Ok(None) } else { self.uint(place).map(Some) }
    }

    /// A float, or an integer where Python had a whole number.
    fn maybe_float(&mut self, place: &str) -> Result<Option<f64>, Bad> {
        if self.take_nil() {
            return Ok(None);
        }
        let mut rest = self.0;
        let value = match Marker::from_u8(self.0.first().copied().unwrap_or(0xc1)) {
            Marker::F64 => decode::read_f64(&mut rest).map_err(|error| Bad(format!("{place}: {error}")))?,
            Marker::F32 => f64::from(decode::read_f32(&mut rest).map_err(|error| Bad(format!("{place}: {error}")))?),
            _ => decode::read_int::<i64, _>(&mut rest).map_err(|error| Bad(format!("{place}: {error}")))? as f64,
        };
        self.0 = rest;
        Ok(Some(value))
    }

    fn text(&mut self, place: &str) -> Result<&'a str, Bad> {
        let (text, rest) = decode::read_str_from_slice(self.0).map_err(|error| Bad(format!("{place}: {error}")))?;
        self.0 = rest;
        Ok(text)
    }

    fn bytes(&mut self, place: &str) -> Result<&'a [u8], Bad> {
        let len = decode::read_bin_len(&mut self.0).map_err(|error| Bad(format!("{place}: {error}")))? as usize;
        if len > self.0.len() {
            return Err(Bad(format!("{place}: {len} bytes announced, {} left", self.0.len())));
        }
        let (bytes, rest) = self.0.split_at(len);
        self.0 = rest;
        Ok(bytes)
    }

    fn take_nil(&mut self) -> bool {
        let is_nil = self.0.first() == Some(&Marker::Null.to_u8());
        if is_nil {
            self.0.read_u8().expect("one byte is there");
        }
        is_nil
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde::de::DeserializeOwned;

    use super::*;
    use crate::mailbox::Failure;

    fn decoded<T: DeserializeOwned>(event: Event) -> T {
        let (event,): (T,) = rmp_serde::from_slice(&encode_events(&[event])).unwrap();
        event
    }

    fn facts() -> RequestFacts {
        RequestFacts {
            id: 7,
            time_s: 1.5,
            pool: "p".into(),
            model: "m".into(),
            adapter: Some("a".into()),
            flow: "default".into(),
            priority: -3,
            route: Route::Prefix,
            basis: Basis::Tokens,
            prompt_tokens: 100,
            blocks: 6,
            turn: 2,
            output_tokens_max: None,
            affinity_key: Some(u64::MAX),
            prefix_key: 9,
            stream: true,
            fallback: None,
            deadline_s: Some(4.5),
        }
    }

    #[test]
    fn an_arrival_nests_its_request_and_reads_back_equal() {
        assert_eq!(decoded::<(String, RequestFacts)>(Event::Arrived(facts())), ("arrived".into(), facts()));
    }

    #[test]
    fn ends_read_back_equal() {
        let usage = Usage { prompt_tokens: Some(5), cached_tokens: None, output_tokens: Some(0) };
        let finished = Event::Finished { id: 1, time_s: 2.0, slot: 3, status: 200, usage: Some(usage), chunks: 4 };
        assert_eq!(
            decoded::<(String, u64, f64, u32, u16, Option<Usage>, u32)>(finished),
            ("finished".into(), 1, 2.0, 3, 200, Some(usage), 4)
        );
        let failure = Failure { error: "e".into(), status: Some(503), retry_after_s: Some(1.5), accepted: true };
        let failed = Event::Failed { id: 1, time_s: 2.0, failure, tried: vec![1, 2], began: true };
        assert_eq!(
            decoded::<(String, u64, f64, String, Vec<u32>, bool, Option<u16>, Option<f64>, bool)>(failed),
            ("failed".into(), 1, 2.0, "e".into(), vec![1, 2], true, Some(503), Some(1.5), true)
        );
        assert_eq!(
            decoded::<(String, u64, f64)>(Event::Cancelled { id: 1, time_s: 2.0 }),
            ("cancelled".into(), 1, 2.0)
        );
    }

    #[test]
    fn the_rest_of_the_events_reads_back_equal() {
        let slots = ("moved".to_owned(), 1, 2.0, 3);
        assert_eq!(decoded::<(String, u64, f64, u32)>(Event::Moved { id: 1, time_s: 2.0, slot: 3 }), slots);
        let paced = Event::Paced {
            time_s: 1.0,
            pool: "p".into(),
            slots: vec![0, 5],
            gaps: vec![3, 70_000],
            gap_seconds: vec![0.5, 1.5],
        };
        assert_eq!(
            decoded::<(String, f64, String, Vec<u32>, Vec<u32>, Vec<f64>)>(paced),
            ("paced".into(), 1.0, "p".into(), vec![0, 5], vec![3, 70_000], vec![0.5, 1.5])
        );
        let asked = Event::Asked {
            id: 1,
            time_s: 2.0,
            question: "explain".into(),
            request: Some(facts()),
            payload: Bytes::from_static(b"{}"),
        };
        let (tag, id, _, question, request, payload): (String, u64, f64, String, Option<RequestFacts>, Bytesish) =
            decoded(asked);
        assert_eq!((tag.as_str(), id, question.as_str(), request), ("asked", 1, "explain", Some(facts())));
        assert_eq!(payload.0, b"{}");
        let fleet = Bytes::from(rmp_serde::to_vec_named(&crate::fleet::FleetState::default()).unwrap());
        let (tag, _, state): (String, f64, crate::fleet::FleetState) =
            decoded(Event::FleetChanged { time_s: 0.0, fleet });
        assert_eq!((tag.as_str(), state), ("fleet_changed", crate::fleet::FleetState::default()));
        assert_eq!(decoded::<(String, f64)>(Event::Tick { time_s: 4.0 }), ("tick".into(), 4.0));
        assert_eq!(
            decoded::<(String, f64, f64)>(Event::Stopping { time_s: 4.0, grace_s: 30.0 }),
            ("stopping".into(), 4.0, 30.0)
        );
    }

    struct Bytesish(Vec<u8>);

    impl<'de> serde::Deserialize<'de> for Bytesish {
        fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
            struct Visitor;
            impl serde::de::Visitor<'_> for Visitor {
                type Value = Bytesish;
                fn expecting(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                    formatter.write_str("bytes")
                }
                fn visit_bytes<E>(self, bytes: &[u8]) -> Result<Bytesish, E> {
                    Ok(Bytesish(bytes.to_vec()))
                }
            }
            deserializer.deserialize_bytes(Visitor)
        }
    }

    #[test]
    fn commands_are_read_as_python_writes_them() {
        let mut bytes = vec![0x95];
        // ["dispatch", 300, [[2, 64, nil], [0, 0, 1]], "why"]
        bytes.extend(b"\x94\xa8dispatch\xcd\x01\x2c\x92\x93\x02\x40\xc0\x93\x00\x00\x01\xa3why");
        // ["shed", 1, "fleet_saturated", 2]: a whole number where a float is meant
        bytes.extend(b"\x94\xa4shed\x01\xaffleet_saturated\x02");
        // ["answered", 9, 200, b"{}"]
        bytes.extend(b"\x94\xa8answered\x09\xcc\xc8\xc4\x02{}");
        // ["deliver", 5], ["standing", "m", [[1, "open", "why"]]]
        bytes.extend(b"\x92\xa7deliver\x05\x93\xa8standing\xa1m\x91\x93\x01\xa4open\xa3why");
        let standing = Standing { slot: 1, state: "open".into(), reason: "why".into() };
        let choices = vec![
            Choice { slot: 2, cached_tokens: 64, prefill_slot: None },
            Choice { slot: 0, cached_tokens: 0, prefill_slot: Some(1) },
        ];
        assert_eq!(
            decode_commands(&bytes).unwrap(),
            [
                Command::Dispatch { id: 300, choices, reason: "why".into() },
                Command::Shed { id: 1, code: "fleet_saturated".into(), retry_after_s: Some(2.0) },
                Command::Answered { id: 9, status: 200, body: Bytes::from_static(b"{}") },
                Command::Deliver { id: 5 },
                Command::Standing { pool: "m".into(), rows: vec![standing] },
            ]
        );
    }

    #[test]
    fn a_wrong_command_is_named_with_its_place() {
        for (bytes, words) in [
            (&b"\x91\x94\xa8dispatch\x01\x90\xa0"[..], "command 0: dispatch.choices: empty"),
            (b"\x92\x94\xa4shed\x01\xa1x\xc0\x92\xa4nope\x01", "command 1: unknown tag \"nope\""),
            (b"\x91\x93\xa4shed\x01\xa1x", "shed: expected 4 fields, got 3"),
            (b"\x91\x94\xa4shed\xff\xa1x\xc0", "shed.id"),
            (b"\x91\x94\xa8answered\x01\x01\xc4\x09a", "9 bytes announced"),
            (b"\x90\x00", "1 bytes after the batch"),
            (b"", "batch"),
        ] {
            let error = decode_commands(bytes).unwrap_err().to_string();
            assert!(error.contains(words), "{error} should contain {words}");
        }
    }

    proptest! {
        #[test]
        fn no_input_makes_the_decoder_panic(bytes in proptest::collection::vec(any::<u8>(), 0..64)) {
            let _ = decode_commands(&bytes);
        }
    }
}
