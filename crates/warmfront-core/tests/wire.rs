//! The decoder against bytes that nobody should send.

use proptest::prelude::*;
use warmfront_core::block::ExtraKey;
use warmfront_core::kv::wire::{EngineHash, ExtraKeys, KvEvent, Stored, Tier, WireError, decode};

/// Any `MessagePack` value, for building batches of every shape.
#[derive(Clone, Debug)]
enum Value {
    Nil,
    Int(i64),
    Float(f64),
    Text(String),
    Bytes(Vec<u8>),
    Array(Vec<Value>),
    Map(Vec<(Value, Value)>),
}

fn write(value: &Value, out: &mut Vec<u8>) {
    match value {
        Value::Nil => rmp::encode::write_nil(out).unwrap(),
        Value::Int(number) => {
            rmp::encode::write_sint(out, *number).unwrap();
        }
        Value::Float(number) => rmp::encode::write_f64(out, *number).unwrap(),
        Value::Text(text) => rmp::encode::write_str(out, text).unwrap(),
        Value::Bytes(bytes) => rmp::encode::write_bin(out, bytes).unwrap(),
        Value::Array(values) => {
            rmp::encode::write_array_len(out, values.len() as u32).unwrap();
            for value in values {
                write(value, out);
            }
        }
        Value::Map(pairs) => {
            rmp::encode::write_map_len(out, pairs.len() as u32).unwrap();
            for (key, value) in pairs {
                write(key, out);
                write(value, out);
            }
        }
    }
}

fn bytes(value: &Value) -> Vec<u8> {
    let mut out = Vec::new();
    write(value, &mut out);
    out
}

fn text(word: &str) -> Value {
    Value::Text(word.into())
}

fn ints(numbers: impl IntoIterator<Item = i64>) -> Value {
    Value::Array(numbers.into_iter().map(Value::Int).collect())
}

fn payload(events: Vec<Value>) -> Vec<u8> {
    bytes(&Value::Array(vec![Value::Float(1.5), Value::Array(events), Value::Int(0)]))
}

fn map(pairs: Vec<(&str, Value)>) -> Value {
    Value::Map(pairs.into_iter().map(|(key, value)| (text(key), value)).collect())
}

fn one_store(fields: Vec<(&str, Value)>) -> Result<Stored, WireError> {
    let mut pairs = vec![("type", text("BlockStored"))];
    pairs.extend(fields);
    let batch = decode(&payload(vec![map(pairs)]))?;
    match &batch.events[..] {
        [KvEvent::Stored(stored)] => Ok((**stored).clone()),
        other => panic!("one store, not {other:?}"),
    }
}

fn any_value() -> impl Strategy<Value = Value> {
    const WORDS: [&str; 9] =
        ["type", "BlockStored", "BlockRemoved", "block_hashes", "token_ids", "extra_keys", "medium", "GPU", "lora"];
    let leaf = prop_oneof![
        Just(Value::Nil),
        any::<i64>().prop_map(Value::Int),
        any::<f64>().prop_map(Value::Float),
        proptest::sample::select(&WORDS[..]).prop_map(text),
        proptest::collection::vec(any::<u8>(), 0..40).prop_map(Value::Bytes),
    ];
    leaf.prop_recursive(5, 60, 8, |inner| {
        prop_oneof![
            proptest::collection::vec(inner.clone(), 0..8).prop_map(Value::Array),
            proptest::collection::vec((inner.clone(), inner), 0..6).prop_map(Value::Map),
        ]
    })
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(2000) })]

    #[test]
    fn arbitrary_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
        let _ = decode(&bytes);
    }

    #[test]
    fn bytes_that_begin_like_a_batch_never_panic(tail in proptest::collection::vec(any::<u8>(), 0..400)) {
        let mut bytes = vec![0x93, 0xcb, 0, 0, 0, 0, 0, 0, 0, 0, 0x91];
        bytes.extend(tail);
        let _ = decode(&bytes);
    }

    #[test]
    fn values_of_the_wrong_shape_never_panic(events in proptest::collection::vec(any_value(), 0..5)) {
        let _ = decode(&payload(events));
    }

    #[test]
    fn a_truncated_frame_is_an_error(cut in 0_usize..600, tokens in proptest::collection::vec(0_i64..200_000, 64)) {
        let event = map(vec![
            ("type", text("BlockStored")),
            ("block_hashes", ints(0..4)),
            ("parent_block_hash", Value::Nil),
            ("token_ids", ints(tokens)),
            ("block_size", Value::Int(16)),
            ("extra_keys", Value::Array(vec![Value::Nil, Value::Array(vec![text("salt")]), Value::Nil, Value::Nil])),
        ]);
        let whole = payload(vec![event]);
        prop_assert!(decode(&whole).is_ok());
        prop_assert!(decode(&whole[..cut.min(whole.len() - 1)]).is_err());
    }

    #[test]
    fn token_ids_survive_in_every_form(tokens in proptest::collection::vec(any::<u32>().prop_flat_map(|token| {
        (0_u32..32).prop_map(move |shift| token >> shift)
    }), 0..200)) {
        let stored = one_store(vec![("token_ids", ints(tokens.iter().map(|token| i64::from(*token))))]).unwrap();
        prop_assert_eq!(stored.token_ids, tokens);
    }
}

