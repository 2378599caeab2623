//! Speed and size of the index: stored blocks per second from wire frames, lookup time, bytes per block and fact.
//!
//! `index_bench [--json] [--quick] [store] [lookup] [dispatch] [memory]`. One thread. Prints one line a measurement; with `--json` each is a JSON object.
//! Times are the best of several runs, since other work on the machine only ever adds. Sizes are resident memory.

use std::fmt::Write as _;

use warmfront_core::block::{BlockExtras, SeqHash};
use warmfront_core::index::{Feed, Index, IndexOptions};
use warmfront_core::kv::wire;

const BLOCK_SIZE: usize = 16;
const VOCABULARY: u64 = 128_000;

/// Whose engine hashes a replica uses.
#[derive(Clone, Copy, PartialEq)]
enum Names {
    /// All replicas agree, as with a fixed hash seed (the default of vLLM 0.29 and later).
    Shared,
    /// Each replica has its own, as with a random seed.
    Own,
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let [word, sizes @ ..] = &arguments[..]
        && word == "--size"
    {
        return size(sizes);
    }
    let has = |flag: &str| arguments.iter().any(|word| word == flag);
    let report = Report { json: has("--json") };
    let blocks = if has("--quick") { 1 << 17 } else { 1 << 20 };
    let parts = ["store", "lookup", "dispatch", "memory"];
    let all = !parts.iter().any(|part| has(part));
    if all || has("store") {
        for blocks_per_frame in [16, 64, 512] {
            store_speed(&report, blocks, blocks_per_frame, Names::Shared);
        }
        store_speed(&report, blocks, 64, Names::Own);
    }
    if all || has("lookup") {
        lookups_by_shape(&report, blocks / 4);
        lookups_by_index_size(&report, blocks);
    }
    if all || has("dispatch") {
        for (feed, capacity) in [(Feed::Exact, None), (Feed::Approximate, None), (Feed::Approximate, Some(100_000))] {
            dispatches(&report, feed, capacity);
        }
    }
    if all || has("memory") {
        sizes(&report, blocks / 2);
    }
}

/// Writes one measurement a line.
struct Report {
    json: bool,
}

impl Report {
    fn line(&self, name: &str, fields: &[(&str, f64)]) {
        let mut line = String::new();
        if self.json {
            let _ = write!(line, "{{\"name\":\"{name}\"");
            for (key, value) in fields {
                let _ = write!(line, ",\"{key}\":{value:.3}");
            }
            line.push('}');
        } else {
            let _ = write!(line, "{name:<28}");
            for (key, value) in fields {
                let _ = write!(line, " {key}={value:.2}");
            }
        }
        println!("{line}");
    }
}

/// Numbers that look random and are the same in every run (splitmix64).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.0;
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^ (word >> 31)
    }

    fn tokens(&mut self, count: usize) -> Vec<u32> {
        (0..count).map(|_| (self.next() % VOCABULARY) as u32).collect()
    }
}

/// A store as vLLM 0.32 puts it on the wire.
fn frame(tokens: &[u32], first_name: u64, parent: Option<u64>) -> Vec<u8> {
    let mut out = vec![0x93, 0xcb];
    out.extend_from_slice(&1_796_000_000.5_f64.to_be_bytes());
    out.extend_from_slice(&[0x91, 0x8b]);
    string(&mut out, "type");
    string(&mut out, "BlockStored");
    string(&mut out, "block_hashes");
    let blocks = tokens.len() / BLOCK_SIZE;
    array(&mut out, blocks);
    for block in 0..blocks as u64 {
        number(&mut out, name(first_name + block));
    }
    string(&mut out, "parent_block_hash");
    match parent {
        Some(parent) => number(&mut out, name(parent)),
        None => out.push(0xc0),
    }
    string(&mut out, "token_ids");
    array(&mut out, tokens.len());
    for token in tokens {
        number(&mut out, u64::from(*token));
    }
    string(&mut out, "block_size");
    number(&mut out, BLOCK_SIZE as u64);
    for key in ["lora_id", "lora_name"] {
        string(&mut out, key);
        out.push(0xc0);
    }
    string(&mut out, "medium");
    string(&mut out, "GPU");
    string(&mut out, "extra_keys");
    array(&mut out, blocks);
    out.extend(std::iter::repeat_n(0xc0, blocks));
    string(&mut out, "group_idx");
    number(&mut out, 0);
    string(&mut out, "kv_cache_spec_kind");
    string(&mut out, "full_attention");
    out.push(0);
    out
}

