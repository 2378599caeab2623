//! What outlives this process: facts, stream positions and calibration, in a file or handed to another router.
//!
//! [`Memory::keep`] writes a snapshot now and then, when the process is asked to stop and when it has; [`recall`] gives a
//! replica its facts back when its server is found again. Copies are taken replica by replica in bounded pieces, so that
//! nobody waits for the whole; each replica's facts and position are of one moment, different replicas' need not be.
//!
//! What one would get wrong: a file proves nothing about engines. Restored facts are believed only until the event stream
//! answers, and for a short time where there is none; see `kv/sequence.rs` and [`recall`].

mod export;
mod format;
mod keep;
mod recall;
mod seed;

use std::collections::HashSet;
use std::future::Future;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;

use arc_swap::ArcSwap;
use bytes::Bytes;
use parking_lot::Mutex;
use serde::Serialize;
use tokio::sync::watch;

use crate::clock::Clock;
use crate::config::SnapshotConfig;
use crate::fleet::FleetView;
use crate::meter::Meter;
use export::Exports;
pub use format::{Archive, Head, Refused, ReplicaHead, VERSION};
pub use recall::{Wanted, basis, recall};

/// Asks the router something about its calibration: question, payload. `None`: it does not answer.
pub type Calibrate = dyn Fn(&'static str, Bytes) -> Pin<Box<dyn Future<Output = Option<Bytes>> + Send>> + Send + Sync;

/// The parts of the process that memory works with.
pub struct Parts {
    pub clock: Clock,
    pub meter: Arc<dyn Meter>,
    pub view: Arc<ArcSwap<FleetView>>,
    pub calibrate: Arc<Calibrate>,
    /// Seed of the sequence hashes.
    pub seed: u64,
    /// Life of a prediction without events.
    pub approximate_ttl_s: f64,
    /// For files that live no longer than this process.
    pub spool: PathBuf,
}

/// See the module's text.
pub struct Memory {
    config: SnapshotConfig,
    parts: Parts,
    /// What a former process knew; `None` while that is not known yet.
    archive: watch::Sender<Option<Found>>,
    /// Replicas that have their facts back, by pool and id.
    recalled: Mutex<HashSet<(String, String)>>,
    exports: Exports,
    /// Held while a copy is taken: one at a time.
    copying: tokio::sync::Mutex<Kept>,
    report: Mutex<Report>,
}

/// What came of looking for a snapshot.
type Found = Option<Arc<Recalled>>;

/// An archive and its place on our clock.
pub(crate) struct Recalled {
    archive: Archive,
    /// When it was made; negative: before this process began.
    copied_s: f64,
}

/// What is carried from one copy to the next.
#[derive(Default)]
struct Kept {
    /// Pieces of calibration that the router gave last: it has ended when the last copy is taken.
    calibration: Vec<Bytes>,
}

/// What the admin API shows.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Report {
    pub path: Option<String>,
    /// Seconds since the last file was written by this process.
    pub age_s: Option<f64>,
    #[serde(skip)]
    written_s: Option<f64>,
    pub bytes: Option<u64>,
    pub facts: Option<u64>,
    /// From the first piece copied to the file in place.
    pub write_s: Option<f64>,
    /// Longest time for which a lock was held.
    pub hold_s: Option<f64>,
    /// Why the last attempt to write failed.
    pub failure: Option<String>,
    pub failures: u64,
    pub restored: RestoredReport,
}

/// What became of the snapshot that was there at the start.
#[derive(Clone, Debug, Default, Serialize)]
pub struct RestoredReport {
    /// `file`, or the peer it came from; `None`: nothing was restored.
    pub from: Option<String>,
    /// Its age at the start.
    pub age_s: Option<f64>,
    /// Replicas in it.
    pub replicas: usize,
    /// Replicas that have their facts back.
    pub replicas_restored: usize,
    pub facts: u64,
    /// Files, peers and replicas that were refused, and why.
    pub refused: Vec<String>,
}

/// Refusals that are shown; more are counted by the metric.
const REFUSED_MAX: usize = 32;

impl Memory {
    pub fn new(config: SnapshotConfig, parts: Parts) -> Self {
        let report = Report { path: config.path.clone(), ..Report::default() };
        Self {
            config,
            parts,
            archive: watch::Sender::new(None),
            recalled: Mutex::default(),
            exports: Exports::default(),
            copying: tokio::sync::Mutex::default(),
            report: Mutex::new(report),
        }
    }

