//! Recorded vLLM events through decoder and index (`tests/fixtures/vllm/README.md` says where they come from).

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::path::PathBuf;

use serde_json::Value;
use warmfront_core::block::{BlockExtras, SeqHash};
use warmfront_core::index::{Feed, Index, IndexOptions};
use warmfront_core::kv::wire::{self, EngineHash, EventBatch, ExtraKeys, KvEvent, Tier};

fn lines(name: &str) -> Vec<Value> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/vllm");
    let text = std::fs::read_to_string(folder.join(name)).unwrap();
    text.lines().map(|line| shortened(serde_json::from_str(line).unwrap())).collect()
}

fn base64(text: &str) -> Vec<u8> {
    let value = |byte: u8| match byte {
        b'A'..=b'Z' => u32::from(byte - b'A'),
        b'a'..=b'z' => u32::from(byte - b'a') + 26,
        b'0'..=b'9' => u32::from(byte - b'0') + 52,
        b'+' => 62,
        _ => 63,
    };
    let mut bytes = Vec::new();
    for group in text.trim_end_matches('=').as_bytes().chunks(4) {
        let word = group.iter().fold(0, |word, byte| (word << 6) | value(*byte)) << (6 * (4 - group.len()));
        bytes.extend_from_slice(&word.to_be_bytes()[1..group.len()]);
    }
    bytes
}

fn batch(line: &Value) -> EventBatch {
    wire::decode(&base64(line["payload_b64"].as_str().unwrap())).unwrap()
}

fn index(block_size: u32) -> Index {
    let index = Index::new(IndexOptions { block_size, seed: 11, ..IndexOptions::default() });
    index.add_slot(0, Feed::Exact, None);
    index
}

fn tokens(value: &Value) -> Option<Vec<u32>> {
    let list = value.as_array()?;
    list.iter().map(|token| token.as_u64().and_then(|token| u32::try_from(token).ok())).collect()
}

/// A request of a recording whose prompt is one list of token ids.
struct Recorded {
    prompt: Vec<u32>,
    extras: BlockExtras,
    /// Cached tokens that the engine reported.
    cached: u64,
    /// The engine neither reads its cache nor counts hits for it.
    skips_lookup: bool,
    /// It asks for its hit to be reported as stores.
    reports_hit: bool,
    output_tokens: usize,
    copies: u64,
}

/// One recording keeps requests and usage as they came, for other tests; the others only what is used here.
fn shortened(mut line: Value) -> Value {
    if let Some(request) = line.get("request").cloned() {
        line["path"] = request["path"].clone();
        line["body"] = request["body"].clone();
        line["cached_tokens"] = line["usage"]["prompt_tokens_details"]["cached_tokens"].clone();
    }
    line
}

fn recorded(line: &Value) -> Option<Recorded> {
    let body = &line["body"];
    let adapter = body["model"].as_str().filter(|model| model.starts_with("adapter"));
    Some(Recorded {
        prompt: tokens(&body["prompt"])?,
        extras: BlockExtras {
            adapter: adapter.map(Into::into),
            salt: body["cache_salt"].as_str().map(Into::into),
            media: vec![],
        },
        cached: line["cached_tokens"].as_u64()?,
        skips_lookup: !body["prompt_logprobs"].is_null(),
        reports_hit: body["vllm_xargs"]["kv_cache_report_mode"] == "full",
        output_tokens: body["max_tokens"].as_u64().unwrap_or(1) as usize,
        copies: body["n"].as_u64().unwrap_or(1),
    })
}

/// Replays a recording in the engine's order: predicts each request, compares with what the engine reported, then applies
/// the frames that the request caused. These are found by counting: a request stores exactly the blocks that it did not
/// hit, which is checked on the way.
struct Replay {
    index: Index,
    frames: VecDeque<EventBatch>,
    /// A reset that the engine has not published yet: until then nobody can know of it.
    reset: bool,
    predicted: usize,
}

impl Replay {
    fn new(name: &str, block_size: u32) -> Self {
        let frames = lines(name).iter().filter(|line| line["kind"] == "frame").map(batch).collect();
        Self { index: index(block_size), frames, reset: false, predicted: 0 }
    }

    fn request(&mut self, request: &Recorded, what: &str) {
        let block_size = self.index.hasher().block_size();
        let hashes = self.index.hasher().chain(&request.prompt, &request.extras);
        let usable = (request.prompt.len() - 1) / block_size;
        let mut hit = self.index.overlap(&hashes[..usable.min(hashes.len())], 0.0).device[0] as usize;
        if request.skips_lookup || self.reset {
            hit = 0;
        } else if request.copies == 1 {
            assert_eq!((hit * block_size) as u64, request.cached, "{what}");
            self.predicted += 1;
        }
        let full = (request.prompt.len() + request.output_tokens - 1) / block_size;
        let reported = if request.reports_hit { hit } else { 0 };
        self.take(full - hit + reported, what);
    }

