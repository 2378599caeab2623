//! Writing snapshots: when, how a replica is copied, and how the file takes its place.

use std::fs::{File, OpenOptions};
use std::io::{self, BufWriter, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::watch;
use tokio::task::spawn_blocking;
use tokio::time::{Instant, MissedTickBehavior};

use super::format::{Head, MAGIC, ReplicaHead, Writer};
use super::recall::basis;
use super::{Kept, Memory, folder};
use crate::backoff::seconds;
use crate::fleet::{FleetView, Pool, Replica};
use crate::http::Stop;
use crate::index::{Copying, Feed, Index, SlotRecord};
use crate::kv::sequence::Position;

/// How often the age is told.
const AGE_INTERVAL: Duration = Duration::from_secs(5);
/// How long a termination signal waits for the router's calibration.
const PREPARE_TIMEOUT: Duration = Duration::from_secs(1);
/// Time between two snapshots over the time that one takes: a large index is written more rarely, not all the time.
const PAUSE_SHARE: u32 = 20;
/// Pieces of calibration, one for some replicas of a pool; a fleet has fewer.
const PIECES_MAX: usize = 4096;

/// What was written.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Written {
    pub(super) bytes: u64,
    facts: u64,
    hold_s: f64,
}

impl Memory {
    /// Writes a snapshot at every interval, once when the process is asked to stop, and once when it has.
    pub async fn keep(self: Arc<Self>, stop: Stop, mut ended: watch::Receiver<bool>) {
        if self.config.path.is_none() {
            return;
        }
        let interval = seconds(self.config.interval_s);
        let mut due = Instant::now() + interval;
        let mut ages = tokio::time::interval(AGE_INTERVAL);
        ages.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut is_stopping = false;
        loop {
            tokio::select! {
                biased;
                _ = ended.wait_for(|ended| *ended) => break,
                () = stop.wait(), if !is_stopping => is_stopping = true,
                () = tokio::time::sleep_until(due) => {}
                _ = ages.tick() => {
                    self.tell_age();
                    continue;
                }
            }
            let began = Instant::now();
            self.write().await;
            due = began + interval.max(began.elapsed() * PAUSE_SHARE);
        }
        self.write().await;
    }

    /// Asks the router what it has learned while it still answers: when nothing is in flight, it ends with the signal.
    pub async fn prepare_to_stop(&self) {
        if self.config.path.is_none() {
            return;
        }
        let take = async {
            let view = self.parts.view.load_full();
            self.calibration(&mut *self.copying.lock().await, &view).await;
        };
        if tokio::time::timeout(PREPARE_TIMEOUT, take).await.is_err() {
            tracing::warn!("the router does not tell its calibration before the end; what it told last is kept");
        }
    }

    fn tell_age(&self) {
        if let Some(age_s) = self.report().age_s {
            self.parts.meter.set("warmfront_snapshot_age_seconds", &[], age_s);
        }
    }

    /// Writes the file anew; one that cannot be written leaves the old one where it is.
    async fn write(&self) {
        let Some(path) = self.config.path.as_deref().map(PathBuf::from) else { return };
        let began_s = self.parts.clock.now_s();
        match self.write_to(&path).await {
            Ok(written) => self.note_written(written, began_s),
            Err(error) => self.note_failure(&path, &error),
        }
    }

    async fn write_to(&self, path: &Path) -> io::Result<Written> {
        let place = path.to_owned();
        blocking(move || spare_foreign(&place)).await?;
        let beside = beside(path);
        let created = beside.clone();
        let file = blocking(move || create(&created)).await?;
        let result = async {
            let (file, written) = self.copy(file).await?;
            let (from, to) = (beside.clone(), path.to_owned());
            blocking(move || put(&file, &from, &to)).await?;
            Ok(written)
        };
        let result = result.await;
        if result.is_err() {
            let left = beside.clone();
            // The disk may be full: what was begun must not stay.
            blocking(move || std::fs::remove_file(left)).await.or_else(|error: io::Error| match error.kind() {
                io::ErrorKind::NotFound => Ok(()),
                _ => Err(error),
            })?;
        }
        result
    }

