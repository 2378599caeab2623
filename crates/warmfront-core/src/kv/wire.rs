//! Decodes the payload of a KV event frame.
//!
//! `[ts, [event, ...], data_parallel_rank]` in `MessagePack`. Each event is a positional array with its tag first (vLLM up to
//! 0.23) or a map with the key `type` (0.24 and later); both are accepted, per event. Fields may be missing, unknown keys and
//! further elements are skipped, unknown kinds of events are counted. Hashes come as integers or as digests of any length;
//! a digest is cut to the engine's own integer form, its last eight bytes, so both spellings name the same block.
//! What one would get wrong: stores of sliding-window groups have fewer hashes than blocks of tokens, down to none.
//!
//! Source: vLLM `distributed/kv_events.py`, versions 0.9.2 to 0.33.0.

use thiserror::Error;

use super::msgpack::{Head, Reader};
use crate::block::ExtraKey;

/// Largest payload that is decoded. Engines send at most a few hundred kilobytes per step.
pub const PAYLOAD_BYTES_MAX: usize = 64 << 20;

/// Why a payload is not a batch of events.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum WireError {
    #[error("the payload ends inside a value, or a length exceeds it")]
    Truncated,
    #[error("values are nested too deeply")]
    TooDeep,
    #[error("the payload is larger than {PAYLOAD_BYTES_MAX} bytes")]
    TooLarge,
    #[error("unexpected {0}")]
    Unexpected(&'static str),
}

type Result<T> = std::result::Result<T, WireError>;

/// An engine's name of a block: opaque, and only meaningful for the publisher that sent it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct EngineHash(pub u64);

/// What one engine step changed in its caches.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct EventBatch {
    /// Engine's wall clock, seconds.
    pub ts: f64,
    /// In the order in which they happened.
    pub events: Vec<KvEvent>,
    /// Data-parallel rank, if the publisher says so.
    pub rank: Option<u32>,
    /// Events of a kind that is not known here.
    pub unknown_events: u32,
}

/// One change.
#[derive(Clone, Debug, PartialEq)]
pub enum KvEvent {
    Stored(Box<Stored>),
    Removed(Removed),
    /// Everything on the device is gone. Names no tier and no group.
    Cleared,
}

/// Where blocks lie.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Tier {
    /// The device; also when the event names no medium or one that is not known.
    #[default]
    Gpu,
    Cpu,
    Disk,
    Remote,
}

/// What a cache group holds, from `kv_cache_spec_kind`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpecKind {
    /// Every block of a prefix is kept: full, MLA and sink attention.
    Full,
    /// Only the last blocks before a boundary are kept: sliding window, chunked local attention.
    Window,
    /// Only the state at a boundary is kept.
    Mamba,
    /// Plays no part in prefix hits.
    Other,
    /// The engine does not say, or says a word that is not known here.
    Unknown,
}

/// Extra keys of the blocks of one store.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ExtraKeys {
    /// The event has no such field (vLLM before 0.17, offload tiers).
    #[default]
    Absent,
    /// Given, and no block has any.
    Plain,
    /// One list for each hash.
    Each(Vec<Vec<ExtraKey>>),
}

/// Blocks were stored.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Stored {
    pub block_hashes: Vec<EngineHash>,
    /// The block before the range; `None`: the range starts the sequence (or the event carries no tokens).
    pub parent: Option<EngineHash>,
    pub token_ids: Vec<u32>,
    /// Zero in placeholders of offload tiers.
    pub block_size: u32,
    pub lora_id: Option<i64>,
    pub lora_name: Option<String>,
    pub tier: Tier,
    pub extra_keys: ExtraKeys,
    pub group: Option<u32>,
    pub kind: Option<SpecKind>,
    /// Tokens.
    pub window: Option<u32>,
    pub session_id: Option<String>,
    /// The tokens after each block that its hash covers, one run for each hash, each `lookahead` long.
    pub lookahead_tokens: Vec<u32>,
    pub lookahead: u32,
}

/// Blocks were removed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Removed {
    pub block_hashes: Vec<EngineHash>,
    pub tier: Tier,
    pub group: Option<u32>,
}