    /// Applies frames until `blocks` blocks have been stored in the main group.
    fn take(&mut self, blocks: usize, what: &str) {
        let mut left = blocks;
        while left > 0 {
            let batch = self.frames.pop_front().unwrap_or_else(|| panic!("{what}: {left} blocks were never stored"));
            let stored = main_blocks(&batch);
            assert!(stored <= left, "{what}: {stored} stored, {left} expected");
            left -= stored;
            self.apply(&batch, what);
        }
        // A clear that no store follows comes alone.
        if self.reset && self.frames.front().is_some_and(|next| next.events == [KvEvent::Cleared]) {
            let batch = self.frames.pop_front().unwrap();
            self.apply(&batch, what);
        }
    }

    fn apply(&mut self, batch: &EventBatch, what: &str) {
        if batch.events.contains(&KvEvent::Cleared) {
            self.reset = false;
        }
        let report = self.index.apply(0, batch, 0.0);
        assert_eq!(report.unknown_parents + report.unknown_removals + report.malformed, 0, "{what}: {report:?}");
        assert_eq!(report.other_block_size, None);
    }
}

fn main_blocks(batch: &EventBatch) -> usize {
    let stores = batch.events.iter().filter_map(|event| match event {
        KvEvent::Stored(stored) if stored.kind == Some(wire::SpecKind::Full) => Some(stored.block_hashes.len()),
        _ => None,
    });
    stores.sum()
}

/// Requests one after the other up to `until`, a scenario whose requests overlap.
fn replay(name: &str, block_size: u32, until: &str, skip: &[&str]) -> usize {
    let mut replay = Replay::new(name, block_size);
    let mut scenario = String::new();
    for line in lines(name) {
        match line["kind"].as_str().unwrap() {
            "scenario" => {
                scenario = line["scenario"].as_str().unwrap().into();
                if scenario == "overload" {
                    // Concurrent requests that are not recorded.
                    replay.take(9, &scenario);
                }
            }
            "http" if scenario == until => break,
            "http" if line["path"].as_str().unwrap().contains("reset_prefix_cache") => replay.reset = true,
            "http" if line["status"] != 200 => {}
            "http" if skip.contains(&scenario.as_str()) => other_request(&mut replay, &line, &scenario),
            "http" => {
                if let Some(request) = recorded(&line) {
                    replay.request(&request, &scenario);
                }
            }
            _ => {}
        }
    }
    replay.predicted
}

/// A request whose tokens are not recorded, or that has several prompts: its frames are applied.
fn other_request(replay: &mut Replay, line: &Value, scenario: &str) {
    let blocks = match scenario {
        "batch_prompts" => 3,
        "prompt_embeds" => 2,
        "chat_tools_auto" => 6,
        other => panic!("{other}: {line}"),
    };
    replay.take(blocks, scenario);
}

#[test]
fn predicted_hits_equal_what_the_engine_reported() {
    let predicted = replay("events_main_int_bs128.jsonl", 128, "concurrent_preempt", &["batch_prompts"]);
    assert!(predicted > 40, "{predicted}");
}

#[test]
fn predicted_hits_equal_what_the_engine_reported_with_digests_as_hashes() {
    let skip = ["prompt_embeds", "chat_tools_auto"];
    let predicted = replay("events_bytes_bs32_sha256cbor.jsonl", 32, "none", &skip);
    assert!(predicted > 30, "{predicted}");
}

// bug 41, 42
#[test]
fn predicted_hits_equal_what_the_engine_reported_with_two_cache_groups() {
    let predicted = replay("events_hybrid_swa_full_bs32.jsonl", 32, "hyb_full_mode", &[]);
    assert!(predicted >= 5, "{predicted}");
}

/// Residency by the plainest rule: a count for each engine hash.
fn multiset(batches: &[EventBatch]) -> BTreeSet<u64> {
    let mut counts: BTreeMap<u64, i64> = BTreeMap::new();
    for event in batches.iter().flat_map(|batch| &batch.events) {
        match event {
            KvEvent::Stored(stored) if stored.kind == Some(wire::SpecKind::Full) => {
                stored.block_hashes.iter().for_each(|hash| *counts.entry(hash.0).or_default() += 1);
            }
            KvEvent::Removed(removed) => {
                removed.block_hashes.iter().for_each(|hash| *counts.entry(hash.0).or_default() -= 1);
            }
            KvEvent::Cleared => counts.clear(),
            KvEvent::Stored(_) => {}
        }
    }
    counts.into_iter().filter(|(_, count)| *count > 0).map(|(hash, _)| hash).collect()
}

