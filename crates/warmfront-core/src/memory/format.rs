//! The file: a magic, a version, and sections that each carry their length and checksum.
//!
//! The last section seals the others: their number and the hash of their checksums, so that a file that ends between two
//! sections is as torn as one that ends inside. The reader checks everything once before anything is used, allocates no
//! more than the file really holds, and keeps nothing but where each replica's section lies.
//!
//! Source of the layout: `docs/reference/snapshot-format.md`.

use std::fs::File;
use std::io::{self, BufReader, Read, Write};
use std::os::unix::fs::FileExt;

use serde::{Deserialize, Serialize};
use thiserror::Error;
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

use crate::index::SlotRecord;
use crate::kv::sequence::Position;

/// First bytes of every snapshot.
pub(super) const MAGIC: [u8; 8] = *b"WARMSNAP";
/// Raised whenever an older reader would misread the file.
pub const VERSION: u32 = 2;
/// Head of a section: kind, length, checksum.
const SECTION_BYTES: u64 = 20;
/// Calibration of the router beyond this is no calibration.
const CALIBRATION_BYTES_MAX: u64 = 64 * 1024 * 1024;

const HEAD: u32 = 1;
const REPLICA: u32 = 2;
const CALIBRATION: u32 = 3;
const SEAL: u32 = 4;

/// What holds for the whole file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Head {
    /// Wall time of the copy, seconds since 1970.
    pub written_s: f64,
    /// Seed of the sequence hashes.
    pub seed: u64,
    /// Version of the writer, for people.
    pub software: String,
}

/// Whose facts a section holds, and what must be equal for them to mean the same.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ReplicaHead {
    pub pool: String,
    pub replica: String,
    /// `tokens` or `bytes`: what the blocks consist of.
    pub basis: String,
    pub block_size: u32,
    pub lookahead: u32,
    /// The engine publishes KV events.
    pub has_events: bool,
    pub incarnation: u64,
    /// Where its event stream was.
    pub position: Option<Position>,
}

/// Why a file is not used.
#[derive(Debug, Error)]
pub enum Refused {
    #[error("it is not a snapshot of warmfront")]
    Foreign,
    #[error("it has version {0}, and this program reads {VERSION}")]
    Version(u32),
    #[error("it is torn: {0}")]
    Torn(String),
    #[error("its hashes have seed {theirs} and ours {ours} (index.seed)")]
    Seed { ours: u64, theirs: u64 },
    #[error("it is {age_s:.0} s old, over snapshot.max_age_s")]
    Old { age_s: f64 },
    #[error("it cannot be read: {0}")]
    Unreadable(#[from] io::Error),
}

impl Refused {
    /// The reason as a label.
    pub fn label(&self) -> &'static str {
        match self {
            Self::Foreign => "foreign",
            Self::Version(_) => "other_version",
            Self::Torn(_) => "torn",
            Self::Seed { .. } => "other_seed",
            Self::Old { .. } => "too_old",
            Self::Unreadable(_) => "unreadable",
        }
    }
}

/// Writes a snapshot, section by section.
pub struct Writer<W> {
    out: W,
    checksums: Vec<u8>,
    bytes: u64,
}

impl<W: Write> Writer<W> {
    /// Begins a file.
    pub fn begin(mut out: W, head: &Head) -> io::Result<Self> {
        out.write_all(&MAGIC)?;
        out.write_all(&VERSION.to_le_bytes())?;
        let mut writer = Self { out, checksums: Vec::new(), bytes: 12 };
        writer.section(HEAD, &packed(head))?;
        Ok(writer)
    }

    pub fn replica(&mut self, head: &ReplicaHead, record: &SlotRecord) -> io::Result<()> {
        let head = packed(head);
        let mut payload = (head.len() as u32).to_le_bytes().to_vec();
        payload.extend_from_slice(&head);
        payload.extend_from_slice(&record.encode());
        self.section(REPLICA, &payload)
    }