    /// A memory without file and without a former process.
    pub fn none(parts: Parts) -> Self {
        let memory = Self::new(SnapshotConfig::default(), parts);
        memory.archive.send_replace(Some(None));
        memory
    }

    /// What the admin API shows.
    pub fn report(&self) -> Report {
        let mut report = self.report.lock().clone();
        report.age_s = report.written_s.map(|written_s| self.parts.clock.now_s() - written_s);
        report
    }

    /// Looks for what a former process, or another router, knew. Serving does not wait for it; replicas do, for as long
    /// as `snapshot.seed_timeout_s` at most.
    pub async fn look(&self) {
        let found = self.find().await;
        if let Some(recalled) = &found {
            let mut report = self.report.lock();
            report.restored.age_s = Some(-recalled.copied_s);
            report.restored.replicas = recalled.archive.replicas.len();
        }
        self.archive.send_replace(Some(found.clone()));
        let Some(recalled) = found else { return };
        for piece in &recalled.archive.calibration {
            if (self.parts.calibrate)("remember", Bytes::from(piece.clone())).await.is_none() {
                self.refuse("calibration", "the router does not take the calibration");
                return;
            }
        }
    }

    async fn find(&self) -> Found {
        let own = match self.config.path.clone() {
            Some(path) => self.open(PathBuf::from(path)).await,
            None => None,
        };
        // A file of the last minutes says more about our own dispatches than a peer does.
        let is_fresh = own.as_ref().is_some_and(|own| self.parts.clock.now_s() - own.copied_s <= self.fresh_s());
        if let Some(peer) = self.config.seed_from.clone().filter(|_| !is_fresh)
            && let Some(seeded) = self.seed(&peer).await
            && own.as_ref().is_none_or(|own| own.copied_s <= seeded.copied_s)
        {
            self.report.lock().restored.from = Some(peer);
            return Some(Arc::new(seeded));
        }
        let own = own?;
        self.report.lock().restored.from = Some("file".into());
        Some(Arc::new(own))
    }

    /// Age up to which an own file is preferred to a peer.
    fn fresh_s(&self) -> f64 {
        2.0 * self.config.interval_s
    }

    async fn open(&self, path: PathBuf) -> Option<Recalled> {
        let at = path.clone();
        let opened = tokio::task::spawn_blocking(move || Archive::open(std::fs::File::open(at)?)).await;
        let result = opened.unwrap_or_else(|error| Err(Refused::Torn(format!("reading it failed: {error}"))));
        match result {
            Err(Refused::Unreadable(error)) if error.kind() == std::io::ErrorKind::NotFound => {
                tracing::info!(path = %path.display(), "no snapshot yet");
                None
            }
            result => self.accept(&path.display().to_string(), result),
        }
    }

    /// Takes an archive that fits this process; says what is wrong with any other.
    fn accept(&self, name: &str, result: Result<Archive, Refused>) -> Option<Recalled> {
        match result.and_then(|archive| self.fitting(archive)) {
            Ok(recalled) => {
                let (replicas, age_s) = (recalled.archive.replicas.len(), -recalled.copied_s);
                tracing::info!(snapshot = name, replicas, age_s, "snapshot found");
                Some(recalled)
            }
            Err(refused) => {
                tracing::warn!(snapshot = name, reason = refused.label(), "the snapshot is not used: {refused}");
                self.refuse(refused.label(), &format!("{name}: {refused}"));
                None
            }
        }
    }

    fn fitting(&self, archive: Archive) -> Result<Recalled, Refused> {
        let (ours, theirs) = (self.parts.seed, archive.head.seed);
        if ours != theirs {
            return Err(Refused::Seed { ours, theirs });
        }
        // A wall clock that was set back makes it younger than it is; streams and short lives bound what that can do.
        let age_s = (self.parts.clock.wall_s() - archive.head.written_s).max(0.0);
        if !age_s.is_finite() || age_s > self.config.max_age_s {
            return Err(Refused::Old { age_s });
        }
        Ok(Recalled { archive, copied_s: self.parts.clock.now_s() - age_s })
    }

    fn refuse(&self, label: &str, words: &str) {
        self.parts.meter.add("warmfront_snapshot_refusals_total", &[label], 1);
        let mut report = self.report.lock();
        if report.restored.refused.len() < REFUSED_MAX {
            report.restored.refused.push(words.to_owned());
        }
    }
}

/// The folder of a file.
fn folder(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

#[cfg(test)]
mod tests;