/// Engine hashes are digests: spread the running number.
fn name(number: u64) -> u64 {
    Random(number).next() | 1
}

fn string(out: &mut Vec<u8>, word: &str) {
    out.push(0xa0 | word.len() as u8);
    out.extend_from_slice(word.as_bytes());
}

fn array(out: &mut Vec<u8>, count: usize) {
    out.push(0xdc);
    out.extend_from_slice(&(count as u16).to_be_bytes());
}

fn number(out: &mut Vec<u8>, value: u64) {
    match value {
        0..=0x7f => out.push(value as u8),
        0x80..=0xff => out.extend_from_slice(&[0xcc, value as u8]),
        0x100..=0xffff => {
            out.push(0xcd);
            out.extend_from_slice(&(value as u16).to_be_bytes());
        }
        0x1_0000..=0xffff_ffff => {
            out.push(0xce);
            out.extend_from_slice(&(value as u32).to_be_bytes());
        }
        _ => {
            out.push(0xcf);
            out.extend_from_slice(&value.to_be_bytes());
        }
    }
}

/// Frames of independent chains, `blocks` blocks in all, named from `first` on.
fn frames(blocks: usize, blocks_per_frame: usize, first: u64) -> Vec<Vec<u8>> {
    let mut random = Random(1);
    (0..blocks / blocks_per_frame)
        .map(|at| frame(&random.tokens(blocks_per_frame * BLOCK_SIZE), first + (at * blocks_per_frame) as u64, None))
        .collect()
}

fn index(replicas: u32) -> Index {
    let index = Index::new(IndexOptions { block_size: BLOCK_SIZE as u32, seed: 7, ..IndexOptions::default() });
    for slot in 0..replicas {
        index.add_slot(slot, Feed::Exact, None);
    }
    index
}

fn apply(index: &Index, slot: u32, frames: &[Vec<u8>]) {
    for frame in frames {
        let batch = wire::decode(frame).expect("our own frame decodes");
        let report = index.apply(slot, &batch, 0.0);
        assert_eq!(report.unknown_parents + report.malformed, 0);
    }
}

/// Seconds of processor time that `work` takes on this thread: other work on the machine does not count.
fn seconds(work: impl FnOnce()) -> f64 {
    let start = processor_s();
    work();
    processor_s() - start
}

/// Processor time of this thread so far, as the scheduler counts it.
fn processor_s() -> f64 {
    // Yielding makes the scheduler bring its account up to date.
    std::thread::yield_now();
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").expect("Linux with scheduler statistics");
    text.split_whitespace().next().and_then(|word| word.parse::<f64>().ok()).expect("a number of nanoseconds") / 1e9
}

fn store_speed(report: &Report, blocks: usize, blocks_per_frame: usize, names: Names) {
    let first_frames = frames(blocks, blocks_per_frame, 0);
    let second_frames = frames(blocks, blocks_per_frame, if names == Names::Shared { 0 } else { 1 << 40 });
    let (mut first, mut second, mut decode) = (f64::MAX, f64::MAX, f64::MAX);
    for _ in 0..3 {
        let index = index(64);
        first = first.min(seconds(|| apply(&index, 0, &first_frames)));
        second = second.min(seconds(|| apply(&index, 1, &second_frames)));
        decode = decode.min(seconds(|| {
            for frame in &first_frames {
                std::hint::black_box(wire::decode(frame).expect("our own frame decodes"));
            }
        }));
    }
    let rate = |seconds: f64| blocks as f64 / seconds / 1e6;
    let name = if names == Names::Shared { "store_shared_names" } else { "store_own_names" };
    report.line(
        name,
        &[
            ("blocks_per_frame", blocks_per_frame as f64),
            ("index_blocks", blocks as f64),
            ("decode_only_mblocks_s", rate(decode)),
            ("first_replica_mblocks_s", rate(first)),
            ("second_replica_mblocks_s", rate(second)),
        ],
    );
}

