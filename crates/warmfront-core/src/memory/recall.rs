//! Giving a replica its facts back.

use std::sync::Arc;

use super::{Memory, Recalled};
use crate::fleet::Tokens;
use crate::index::{Feed, Index, Restoring, SlotRecord};
use crate::kv::sequence::Position;
use crate::mailbox::Slot;

use super::format::{Entry, ReplicaHead};

/// From here on an incarnation is a start time (in hundredths of a second) and the same for every router; below, it counts
/// the restarts that one control process has noticed.
const START_TIME_MIN: u64 = 1 << 32;

/// A replica as it is now.
#[derive(Clone, Debug)]
pub struct Wanted {
    pub pool: String,
    pub replica: String,
    pub slot: Slot,
    pub index: Arc<Index>,
    pub basis: &'static str,
    pub feed: Feed,
    pub incarnation: u64,
    /// Its event stream can be replayed, so a position can be picked up.
    pub can_replay: bool,
}

/// What is known about the process behind a replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Process {
    Same,
    Another,
    Unknown,
}

impl Process {
    fn of(then: u64, now: u64) -> Self {
        if then < START_TIME_MIN || now < START_TIME_MIN {
            Self::Unknown
        } else if then == now {
            Self::Same
        } else {
            Self::Another
        }
    }
}

/// What the blocks of a pool consist of.
pub fn basis(tokens: &Tokens) -> &'static str {
    if matches!(tokens, Tokens::Approximate(_)) { "bytes" } else { "tokens" }
}

/// Waits until it is known whether there is a snapshot, then puts the replica's facts back, if it has any. Returns where
/// its event stream is to go on.
///
/// Events tell whether the engine is still the one that the facts are about. Where there are none, the predictions of an
/// engine that may be another process live `snapshot.unverified_ttl_s` at most.
pub async fn recall(memory: &Memory, wanted: &Wanted) -> Option<Position> {
    let mut archive = memory.archive.subscribe();
    let found = archive.wait_for(Option::is_some).await.ok()?.clone();
    let recalled = found??;
    let entry = memory.entry(&recalled, wanted)?;
    let (position, record) = memory.record(&recalled, &entry, wanted).await?;
    let facts = record.facts();
    let clock = memory.parts.clock;
    let mut restoring = Restoring::new(Arc::clone(&wanted.index), record, wanted.slot, recalled.copied_s);
    while restoring.step(clock.now_s()) {
        tokio::task::yield_now().await;
    }
    memory.note(wanted, facts as u64);
    position
}

impl Memory {
    /// The entry of a replica, unless it is about something else.
    fn entry(&self, recalled: &Recalled, wanted: &Wanted) -> Option<Entry> {
        let key = (wanted.pool.clone(), wanted.replica.clone());
        let is_it = |entry: &&Entry| entry.head.pool == wanted.pool && entry.head.replica == wanted.replica;
        let entry = recalled.archive.replicas.iter().find(is_it)?;
        if self.recalled.lock().contains(&key) || self.has_expired(recalled) {
            return None;
        }
        if let Err((label, why)) = fits(&entry.head, wanted) {
            tracing::info!(replica = wanted.replica, reason = why, "its facts in the snapshot are not used");
            self.refuse(label, &format!("{}: {why}", wanted.replica));
            return None;
        }
        self.recalled.lock().insert(key);
        Some(entry.clone())
    }

    /// A replica that is found again long after the start has another history by now.
    fn has_expired(&self, recalled: &Recalled) -> bool {
        self.parts.clock.now_s() - recalled.copied_s > self.config.max_age_s
    }

    async fn record(
        &self,
        recalled: &Arc<Recalled>,
        entry: &Entry,
        wanted: &Wanted,
    ) -> Option<(Option<Position>, SlotRecord)> {
        let (reader, place) = (Arc::clone(recalled), entry.clone());
        let read = tokio::task::spawn_blocking(move || reader.archive.record(&place)).await;
        let record = match read {
            Ok(Ok(record)) => record,
            Ok(Err(refused)) => {
                tracing::warn!(replica = wanted.replica, "its facts in the snapshot cannot be read: {refused}");
                self.refuse(refused.label(), &format!("{}: {refused}", wanted.replica));
                return None;
            }
            Err(error) => {
                tracing::error!(replica = wanted.replica, "reading its facts failed: {error}");
                return None;
            }
        };
        let position = entry.head.position.filter(|_| wanted.feed == Feed::Exact && wanted.can_replay);
        if position.is_some() {
            return Some((position, record));
        }
        let record = record.without_confirmed();
        Some((None, self.bounded(record, recalled, Process::of(entry.head.incarnation, wanted.incarnation))))
    }

    /// Shortens the life of predictions about an engine that may be another process.
    fn bounded(&self, record: SlotRecord, recalled: &Recalled, process: Process) -> SlotRecord {
        if process == Process::Same {
            return record;
        }
        let since_s = self.parts.clock.now_s() - recalled.copied_s;
        record.aged(self.parts.approximate_ttl_s - self.config.unverified_ttl_s - since_s)
    }

    fn note(&self, wanted: &Wanted, facts: u64) {
        self.parts.meter.add("warmfront_snapshot_restored_facts_total", &[&wanted.pool], facts);
        tracing::info!(replica = wanted.replica, facts, "facts restored");
        let mut report = self.report.lock();
        report.restored.replicas_restored += 1;
        report.restored.facts += facts;
    }
}

/// Whether a replica's facts mean the same now; otherwise the label of the reason, and the reason.
fn fits(then: &ReplicaHead, now: &Wanted) -> Result<(), (&'static str, &'static str)> {
    let options = now.index.options();
    if Process::of(then.incarnation, now.incarnation) == Process::Another {
        return Err(("restarted", "the engine has restarted since"));
    }
    if then.basis != now.basis {
        return Err(("other_blocks", "its prompts were hashed from other units (tokens or bytes)"));
    }
    if then.block_size != options.block_size || then.lookahead != options.lookahead {
        return Err(("other_blocks", "its blocks have another size"));
    }
    if then.has_events != (now.feed == Feed::Exact) {
        return Err(("other_feed", "it publishes events now and did not then, or the reverse"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_start_times_tell_processes_apart() {
        assert_eq!(Process::of(170_000_000_000, 170_000_000_000), Process::Same);
        assert_eq!(Process::of(170_000_000_000, 170_000_000_001), Process::Another);
        assert_eq!(Process::of(0, 0), Process::Unknown);
        assert_eq!(Process::of(1, 170_000_000_000), Process::Unknown);
    }
}