    /// A piece of what the router has learned, in the router's own words.
    pub fn calibration(&mut self, piece: &[u8]) -> io::Result<()> {
        self.section(CALIBRATION, piece)
    }

    /// Seals the file; returns what it was written to, and its bytes.
    pub fn end(mut self) -> io::Result<(W, u64)> {
        let mut seal = (self.checksums.len() as u64 / 8).to_le_bytes().to_vec();
        seal.extend_from_slice(&xxh3_64(&self.checksums).to_le_bytes());
        self.section(SEAL, &seal)?;
        self.out.flush()?;
        Ok((self.out, self.bytes))
    }

    fn section(&mut self, kind: u32, payload: &[u8]) -> io::Result<()> {
        let checksum = summed(kind, payload).to_le_bytes();
        self.out.write_all(&kind.to_le_bytes())?;
        self.out.write_all(&(payload.len() as u64).to_le_bytes())?;
        self.out.write_all(&checksum)?;
        self.out.write_all(payload)?;
        self.checksums.extend_from_slice(&checksum);
        self.bytes += SECTION_BYTES + payload.len() as u64;
        Ok(())
    }
}

/// The checksum of a section: of its payload, with its kind as seed.
fn summed(kind: u32, payload: &[u8]) -> u64 {
    xxh3_64_with_seed(payload, kind.into())
}

fn packed(value: &impl Serialize) -> Vec<u8> {
    rmp_serde::to_vec_named(value).expect("writing to memory does not fail")
}

/// A checked file, open.
#[derive(Debug)]
pub struct Archive {
    pub head: Head,
    pub replicas: Vec<Entry>,
    pub calibration: Vec<Vec<u8>>,
    pub bytes: u64,
    file: File,
}

/// Where a replica's record lies.
#[derive(Clone, Debug)]
pub struct Entry {
    pub head: ReplicaHead,
    at: u64,
    length: u64,
    checksum: u64,
}

impl Archive {
    /// Checks a whole file. Nothing of a file that is not whole is ever used.
    pub fn open(file: File) -> Result<Self, Refused> {
        let bytes = file.metadata()?.len();
        let mut reader = Reader { input: BufReader::new(&file), at: 0, bytes };
        reader.preface()?;
        let mut contents = Contents::default();
        while contents.read_section(&mut reader)? {}
        let Contents { head, replicas, calibration, .. } = contents;
        let head = head.ok_or_else(|| Refused::Torn("it has no head".into()))?;
        Ok(Self { head, replicas, calibration, bytes, file })
    }

    /// Reads one replica's record again.
    pub fn record(&self, entry: &Entry) -> Result<SlotRecord, Refused> {
        let mut payload = vec![0; entry.length as usize]; // as much as was read when the file was checked
        self.file.read_exact_at(&mut payload, entry.at)?;
        if summed(REPLICA, &payload) != entry.checksum {
            return Err(Refused::Torn("a section has changed since it was checked".into()));
        }
        replica(&payload).map(|(_, record)| record)
    }
}

#[derive(Default)]
struct Contents {
    head: Option<Head>,
    replicas: Vec<Entry>,
    calibration: Vec<Vec<u8>>,
    calibration_bytes: u64,
    checksums: Vec<u8>,
}