/// Stores one prompt on every replica: replica r of n holds its first (r + 1)/n.
fn store_staircase(index: &Index, tokens: &[u32], replicas: u32) {
    for slot in 0..replicas {
        let blocks = tokens.len() / BLOCK_SIZE * (slot as usize + 1) / replicas as usize;
        for (chunk, run) in tokens[..blocks * BLOCK_SIZE].chunks(512 * BLOCK_SIZE).enumerate() {
            let first = (chunk * 512) as u64;
            apply(index, slot, &[frame(run, first, first.checked_sub(1))]);
        }
    }
}

fn lookup_us(index: &Index, hashes: &[SeqHash]) -> f64 {
    let best = (0..7).map(|_| {
        seconds(|| {
            for _ in 0..20 {
                std::hint::black_box(index.overlap(std::hint::black_box(hashes), 0.0));
            }
        })
    });
    best.fold(f64::MAX, f64::min) / 20.0 * 1e6
}

/// Dispatches of prompts of 100,000 tokens: one again and again, and prompts that share four fifths with one another and end
/// anew, eight in flight at a time.
fn dispatches(report: &Report, feed: Feed, capacity_blocks: Option<u64>) {
    const BLOCKS: usize = 6_250;
    const COUNT: usize = 64;
    let index = Index::new(IndexOptions { block_size: BLOCK_SIZE as u32, seed: 7, ..IndexOptions::default() });
    index.add_slot(0, feed, capacity_blocks);
    let mut random = Random(95);
    let shared = random.tokens(BLOCKS / 5 * 4 * BLOCK_SIZE);
    let prompts: Vec<Vec<SeqHash>> = (0..COUNT)
        .map(|_| {
            let mut prompt = shared.clone();
            prompt.extend(random.tokens(BLOCKS / 5 * BLOCK_SIZE));
            index.hasher().chain(&prompt, &BlockExtras::default())
        })
        .collect();
    let dispatch = |at: usize, hashes: &[SeqHash]| {
        index.dispatched(at as u64, std::hint::black_box(hashes), 0, 0.0);
        if let Some(before) = at.checked_sub(8) {
            index.released(before as u64);
        }
    };
    let fresh_s = seconds(|| {
        for (at, hashes) in prompts.iter().enumerate() {
            dispatch(at, hashes);
        }
    });
    let again_s = (0..7).map(|round| {
        seconds(|| {
            for at in 0..COUNT {
                dispatch((round + 1) * COUNT + at, &prompts[COUNT - 1]);
            }
        })
    });
    let us = |seconds: f64| seconds / COUNT as f64 * 1e6;
    report.line(
        "dispatch",
        &[
            ("approximate", f64::from(u8::from(feed == Feed::Approximate))),
            ("capacity_blocks", capacity_blocks.unwrap_or(0) as f64),
            ("blocks", BLOCKS as f64),
            ("fifth_new_us", us(fresh_s)),
            ("again_us", us(again_s.fold(f64::MAX, f64::min))),
        ],
    );
}

fn lookups_by_shape(report: &Report, background: usize) {
    let background = frames(background, 64, 1 << 41);
    for replicas in [8, 64, 256] {
        for tokens in [1_000, 8_000, 32_000, 100_000, 200_000] {
            let index = index(replicas);
            apply(&index, 0, &background);
            let prompt = Random(99).tokens(tokens);
            store_staircase(&index, &prompt, replicas);
            let hashes = index.hasher().chain(&prompt, &BlockExtras::default());
            let hash_us = (0..5).map(|_| {
                seconds(|| {
                    std::hint::black_box(index.hasher().chain(&prompt, &BlockExtras::default()));
                })
            });
            let hash_us = hash_us.fold(f64::MAX, f64::min) * 1e6;
            report.line(
                "lookup",
                &[
                    ("replicas", f64::from(replicas)),
                    ("prompt_tokens", tokens as f64),
                    ("blocks", hashes.len() as f64),
                    ("lookup_us", lookup_us(&index, &hashes)),
                    ("hash_us", hash_us),
                ],
            );
        }
    }
    let full = index(64);
    let prompt = Random(98).tokens(6_250 * BLOCK_SIZE);
    for slot in 0..64 {
        for (chunk, run) in prompt.chunks(512 * BLOCK_SIZE).enumerate() {
            let first = (chunk * 512) as u64;
            apply(&full, slot, &[frame(run, first, first.checked_sub(1))]);
        }
    }
    let hashes = full.hasher().chain(&prompt, &BlockExtras::default());
    report.line(
        "lookup_held_by_all",
        &[("replicas", 64.0), ("blocks", 6_250.0), ("lookup_us", lookup_us(&full, &hashes))],
    );
}