    /// Writes everything known now to a file, and seals it.
    pub(super) async fn copy(&self, file: File) -> io::Result<(File, Written)> {
        let mut kept = self.copying.lock().await;
        let view = self.parts.view.load_full();
        let head = Head {
            written_s: self.parts.clock.wall_s(),
            seed: self.parts.seed,
            software: env!("CARGO_PKG_VERSION").into(),
        };
        let mut writer = blocking(move || Writer::begin(BufWriter::new(file), &head)).await?;
        let mut written = Written::default();
        for pool in &view.pools {
            for replica in pool.occupied() {
                let Some(copied) = self.replica(pool, replica, &mut written).await else { continue };
                writer = blocking(move || copied.write(writer)).await?;
            }
        }
        self.calibration(&mut kept, &view).await;
        let pieces = kept.calibration.clone();
        let (file, bytes) = blocking(move || {
            for piece in &pieces {
                writer.calibration(piece)?;
            }
            let (buffer, bytes) = writer.end()?;
            Ok((buffer.into_inner().map_err(io::IntoInnerError::into_error)?, bytes))
        })
        .await?;
        Ok((file, Written { bytes, ..written }))
    }

    /// Copies one replica in pieces. `None` when it has left meanwhile, or there is nothing to tell.
    pub(super) async fn replica(&self, pool: &Pool, replica: &Replica, written: &mut Written) -> Option<Copied> {
        let index = pool.indexes.get(&replica.block_size)?;
        let clock = self.parts.clock;
        // Keeps this stream, and no other, waiting: position and facts are of one moment.
        let place = replica.place.lock().await;
        let mut copying = Copying::new(replica.slot, clock.now_s());
        loop {
            let began_s = clock.now_s();
            let goes_on = copying.step(index);
            written.hold_s = written.hold_s.max(clock.now_s() - began_s);
            if !goes_on {
                break;
            }
            tokio::task::yield_now().await;
        }
        let position = *place;
        drop(place);
        if !self.is_still_there(&pool.name, replica, index) {
            return None;
        }
        let head = head(pool, replica, index, position);
        Some(Copied { head, copying }).inspect(|copied| written.facts += copied.copying.facts() as u64)
    }

    /// The slot was not given to another replica, nor its facts to another index, while it was copied.
    fn is_still_there(&self, pool: &str, replica: &Replica, index: &Arc<Index>) -> bool {
        let view = self.parts.view.load();
        let Some(pool) = view.pool(pool) else { return false };
        let is_it = |now: &Arc<Replica>| Arc::ptr_eq(&now.events, &replica.events);
        pool.replica(replica.slot).is_some_and(is_it)
            && pool.index_of(replica.slot).is_some_and(|now| Arc::ptr_eq(now, index))
    }

    /// Asks the router what it has learned, a piece at a time, so that no decision waits for long. When it does not
    /// answer, what it said last stays.
    async fn calibration(&self, kept: &mut Kept, view: &FleetView) {
        let mut pieces = Vec::new();
        let mut next = Some(Bytes::new());
        while let Some(payload) = next.take() {
            let Some(answer) = (self.parts.calibrate)("memory", payload).await else {
                tracing::debug!(pools = view.pools.len(), "the router tells no calibration; the last one is kept");
                return;
            };
            let Ok(piece) = serde_json::from_slice::<Piece>(&answer) else {
                tracing::error!("the router's calibration cannot be read; the last one is kept");
                return;
            };
            pieces.push(answer);
            next = piece.next.map(Bytes::from).filter(|_| pieces.len() < PIECES_MAX);
        }
        kept.calibration = pieces;
    }