#[test]
fn lengths_that_lie_are_errors_and_allocate_nothing() {
    // An array of 2^32 - 1 events, of token ids, of hashes.
    let mut head = vec![0x92, 0xcb, 0, 0, 0, 0, 0, 0, 0, 0];
    head.extend([0xdd, 0xff, 0xff, 0xff, 0xff]);
    assert_eq!(decode(&head), Err(WireError::Truncated));
}

#[test]
fn values_nested_without_end_are_errors() {
    let mut bytes = vec![0x93, 0xcb, 0, 0, 0, 0, 0, 0, 0, 0, 0x91, 0x92, 0xa1, b'?'];
    bytes.extend([0x91; 1000]);
    bytes.push(0xc0);
    assert_eq!(decode(&bytes), Err(WireError::TooDeep));
}

#[test]
fn unknown_events_are_counted_and_skipped() {
    let batch = decode(&payload(vec![
        Value::Array(vec![text("BlockMoved"), ints([1]), map(vec![("a", ints([2]))])]),
        map(vec![("type", text("BlockPinned")), ("block_hashes", ints([1]))]),
        Value::Array(vec![text("AllBlocksCleared"), text("later")]),
    ]))
    .unwrap();
    assert_eq!((batch.events, batch.unknown_events, batch.rank), (vec![KvEvent::Cleared], 2, Some(0)));
}

#[test]
fn the_tag_may_come_last_and_keys_may_be_unknown() {
    let event = map(vec![
        ("extra", ints([1])),
        ("block_hashes", ints([7])),
        ("medium", text("cpu")),
        ("type", text("BlockRemoved")),
    ]);
    let batch = decode(&payload(vec![event])).unwrap();
    let [KvEvent::Removed(removed)] = &batch.events[..] else { panic!("one removal") };
    assert_eq!((&removed.block_hashes[..], removed.tier, removed.group), (&[EngineHash(7)][..], Tier::Cpu, None));
}

#[test]
fn hashes_are_numbers_of_either_sign_or_digests() {
    let digest: Vec<u8> = (0..32).collect();
    let hashes = Value::Array(vec![Value::Int(-1), Value::Bytes(digest), Value::Bytes(vec![1, 2])]);
    let stored = one_store(vec![("block_hashes", hashes)]).unwrap();
    let expected = [u64::MAX, 0x1819_1a1b_1c1d_1e1f, 0x0102].map(EngineHash);
    assert_eq!(stored.block_hashes, expected);
}

#[test]
fn media_are_named_in_any_case() {
    for (word, tier) in [
        ("GPU", Tier::Gpu),
        ("CPU", Tier::Cpu),
        ("cpu", Tier::Cpu),
        ("FS", Tier::Disk),
        ("OBJ", Tier::Disk),
        ("STORAGE", Tier::Disk),
        ("Remote", Tier::Remote),
        ("something", Tier::Gpu),
    ] {
        assert_eq!(one_store(vec![("medium", text(word))]).unwrap().tier, tier, "{word}");
    }
}

#[test]
fn tagged_and_untagged_extra_keys_are_understood() {
    let block = Value::Array(vec![
        Value::Array(vec![text("lora"), text("a"), text("/path")]),
        Value::Array(vec![text("mm"), text("img"), Value::Int(-3)]),
        Value::Array(vec![text("img2"), Value::Int(5)]),
        Value::Array(vec![text("cache_salt"), text("s")]),
        Value::Array(vec![text("prompt_embeds"), Value::Bytes(vec![9])]),
        text("bare"),
        Value::Bytes(vec![8]),
    ]);
    let stored = one_store(vec![("extra_keys", Value::Array(vec![Value::Nil, block]))]).unwrap();
    let expected = vec![
        ExtraKey::Adapter("a".into()),
        ExtraKey::Item("img".into(), -3),
        ExtraKey::Item("img2".into(), 5),
        ExtraKey::Text("s".into()),
        ExtraKey::Bytes(vec![9]),
        ExtraKey::Text("bare".into()),
        ExtraKey::Bytes(vec![8]),
    ];
    assert_eq!(stored.extra_keys, ExtraKeys::Each(vec![vec![], expected]));
}