/// Decodes one payload.
///
/// # Errors
/// When the bytes are no `MessagePack` or a field that matters has another type than every known version gives it. The
/// state of the replica is then unknown from this batch on: treat it as a gap.
pub fn decode(payload: &[u8]) -> Result<EventBatch> {
    if payload.len() > PAYLOAD_BYTES_MAX {
        return Err(WireError::TooLarge);
    }
    let mut reader = Reader::new(payload);
    let fields = reader.array("batch that is no array")?;
    if fields < 2 {
        return Err(WireError::Unexpected("batch of fewer than two fields"));
    }
    let ts = match reader.head()? {
        Head::Float(ts) => ts,
        Head::Unsigned(ts) => ts as f64,
        _ => return Err(WireError::Unexpected("time that is no number")),
    };
    let count = reader.array("events that are no array")?;
    let mut batch = EventBatch { ts, ..EventBatch::default() };
    batch.events.reserve(count.min(EVENTS_RESERVED));
    for _ in 0..count {
        match event(&mut reader)? {
            Some(event) => batch.events.push(event),
            None => batch.unknown_events += 1,
        }
    }
    if fields > 2 {
        batch.rank = optional_u32(&mut reader)?;
        reader.skip_all(fields - 3)?;
    }
    if reader.is_empty() { Ok(batch) } else { Err(WireError::Unexpected("bytes after the batch")) }
}

/// Events for which room is made ahead; more grow the list as they come.
const EVENTS_RESERVED: usize = 64;

fn event(reader: &mut Reader<'_>) -> Result<Option<KvEvent>> {
    match reader.head()? {
        Head::Array(length) => event_array(reader, length),
        Head::Map(length) => event_map(reader, length),
        _ => Err(WireError::Unexpected("event that is neither array nor map")),
    }
}

/// Names of a store's fields in array order; position 0 of the array is the tag.
const STORED_FIELDS: [&[u8]; 11] = [
    b"block_hashes",
    b"parent_block_hash",
    b"token_ids",
    b"block_size",
    b"lora_id",
    b"medium",
    b"lora_name",
    b"extra_keys",
    b"group_idx",
    b"kv_cache_spec_kind",
    b"kv_cache_spec_sliding_window",
];

const REMOVED_FIELDS: [&[u8]; 3] = [b"block_hashes", b"medium", b"group_idx"];

fn event_array(reader: &mut Reader<'_>, length: usize) -> Result<Option<KvEvent>> {
    if length == 0 {
        return Err(WireError::Unexpected("event without a tag"));
    }
    let Head::Str(tag) = reader.head()? else { return Err(WireError::Unexpected("event tag that is no string")) };
    let given = length - 1;
    match tag {
        b"BlockStored" => {
            let mut stored = Box::<Stored>::default();
            for name in STORED_FIELDS.iter().take(given) {
                stored_field(reader, name, &mut stored)?;
            }
            reader.skip_all(given.saturating_sub(STORED_FIELDS.len()))?;
            Ok(Some(KvEvent::Stored(stored)))
        }
        b"BlockRemoved" => {
            let mut removed = Removed::default();
            for name in REMOVED_FIELDS.iter().take(given) {
                removed_field(reader, name, &mut removed)?;
            }
            reader.skip_all(given.saturating_sub(REMOVED_FIELDS.len()))?;
            Ok(Some(KvEvent::Removed(removed)))
        }
        b"AllBlocksCleared" => reader.skip_all(given).map(|()| Some(KvEvent::Cleared)),
        _ => reader.skip_all(given).map(|()| None),
    }
}

fn event_map(reader: &mut Reader<'_>, length: usize) -> Result<Option<KvEvent>> {
    match tag_of(*reader, length)? {
        b"BlockStored" => {
            let mut stored = Box::<Stored>::default();
            for_each_key(reader, length, |reader, name| stored_field(reader, name, &mut stored))?;
            Ok(Some(KvEvent::Stored(stored)))
        }
        b"BlockRemoved" => {
            let mut removed = Removed::default();
            for_each_key(reader, length, |reader, name| removed_field(reader, name, &mut removed))?;
            Ok(Some(KvEvent::Removed(removed)))
        }
        b"AllBlocksCleared" => reader.skip_all(2 * length).map(|()| Some(KvEvent::Cleared)),
        _ => reader.skip_all(2 * length).map(|()| None),
    }
}

/// The tag is nearly always the first key, but need not be.
fn tag_of(mut reader: Reader<'_>, length: usize) -> Result<&[u8]> {
    for _ in 0..length {
        let is_tag = matches!(reader.head()?, Head::Str(b"type"));
        if !is_tag {
            reader.skip()?;
            continue;
        }
        return match reader.head()? {
            Head::Str(tag) => Ok(tag),
            _ => Err(WireError::Unexpected("event tag that is no string")),
        };
    }
    Err(WireError::Unexpected("event without a tag"))
}

fn for_each_key<'a>(
    reader: &mut Reader<'a>,
    length: usize,
    mut field: impl FnMut(&mut Reader<'a>, &[u8]) -> Result<()>,
) -> Result<()> {
    for _ in 0..length {
        match reader.head()? {
            Head::Str(name) => field(reader, name)?,
            Head::Array(_) | Head::Map(_) => return Err(WireError::Unexpected("key that is an array or a map")),
            _ => reader.skip()?,
        }
    }
    Ok(())
}