impl Contents {
    /// Takes one section. False: it was the seal, and nothing follows.
    fn read_section(&mut self, reader: &mut Reader<'_>) -> Result<bool, Refused> {
        let Section { kind, at, checksum, payload } = reader.section()?;
        match (kind, &self.head) {
            (HEAD, None) if at == 12 + SECTION_BYTES => {
                let head = rmp_serde::from_slice(&payload).map_err(|error| torn("its head", &error))?;
                self.head = Some(head);
            }
            (REPLICA, Some(_)) => {
                let (head, _) = replica(&payload)?;
                self.replicas.push(Entry { head, at, length: payload.len() as u64, checksum });
            }
            (CALIBRATION, Some(_)) => {
                self.calibration_bytes += payload.len() as u64;
                if self.calibration_bytes > CALIBRATION_BYTES_MAX {
                    return Err(Refused::Torn("it has too much calibration".into()));
                }
                self.calibration.push(payload);
            }
            (SEAL, Some(_)) => {
                let mut seal = (self.checksums.len() as u64 / 8).to_le_bytes().to_vec();
                seal.extend_from_slice(&xxh3_64(&self.checksums).to_le_bytes());
                if payload != seal {
                    return Err(Refused::Torn("its seal fits other sections".into()));
                }
                if reader.at != reader.bytes {
                    return Err(Refused::Torn(format!("{} bytes follow its end", reader.bytes - reader.at)));
                }
                return Ok(false);
            }
            _ => return Err(Refused::Torn(format!("a section of kind {kind} where none belongs"))),
        }
        self.checksums.extend_from_slice(&checksum.to_le_bytes());
        Ok(true)
    }
}

fn replica(payload: &[u8]) -> Result<(ReplicaHead, SlotRecord), Refused> {
    let short = || Refused::Torn("a replica's section is too short".into());
    let (length, rest) = payload.split_first_chunk::<4>().ok_or_else(short)?;
    let (head, record) = rest.split_at_checked(u32::from_le_bytes(*length) as usize).ok_or_else(short)?;
    let head = rmp_serde::from_slice(head).map_err(|error| torn("a replica's head", &error))?;
    let record = SlotRecord::decode(record).map_err(|reason| torn("a replica's facts", &reason))?;
    Ok((head, record))
}

fn torn(what: &str, why: &dyn std::fmt::Display) -> Refused {
    Refused::Torn(format!("{what}: {why}"))
}

struct Section {
    kind: u32,
    /// Of the payload.
    at: u64,
    checksum: u64,
    payload: Vec<u8>,
}

struct Reader<'a> {
    input: BufReader<&'a File>,
    at: u64,
    bytes: u64,
}