/// Tokens of the whole prefix that each engine hash stands for.
fn prefixes(batches: &[EventBatch]) -> HashMap<u64, (Vec<u32>, BlockExtras)> {
    let mut prefixes: HashMap<u64, (Vec<u32>, BlockExtras)> = HashMap::new();
    for event in batches.iter().flat_map(|batch| &batch.events) {
        let KvEvent::Stored(stored) = event else { continue };
        let (mut prefix, mut extras) =
            stored.parent.map_or_else(Default::default, |parent| prefixes[&parent.0].clone());
        extras.adapter.clone_from(&stored.lora_name);
        if let (None, ExtraKeys::Each(keys)) = (stored.parent, &stored.extra_keys)
            && let Some(wire_key) = keys[0].last()
            && let warmfront_core::block::ExtraKey::Text(text) = wire_key
            && Some(text) != stored.lora_name.as_ref()
        {
            extras.salt = Some(text.clone());
        }
        for (hash, run) in stored.block_hashes.iter().zip(stored.token_ids.chunks(stored.block_size as usize)) {
            prefix.extend_from_slice(run);
            prefixes.insert(hash.0, (prefix.clone(), extras.clone()));
        }
    }
    prefixes
}

fn assert_residency_equals_multiset(batches: &[EventBatch], block_size: u32) {
    let index = index(block_size);
    for batch in batches {
        let report = index.apply(0, batch, 0.0);
        assert_eq!(report.unknown_parents + report.unknown_removals, 0);
    }
    let resident = multiset(batches);
    let chains: Vec<(u64, Vec<SeqHash>)> = prefixes(batches)
        .into_iter()
        .map(|(hash, (prefix, extras))| (hash, index.hasher().chain(&prefix, &extras)))
        .collect();
    let last_of = |chain: &[SeqHash]| *chain.last().unwrap();
    let held: BTreeSet<SeqHash> =
        chains.iter().filter(|(hash, _)| resident.contains(hash)).map(|(_, chain)| last_of(chain)).collect();
    for (hash, chain) in &chains {
        let depth = chain.iter().take_while(|block| held.contains(block)).count();
        assert_eq!(index.overlap(chain, 0.0).confirmed[0] as usize, depth, "{hash}");
    }
    assert_eq!(index.stats().confirmed_facts, held.len() as u64);
}

fn frames(name: &str, keep: impl Fn(&Value) -> bool) -> Vec<EventBatch> {
    lines(name).iter().filter(|line| line["kind"] == "frame" && keep(line)).map(batch).collect()
}

#[test]
fn final_residency_equals_an_independent_multiset_count() {
    let main = frames("events_main_int_bs128.jsonl", |_| true);
    assert_eq!(main.len(), 76);
    assert_residency_equals_multiset(&main, 128);
    for length in [10, 30, 36, 48, 60] {
        assert_residency_equals_multiset(&main[..length], 128);
    }
}

#[test]
fn residency_equals_the_count_in_the_other_recordings() {
    let mut main2 = frames("events_main2_full_mode_reset_lora.jsonl", |_| true);
    assert_residency_equals_multiset(&main2, 128);
    main2.extend(frames("events_full_mode_storm.jsonl", |_| true));
    assert_residency_equals_multiset(&main2, 128);
    for rank in 0..2 {
        let frames = frames("events_dp2.jsonl", |line| line["rank_socket"] == rank);
        assert!(frames.iter().all(|batch| batch.rank == Some(rank)));
        assert_residency_equals_multiset(&frames, 128);
        assert_residency_equals_multiset(&frames[..frames.len() - 1], 128);
    }
}

#[test]
fn an_adapter_loaded_from_another_path_has_two_engine_hashes_for_one_block() {
    let index = index(128);
    let batches = frames("events_main2_full_mode_reset_lora.jsonl", |_| true);
    let last_two = &batches[batches.len() - 2..];
    let first = index.apply(0, &last_two[0], 0.0);
    let second = index.apply(0, &last_two[1], 0.0);
    assert_eq!((first.stored, second.stored, second.duplicates), (2, 2, 0));
    assert_eq!(index.stats().blocks, 2);
    assert_eq!(index.stats().confirmed_facts, 2);
    for batch in last_two {
        let KvEvent::Stored(stored) = &batch.events[0] else { panic!("a store") };
        let removed = wire::Removed { block_hashes: stored.block_hashes.clone(), ..wire::Removed::default() };
        let report =
            index.apply(0, &EventBatch { events: vec![KvEvent::Removed(removed)], ..EventBatch::default() }, 0.0);
        assert_eq!(report.removed, 2);
    }
    assert_eq!(index.stats().blocks, 0);
}