fn lookups_by_index_size(report: &Report, blocks_max: usize) {
    let prompt = Random(97).tokens(1_000 * BLOCK_SIZE);
    let mut background = 1 << 14;
    while background <= blocks_max {
        let index = index(64);
        apply(&index, 1, &frames(background, 64, 1 << 41));
        store_staircase(&index, &prompt, 64);
        let hashes = index.hasher().chain(&prompt, &BlockExtras::default());
        let miss = index.hasher().chain(&Random(96).tokens(1_000 * BLOCK_SIZE), &BlockExtras::default());
        report.line(
            "lookup_by_index_size",
            &[
                ("index_blocks", background as f64),
                ("hit_1000_blocks_us", lookup_us(&index, &hashes)),
                ("miss_us", lookup_us(&index, &miss)),
            ],
        );
        background *= 4;
    }
}

/// Resident memory of this process, bytes.
fn resident_bytes() -> f64 {
    let text = std::fs::read_to_string("/proc/self/statm").expect("Linux");
    let pages: f64 = text.split_whitespace().nth(1).and_then(|word| word.parse().ok()).expect("statm has two fields");
    pages * 4096.0
}

/// Sizes of indexes of several shapes, each in a process of its own, so that no memory is reused.
fn sizes(report: &Report, blocks: usize) {
    let program = std::env::current_exe().expect("the path of this program");
    for names in ["shared", "own"] {
        for (replicas, holders) in [(1, 1), (8, 8), (64, 1), (64, 8), (64, 64), (256, 1), (256, 64)] {
            let shape = [blocks.to_string(), replicas.to_string(), holders.to_string(), names.to_string()];
            let output = std::process::Command::new(&program).arg("--size").args(&shape).output().expect("runs itself");
            let text = String::from_utf8_lossy(&output.stdout);
            let figures: Vec<f64> = text.split_whitespace().filter_map(|word| word.parse().ok()).collect();
            let [blocks, facts, resident, counted] = figures[..] else { panic!("four figures, not {text:?}") };
            let allowed = 64.0 * blocks + 16.0 * facts;
            report.line(
                &format!("size_{names}_names"),
                &[
                    ("replicas", f64::from(replicas)),
                    ("holders", f64::from(holders)),
                    ("blocks", blocks),
                    ("facts", facts),
                    ("bytes_per_block", resident / blocks),
                    ("bytes_per_fact", resident / facts),
                    ("share_of_allowed", resident / allowed),
                    ("counted_share_of_resident", counted / resident),
                ],
            );
        }
    }
}

/// Builds an index of `blocks` distinct blocks, each held by `holders` of `replicas` replicas, and prints blocks, facts,
/// resident bytes and the bytes that the index itself counts.
fn size(shape: &[String]) {
    let [blocks, replicas, holders, names] = shape else { panic!("--size BLOCKS REPLICAS HOLDERS NAMES") };
    let number = |word: &String| word.parse::<u32>().expect("a number");
    let (blocks, replicas, holders) = (number(blocks) as usize, number(replicas), number(holders));
    let before = resident_bytes();
    let index = index(replicas);
    let per_frame = 64;
    for holder in 0..holders {
        // Frames are made on the fly and dropped, so the index alone remains.
        let mut random = Random(1);
        let base = if names == "own" { u64::from(holder) << 40 } else { 0 };
        for at in 0..blocks / per_frame {
            let slot = (at as u32 + holder) % replicas;
            let run = frame(&random.tokens(per_frame * BLOCK_SIZE), base + (at * per_frame) as u64, None);
            apply(&index, slot, &[run]);
        }
    }
    let stats = index.stats();
    println!("{} {} {} {}", stats.blocks, stats.confirmed_facts, resident_bytes() - before, stats.bytes);
}