impl Reader<'_> {
    fn preface(&mut self) -> Result<(), Refused> {
        if self.bytes < 12 || self.take()? != MAGIC {
            return Err(Refused::Foreign);
        }
        match u32::from_le_bytes(self.take()?) {
            VERSION => Ok(()),
            0 => Err(Refused::Foreign),
            version => Err(Refused::Version(version)),
        }
    }

    fn section(&mut self) -> Result<Section, Refused> {
        if self.bytes - self.at < SECTION_BYTES {
            return Err(Refused::Torn("it ends without its seal".into()));
        }
        let kind = u32::from_le_bytes(self.take()?);
        let length = u64::from_le_bytes(self.take()?);
        let checksum = u64::from_le_bytes(self.take()?);
        let left = self.bytes - self.at;
        if length > left {
            return Err(Refused::Torn(format!("a section of {length} bytes where {left} are left")));
        }
        let at = self.at;
        let mut payload = vec![0; length as usize];
        self.input.read_exact(&mut payload)?;
        self.at += length;
        if summed(kind, &payload) != checksum {
            return Err(Refused::Torn(format!("the checksum of the section at byte {at} is another")));
        }
        Ok(Section { kind, at, checksum, payload })
    }

    /// Bytes that are there, as was looked at before.
    fn take<const N: usize>(&mut self) -> Result<[u8; N], Refused> {
        let mut bytes = [0; N];
        self.input.read_exact(&mut bytes)?;
        self.at += N as u64;
        Ok(bytes)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Seek;

    use proptest::prelude::*;

    use super::*;
    use crate::block::SeqHash;
    use crate::index::{Feed, Index, IndexOptions};

    fn head() -> Head {
        Head { written_s: 1000.0, seed: 7, software: "1".into() }
    }

    fn replica_head(replica: &str) -> ReplicaHead {
        ReplicaHead {
            pool: "m".into(),
            replica: replica.into(),
            basis: "tokens".into(),
            block_size: 16,
            lookahead: 0,
            has_events: true,
            incarnation: 3,
            position: Some(Position { last: 9, print: 1, base: 0, complete: true }),
        }
    }

    fn record() -> SlotRecord {
        let index = Index::new(IndexOptions::default());
        index.add_slot(0, Feed::Approximate, None);
        index.dispatched(1, &[SeqHash(1), SeqHash(2), SeqHash(3)], 0, 1.0);
        index.record(0, 2.0)
    }

    fn whole() -> Vec<u8> {
        let mut writer = Writer::begin(Vec::new(), &head()).unwrap();
        writer.replica(&replica_head("http://a:1"), &record()).unwrap();
        writer.replica(&replica_head("http://b:1"), &SlotRecord::default()).unwrap();
        writer.calibration(b"{}").unwrap();
        let (bytes, length) = writer.end().unwrap();
        assert_eq!(bytes.len() as u64, length);
        bytes
    }

    fn opened(bytes: &[u8]) -> Result<Archive, Refused> {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(bytes).unwrap();
        file.rewind().unwrap();
        Archive::open(file)
    }

    #[test]
    fn a_snapshot_comes_back_from_its_file() {
        let archive = opened(&whole()).unwrap();
        assert_eq!(archive.head, head());
        assert_eq!(archive.calibration, [b"{}"]);
        assert_eq!(archive.replicas[0].head, replica_head("http://a:1"));
        assert_eq!(archive.record(&archive.replicas[0]).unwrap(), record());
        assert_eq!(archive.record(&archive.replicas[1]).unwrap(), SlotRecord::default());
    }

    #[test]
    fn files_that_are_foreign_lengthened_or_of_another_version_are_refused_by_name() {
        let label = |bytes: &[u8]| opened(bytes).unwrap_err().label();
        assert_eq!(label(b""), "foreign");
        assert_eq!(label(b"PK\x03\x04 not ours at all"), "foreign");
        for version in [VERSION - 1, VERSION + 1] {
            let mut other = whole();
            other[8..12].copy_from_slice(&version.to_le_bytes());
            assert_eq!(label(&other), "other_version");
        }
        let mut longer = whole();
        longer.push(0);
        assert_eq!(label(&longer), "torn");
        assert_eq!(label(&[whole(), whole()].concat()), "torn");
    }

    #[test]
    fn a_section_longer_than_the_file_is_refused_before_memory_is_taken_for_it() {
        let mut bytes = whole();
        bytes[16..24].copy_from_slice(&u64::MAX.to_le_bytes());
        assert!(opened(&bytes).unwrap_err().to_string().contains("are left"));
    }

    #[test]
    fn a_file_without_one_of_its_sections_is_torn() {
        let bytes = whole();
        let length = |at: usize| u64::from_le_bytes(bytes[at + 4..at + 12].try_into().unwrap()) as usize + 20;
        let first = 12 + length(12);
        let without = [&bytes[..first], &bytes[first + length(first)..]].concat();
        assert_eq!(opened(&without).unwrap_err().label(), "torn");
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(300) })]

        #[test]
        fn a_truncated_file_is_never_taken(cut in 0_usize..10_000) {
            let bytes = whole();
            prop_assert!(opened(&bytes[..cut % bytes.len()]).is_err());
        }

        #[test]
        fn a_file_with_one_bit_changed_is_never_taken(at in 0_usize..10_000, bit in 0_u8..8) {
            let mut bytes = whole();
            let at = at % bytes.len();
            bytes[at] ^= 1 << bit;
            prop_assert!(opened(&bytes).is_err(), "byte {at}, bit {bit}");
        }

        #[test]
        fn any_bytes_behind_our_magic_are_refused_without_a_panic(tail in proptest::collection::vec(any::<u8>(), 0..300)) {
            let bytes = [&whole()[..12], &tail].concat();
            prop_assert!(opened(&bytes).is_err());
        }
    }
}