fn stored_field(reader: &mut Reader<'_>, name: &[u8], stored: &mut Stored) -> Result<()> {
    match name {
        b"block_hashes" => stored.block_hashes = hashes(reader)?,
        b"parent_block_hash" => stored.parent = optional_hash(reader)?,
        b"token_ids" => {
            let count = reader.array("token ids that are no array")?;
            reader.tokens(count, &mut stored.token_ids)?;
        }
        b"block_size" => stored.block_size = optional_u32(reader)?.unwrap_or(0),
        b"lora_id" => stored.lora_id = optional_i64(reader)?,
        b"medium" => stored.tier = tier(reader)?,
        b"lora_name" => stored.lora_name = optional_string(reader)?,
        b"extra_keys" => stored.extra_keys = extra_keys(reader)?,
        b"group_idx" => stored.group = optional_u32(reader)?,
        b"kv_cache_spec_kind" => stored.kind = spec_kind(reader)?,
        b"kv_cache_spec_sliding_window" => stored.window = optional_u32(reader)?,
        b"session_id" => stored.session_id = optional_string(reader)?,
        b"lookahead_token_ids" => lookahead(reader, stored)?,
        _ => reader.skip()?,
    }
    Ok(())
}

fn removed_field(reader: &mut Reader<'_>, name: &[u8], removed: &mut Removed) -> Result<()> {
    match name {
        b"block_hashes" => removed.block_hashes = hashes(reader)?,
        b"medium" => removed.tier = tier(reader)?,
        b"group_idx" => removed.group = optional_u32(reader)?,
        _ => reader.skip()?,
    }
    Ok(())
}

fn hashes(reader: &mut Reader<'_>) -> Result<Vec<EngineHash>> {
    let count = reader.array("block hashes that are no array")?;
    let mut hashes = Vec::with_capacity(count);
    for _ in 0..count {
        hashes.push(hash(reader.head()?)?.ok_or(WireError::Unexpected("block hash that is nil"))?);
    }
    Ok(hashes)
}

fn optional_hash(reader: &mut Reader<'_>) -> Result<Option<EngineHash>> {
    hash(reader.head()?)
}

fn hash(head: Head<'_>) -> Result<Option<EngineHash>> {
    match head {
        Head::Nil => Ok(None),
        Head::Unsigned(value) => Ok(Some(EngineHash(value))),
        Head::Signed(value) => Ok(Some(EngineHash(value.cast_unsigned()))),
        Head::Bin(digest) => Ok(Some(EngineHash(last_eight(digest)))),
        _ => Err(WireError::Unexpected("block hash that is neither number nor bytes")),
    }
}

/// A digest modulo 2^64, as the engine's own integer form; shorter ones are taken whole.
fn last_eight(digest: &[u8]) -> u64 {
    digest.iter().skip(digest.len().saturating_sub(8)).fold(0, |value, byte| (value << 8) | u64::from(*byte))
}

fn tier(reader: &mut Reader<'_>) -> Result<Tier> {
    let Some(word) = optional_str(reader)? else { return Ok(Tier::Gpu) };
    let is = |name: &str| word.eq_ignore_ascii_case(name.as_bytes());
    Ok(if is("cpu") || is("host") {
        Tier::Cpu
    } else if is("fs") || is("obj") || is("storage") || is("disk") {
        Tier::Disk
    } else if is("remote") {
        Tier::Remote
    } else {
        Tier::Gpu
    })
}

fn spec_kind(reader: &mut Reader<'_>) -> Result<Option<SpecKind>> {
    Ok(optional_str(reader)?.map(|word| match word {
        b"full_attention" | b"mla_attention" | b"sink_full_attention" => SpecKind::Full,
        b"sliding_window" | b"sliding_window_mla" | b"chunked_local_attention" => SpecKind::Window,
        b"mamba" => SpecKind::Mamba,
        b"encoder_only_attention" | b"cross_attention" => SpecKind::Other,
        _ => SpecKind::Unknown,
    }))
}

fn extra_keys(reader: &mut Reader<'_>) -> Result<ExtraKeys> {
    let count = match reader.head()? {
        Head::Nil => return Ok(ExtraKeys::Absent),
        Head::Array(count) => count,
        _ => return Err(WireError::Unexpected("extra keys that are no array")),
    };
    let mut each: Vec<Vec<ExtraKey>> = Vec::new();
    for position in 0..count {
        match reader.head()? {
            Head::Nil if each.is_empty() => {}
            Head::Nil => each.push(Vec::new()),
            Head::Array(length) => {
                if each.is_empty() {
                    each.reserve(count);
                    each.resize_with(position, Vec::new);
                }
                each.push(block_keys(reader, length)?);
            }
            _ => return Err(WireError::Unexpected("extra keys of a block that are no array")),
        }
    }
    Ok(if each.is_empty() { ExtraKeys::Plain } else { ExtraKeys::Each(each) })
}

