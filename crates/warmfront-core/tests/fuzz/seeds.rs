//! Seeds from files, and what proptest makes of them.

use std::path::{Path, PathBuf};

use proptest::prelude::*;
use proptest::sample::Index;
use proptest::test_runner::{FileFailurePersistence, RngSeed};

/// Relative to the crate, where cargo runs tests.
const REGRESSIONS: &str = "../../tests/fuzz/regressions.txt";

/// Longest input made of seeds: repeats multiply.
const BYTES_MAX: usize = 64 * 1024;

/// Seed of the short run: the same inputs each time.
const SHORT_SEED: u64 = 4;

/// `short` cases from a fixed seed, or as many as `FUZZ_CASES` says from a new one.
pub fn config(short: u32) -> ProptestConfig {
    let long = std::env::var("FUZZ_CASES").ok().map(|cases| cases.parse().expect("FUZZ_CASES is a number"));
    let persistence = Box::new(FileFailurePersistence::Direct(REGRESSIONS));
    ProptestConfig {
        failure_persistence: Some(persistence),
        rng_seed: if long.is_some() { RngSeed::Random } else { RngSeed::Fixed(SHORT_SEED) },
        ..ProptestConfig::with_cases(long.unwrap_or(short))
    }
}

/// The files of one folder of the corpus, by name.
pub fn corpus(folder: &str) -> Vec<Vec<u8>> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fuzz/corpus").join(folder);
    let mut files: Vec<PathBuf> = std::fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    assert!(!files.is_empty(), "no seeds in {}", path.display());
    files.iter().map(|file| std::fs::read(file).unwrap()).collect()
}

/// One change of an input.
#[derive(Clone, Debug)]
enum Edit {
    Set(Index, u8),
    Insert(Index, Vec<u8>),
    Cut(Index, usize),
    Repeat(Index, usize, usize),
    Truncate(Index),
    /// The rest is that of another seed.
    Splice(Index, Index, Index),
}

fn edit() -> impl Strategy<Value = Edit> {
    let at = any::<Index>;
    prop_oneof![
        (at(), any::<u8>()).prop_map(|(at, byte)| Edit::Set(at, byte)),
        (at(), proptest::collection::vec(any::<u8>(), 1..8)).prop_map(|(at, bytes)| Edit::Insert(at, bytes)),
        (at(), 1..64_usize).prop_map(|(at, length)| Edit::Cut(at, length)),
        (at(), 1..64_usize, 2..200_usize).prop_map(|(at, length, times)| Edit::Repeat(at, length, times)),
        at().prop_map(Edit::Truncate),
        (at(), at(), at()).prop_map(|(at, seed, from)| Edit::Splice(at, seed, from)),
    ]
}

/// A seed after some changes; often after none.
pub fn input(folder: &str) -> impl Strategy<Value = Vec<u8>> + use<> {
    let seeds = corpus(folder);
    (any::<Index>(), proptest::collection::vec(edit(), 0..6)).prop_map(move |(seed, edits)| {
        edits.iter().fold(seed.get(&seeds).clone(), |bytes, edit| changed(bytes, edit, &seeds))
    })
}

fn changed(mut bytes: Vec<u8>, edit: &Edit, seeds: &[Vec<u8>]) -> Vec<u8> {
    let length = bytes.len();
    let place = |at: &Index| at.index(length + 1);
    match edit {
        Edit::Set(at, byte) if length > 0 => bytes[at.index(length)] = *byte,
        Edit::Set(..) => {}
        Edit::Insert(at, more) => drop(bytes.splice(place(at)..place(at), more.iter().copied())),
        Edit::Cut(at, count) => drop(bytes.drain(place(at)..(place(at) + count).min(length))),
        Edit::Repeat(at, count, times) => {
            let part = bytes[place(at)..(place(at) + count).min(length)].repeat(*times);
            bytes.splice(place(at)..place(at), part);
        }
        Edit::Truncate(at) => bytes.truncate(place(at)),
        Edit::Splice(at, seed, from) => {
            let other = seed.get(seeds);
            bytes.truncate(place(at));
            bytes.extend_from_slice(&other[from.index(other.len() + 1)..]);
        }
    }
    bytes.truncate(BYTES_MAX);
    bytes
}