    fn note_written(&self, written: Written, began_s: f64) {
        let now_s = self.parts.clock.now_s();
        let write_s = now_s - began_s;
        let meter = &self.parts.meter;
        meter.set("warmfront_snapshot_age_seconds", &[], 0.0);
        meter.set("warmfront_snapshot_bytes", &[], written.bytes as f64);
        meter.set("warmfront_snapshot_write_seconds", &[], write_s);
        meter.set("warmfront_snapshot_hold_seconds", &[], written.hold_s);
        let mut report = self.report.lock();
        if report.failure.take().is_some() {
            tracing::info!("the snapshot can be written again");
        }
        report.written_s = Some(now_s);
        report.bytes = Some(written.bytes);
        report.facts = Some(written.facts);
        report.write_s = Some(write_s);
        report.hold_s = Some(written.hold_s);
    }

    fn note_failure(&self, path: &Path, error: &io::Error) {
        self.parts.meter.add("warmfront_snapshot_failures_total", &[failure(error)], 1);
        let reason = error.to_string();
        let mut report = self.report.lock();
        report.failures += 1;
        // The same trouble at every interval is said once.
        if report.failure.as_ref() != Some(&reason) {
            tracing::error!(path = %path.display(), "the snapshot cannot be written, the one before stays: {reason}");
            report.failure = Some(reason);
        }
    }
}

/// A piece of calibration, as far as we look at it.
#[derive(serde::Deserialize)]
struct Piece {
    /// What to ask for next.
    next: Option<String>,
}

/// A replica's facts on their way to the file.
pub(super) struct Copied {
    head: ReplicaHead,
    copying: Copying,
}

impl Copied {
    fn write<W: Write>(self, mut writer: Writer<W>) -> io::Result<Writer<W>> {
        let record = self.copying.finish();
        // Facts from events without a position could never be picked up.
        let record: SlotRecord = if self.head.position.is_some() { record } else { record.without_confirmed() };
        writer.replica(&self.head, &record)?;
        Ok(writer)
    }
}

fn head(pool: &Pool, replica: &Replica, index: &Index, position: Option<Position>) -> ReplicaHead {
    ReplicaHead {
        pool: pool.name.clone(),
        replica: replica.id.clone(),
        basis: basis(&pool.tokens).into(),
        block_size: index.options().block_size,
        lookahead: index.options().lookahead,
        has_events: replica.feed == Feed::Exact,
        incarnation: replica.update.incarnation,
        position,
    }
}

/// The reason of a failure as a label.
pub(super) fn failure(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => "disk_full",
        io::ErrorKind::AlreadyExists => "foreign",
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem | io::ErrorKind::NotFound => "unwritable",
        _ => "other",
    }
}

/// Where the file is written before it takes its place.
fn beside(path: &Path) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".part");
    path.with_file_name(name)
}

/// Fails when a file lies there that was never a snapshot: a path typed wrong must not cost what is kept under it.
fn spare_foreign(path: &Path) -> io::Result<()> {
    if !std::fs::metadata(path).is_ok_and(|found| found.is_file()) {
        return Ok(());
    }
    let mut start = Vec::new();
    File::open(path)?.take(MAGIC.len() as u64).read_to_end(&mut start)?;
    if MAGIC.starts_with(&start) {
        return Ok(()); // empty or torn at worst
    }
    let reason = "what lies there is not a snapshot of warmfront; move it away, or set another snapshot.path";
    Err(io::Error::new(io::ErrorKind::AlreadyExists, reason))
}

/// Only for its owner: hashes and addresses are nobody else's business.
fn create(path: &Path) -> io::Result<File> {
    OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(path)
}

/// Makes the file durable, then visible, then its name durable.
fn put(file: &File, from: &Path, to: &Path) -> io::Result<()> {
    file.sync_all()?;
    std::fs::rename(from, to)?;
    File::open(folder(to))?.sync_all()
}

/// Work on files, off the thread that takes events in.
pub(super) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    spawn_blocking(work).await.unwrap_or_else(|error| Err(io::Error::other(error)))
}