fn block_keys(reader: &mut Reader<'_>, length: usize) -> Result<Vec<ExtraKey>> {
    let mut keys = Vec::with_capacity(length.min(8));
    for _ in 0..length {
        keys.extend(match reader.head()? {
            Head::Str(word) => Some(ExtraKey::Text(text(word))),
            Head::Bin(digest) => Some(ExtraKey::Bytes(digest.to_vec())),
            Head::Unsigned(number) => Some(ExtraKey::Int(number.cast_signed())),
            Head::Signed(number) => Some(ExtraKey::Int(number)),
            Head::Array(parts) => structured_key(reader, parts)?,
            Head::Nil => None,
            _ => return Err(WireError::Unexpected("extra key of an unknown type")),
        });
    }
    Ok(keys)
}

/// `[identifier, offset]` (0.19 to 0.30) or `[tag, ...]` (0.31 and later).
fn structured_key(reader: &mut Reader<'_>, parts: usize) -> Result<Option<ExtraKey>> {
    if parts == 0 {
        return Ok(None);
    }
    let Head::Str(first) = reader.head()? else { return Err(WireError::Unexpected("extra key without a name")) };
    if parts == 1 {
        return Ok(Some(ExtraKey::Text(text(first))));
    }
    let second = reader.head()?;
    if let Head::Array(_) | Head::Map(_) = second {
        return Err(WireError::Unexpected("extra key that is nested too deeply"));
    }
    let (key, used) = match (first, second) {
        (b"lora", Head::Str(name)) => (ExtraKey::Adapter(text(name)), 2),
        (b"cache_salt", Head::Str(salt)) => (ExtraKey::Text(text(salt)), 2),
        (b"prompt_embeds", Head::Bin(digest)) => (ExtraKey::Bytes(digest.to_vec()), 2),
        (b"mm", Head::Str(identifier)) if parts > 2 => {
            (ExtraKey::Item(text(identifier), optional_i64(reader)?.unwrap_or(0)), 3)
        }
        (identifier, Head::Unsigned(offset)) => (ExtraKey::Item(text(identifier), offset.cast_signed()), 2),
        (identifier, Head::Signed(offset)) => (ExtraKey::Item(text(identifier), offset), 2),
        (other, _) => (ExtraKey::Text(text(other)), 2),
    };
    reader.skip_all(parts - used)?;
    Ok(Some(key))
}

fn lookahead(reader: &mut Reader<'_>, stored: &mut Stored) -> Result<()> {
    let runs = match reader.head()? {
        Head::Nil => return Ok(()),
        Head::Array(runs) => runs,
        _ => return Err(WireError::Unexpected("lookahead tokens that are no array")),
    };
    for run in 0..runs {
        let length = reader.array("lookahead tokens of a block that are no array")?;
        if run > 0 && length != stored.lookahead as usize {
            return Err(WireError::Unexpected("lookahead of another length"));
        }
        stored.lookahead = length as u32;
        reader.tokens(length, &mut stored.lookahead_tokens)?;
    }
    Ok(())
}

fn optional_u32(reader: &mut Reader<'_>) -> Result<Option<u32>> {
    match reader.head()? {
        Head::Nil => Ok(None),
        Head::Unsigned(value) => {
            u32::try_from(value).map(Some).map_err(|_| WireError::Unexpected("number above 32 bits"))
        }
        _ => Err(WireError::Unexpected("value where a number belongs")),
    }
}

fn optional_i64(reader: &mut Reader<'_>) -> Result<Option<i64>> {
    match reader.head()? {
        Head::Nil => Ok(None),
        Head::Unsigned(value) => Ok(Some(value.cast_signed())),
        Head::Signed(value) => Ok(Some(value)),
        _ => Err(WireError::Unexpected("value where a number belongs")),
    }
}

fn optional_str<'a>(reader: &mut Reader<'a>) -> Result<Option<&'a [u8]>> {
    match reader.head()? {
        Head::Nil => Ok(None),
        Head::Str(word) => Ok(Some(word)),
        _ => Err(WireError::Unexpected("value where a string belongs")),
    }
}

fn optional_string(reader: &mut Reader<'_>) -> Result<Option<String>> {
    Ok(optional_str(reader)?.map(text))
}

/// Names come as UTF-8; what is not is replaced, which at worst separates blocks that are equal.
fn text(word: &[u8]) -> String {
    String::from_utf8_lossy(word).into_owned()
}