/// What a batch says, leaving out fields that the encoding's version does not have.
fn meaning(batch: &EventBatch, version: &[u32]) -> EventBatch {
    let mut batch = batch.clone();
    for event in &mut batch.events {
        match event {
            KvEvent::Stored(stored) => {
                if version < &[0, 33][..] {
                    (stored.lookahead, stored.lookahead_tokens) = (0, vec![]);
                }
                if version < &[0, 30][..] {
                    stored.session_id = None;
                }
                if version < &[0, 22][..] {
                    (stored.kind, stored.window) = (None, None);
                }
                if version < &[0, 20][..] {
                    stored.group = None;
                }
                if version < &[0, 17][..] {
                    stored.extra_keys = ExtraKeys::Absent;
                }
                if version < &[0, 14][..] {
                    stored.lora_name = None;
                }
                if version < &[0, 10, 2][..] {
                    stored.tier = Tier::Gpu;
                }
            }
            KvEvent::Removed(removed) => {
                if version < &[0, 20][..] {
                    removed.group = None;
                }
                if version < &[0, 10, 2][..] {
                    removed.tier = Tier::Gpu;
                }
            }
            KvEvent::Cleared => {}
        }
    }
    batch
}

/// The media key is spelled differently from version to version; what is left of it is the identifier.
fn plain_media(mut batch: EventBatch) -> EventBatch {
    use warmfront_core::block::ExtraKey;
    for event in &mut batch.events {
        if let KvEvent::Stored(stored) = event
            && let ExtraKeys::Each(each) = &mut stored.extra_keys
        {
            for key in each.iter_mut().flatten() {
                if let ExtraKey::Item(identifier, _) = key {
                    *key = ExtraKey::Text(identifier.clone());
                }
            }
        }
    }
    batch
}

#[test]
fn every_version_and_encoding_decodes_to_the_same_batch() {
    let lines = lines("events_encodings_by_version.jsonl");
    let text = |line: &Value, key: &str| line[key].as_str().unwrap().to_owned();
    let key = |line: &Value| (text(line, "case"), text(line, "version"), text(line, "hash_type"));
    let newest: HashMap<String, EventBatch> = lines
        .iter()
        .filter(|line| key(line).1 == "0.33.0" && key(line).2 == "int")
        .map(|line| (text(line, "case"), batch(line)))
        .collect();
    for line in &lines {
        let (case, version, hash_type) = key(line);
        let numbers: Vec<u32> = version.split('.').map(|part| part.parse().unwrap()).collect();
        let ours = plain_media(batch(line));
        let expected = plain_media(meaning(&newest[&case], &numbers));
        if hash_type == "int" {
            assert_eq!(ours, expected, "{case} {version}");
        } else {
            assert_eq!(without_hashes(ours), without_hashes(expected), "{case} {version}");
        }
    }
    assert!(lines.len() > 370);
}

fn without_hashes(mut batch: EventBatch) -> EventBatch {
    for event in &mut batch.events {
        match event {
            KvEvent::Stored(stored) => {
                stored.block_hashes.iter_mut().for_each(|hash| *hash = EngineHash(0));
                stored.parent = stored.parent.map(|_| EngineHash(0));
            }
            KvEvent::Removed(removed) => removed.block_hashes.iter_mut().for_each(|hash| *hash = EngineHash(0)),
            KvEvent::Cleared => {}
        }
    }
    batch
}

fn synthetic(case: &str) -> EventBatch {
    batch(lines("events_offload_synthetic.jsonl").iter().find(|line| line["case"] == case).unwrap())
}

#[test]
fn self_describing_offload_events_count_as_host_and_leave_with_their_removals() {
    let index = index(16);
    let stored = synthetic("self_describing_cpu_stored");
    let report = index.apply(0, &stored, 0.0);
    assert_eq!((report.offloaded, report.stored, report.unknown_parents), (12, 0, 0));
    let mut prompt = Vec::new();
    for event in &stored.events {
        let KvEvent::Stored(stored) = event else { panic!("a store") };
        prompt.extend_from_slice(&stored.token_ids);
    }
    let overlap = index.overlap(&index.hasher().chain(&prompt, &BlockExtras::default()), 0.0);
    assert_eq!((overlap.device[0], overlap.host[0], overlap.disk[0]), (0, 12, 12));
    let report = index.apply(0, &synthetic("self_describing_cpu_removed"), 0.0);
    assert_eq!((report.removed, report.unknown_removals), (8, 0));
}

#[test]
fn placeholders_attach_to_known_blocks_only() {
    let index = index(16);
    let report = index.apply(0, &synthetic("placeholder_cpu_stored"), 0.0);
    assert_eq!((report.offloaded, report.unknown_placeholders), (0, 3));
    index.apply(0, &synthetic("self_describing_storage_stored"), 0.0);
    let report = index.apply(0, &synthetic("placeholder_cpu_stored"), 0.0);
    assert!(report.offloaded >= 1, "{report:?}");
    let report = index.apply(0, &synthetic("placeholder_cpu_stored_sliding_group"), 0.0);
    assert_eq!(report.malformed, 0);
}
