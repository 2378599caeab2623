//! Memory with real indexes and real files.

use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::time::Duration;

use tokio::sync::watch;

use super::*;
use crate::block::SeqHash;
use crate::fleet::{EventState, Pool, Replica, ReplicaUpdate, Tokens};
use crate::http::Stop;
use crate::index::{Feed, Index, IndexOptions};
use crate::kv::sequence::Position;
use crate::kv::wire::{EngineHash, EventBatch, KvEvent, Stored};
use crate::meter::NoMeter;

const SEED: u64 = 5;
const TTL_S: f64 = 600.0;
const STARTED: u64 = 170_000_000_000;

fn options() -> IndexOptions {
    IndexOptions { seed: SEED, approximate_ttl_s: TTL_S, ..IndexOptions::default() }
}

/// One pool with a replica that publishes events and one that does not.
struct Process {
    index: Arc<Index>,
    exact: Arc<Replica>,
    silent: Arc<Replica>,
    memory: Arc<Memory>,
    clock: Clock,
}

const HASHES: [SeqHash; 3] = [SeqHash(11), SeqHash(12), SeqHash(13)];

impl Process {
    fn start(folder: &Path, incarnation: u64, config: impl FnOnce(&mut SnapshotConfig)) -> Self {
        let clock = Clock::start();
        let index = Arc::new(Index::new(options()));
        index.add_slot(0, Feed::Exact, None);
        index.add_slot(1, Feed::Approximate, None);
        let replica = |slot, id: &str, feed| {
            let update = ReplicaUpdate { id: id.into(), url: id.into(), incarnation, ..ReplicaUpdate::default() };
            Arc::new(Replica::new(slot, &update, 16, feed, EventState::default()))
        };
        let exact = replica(0, "http://exact:1", Feed::Exact);
        let silent = replica(1, "http://silent:1", Feed::Approximate);
        let pool = Pool {
            name: "m".into(),
            models: BTreeMap::new(),
            model_cards: vec![],
            tokens: Tokens::Exact,
            tokenizer: None,
            replicas: vec![Some(Arc::clone(&exact)), Some(Arc::clone(&silent))],
            block_sizes: vec![16],
            indexes: BTreeMap::from([(16, Arc::clone(&index))]),
        };
        let view = FleetView { pools: vec![Arc::new(pool)], ..FleetView::default() };
        let calibrate = |question: &'static str, _| -> Pin<Box<dyn Future<Output = Option<Bytes>> + Send>> {
            Box::pin(async move { (question == "memory").then(|| Bytes::from_static(b"{\"pool\":\"m\"}")) })
        };
        let parts = Parts {
            clock,
            meter: Arc::new(NoMeter),
            view: Arc::new(ArcSwap::from_pointee(view)),
            calibrate: Arc::new(calibrate),
            seed: SEED,
            approximate_ttl_s: TTL_S,
            spool: folder.to_owned(),
        };
        let path = folder.join("snapshot").display().to_string();
        let mut settings = SnapshotConfig { path: Some(path), ..SnapshotConfig::default() };
        config(&mut settings);
        Self { index, exact, silent, memory: Arc::new(Memory::new(settings, parts)), clock }
    }

    /// Lets both replicas hold the prompt: one by an event, one by a dispatch.
    async fn learn(&self) {
        let stored = Stored {
            block_hashes: vec![EngineHash(91), EngineHash(92)],
            token_ids: (0..32).collect(),
            block_size: 16,
            ..Stored::default()
        };
        let batch = EventBatch { events: vec![KvEvent::Stored(Box::new(stored))], ..EventBatch::default() };
        self.index.apply(0, &batch, self.clock.now_s());
        *self.exact.place.lock().await = Some(Position { last: 4, print: 9, base: 0, complete: true });
        self.index.dispatched(1, &HASHES, 1, self.clock.now_s());
        self.index.released(1);
    }

    /// Blocks that each slot holds of what was learned.
    fn held(&self) -> (u32, u32) {
        let tokens: Vec<u32> = (0..32).collect();
        let hashes = self.index.hasher().chain(&tokens, &crate::block::BlockExtras::default());
        let of = |hashes: &[SeqHash], slot: usize| self.index.overlap(hashes, self.clock.now_s()).device[slot];
        (of(&hashes, 0), of(&HASHES, 1))
    }

    fn wanted(&self, replica: &Replica) -> Wanted {
        Wanted {
            pool: "m".into(),
            replica: replica.id.clone(),
            slot: replica.slot,
            index: Arc::clone(&self.index),
            basis: "tokens",
            feed: replica.feed,
            incarnation: replica.update.incarnation,
            can_replay: true,
        }
    }

    /// Writes once, as at the end of a process.
    async fn end(&self) {
        let (_sender, ended) = watch::channel(true);
        Arc::clone(&self.memory).keep(Stop::default(), ended).await;
    }

    async fn recall(&self) -> [Option<Position>; 2] {
        self.memory.look().await;
        [recall(&self.memory, &self.wanted(&self.exact)).await, recall(&self.memory, &self.wanted(&self.silent)).await]
    }

    fn refused(&self) -> String {
        self.memory.report().restored.refused.join("; ")
    }
}

/// A folder with the snapshot of a process that had learned something.
async fn left_behind() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let first = Process::start(folder.path(), STARTED, |_| {});
    first.learn().await;
    assert_eq!(first.held(), (2, 3));
    first.end().await;
    folder
}

#[tokio::test]
async fn a_process_goes_on_with_what_the_one_before_knew() {
    let folder = left_behind().await;
    let second = Process::start(folder.path(), STARTED, |_| {});
    let position = Position { last: 4, print: 9, base: 0, complete: true };
    assert_eq!(second.recall().await, [Some(position), None]);
    assert_eq!(second.held(), (2, 3));
    let report = second.memory.report();
    assert_eq!((report.restored.replicas_restored, report.restored.facts), (2, 5));
    // Found again later, it has another history: once is all.
    assert_eq!(recall(&second.memory, &second.wanted(&second.exact)).await, None);
}

// bug 53
#[tokio::test]
async fn an_engine_that_is_another_process_by_its_start_time_is_not_believed_at_all() {
    let folder = left_behind().await;
    let second = Process::start(folder.path(), STARTED + 1, |_| {});
    assert_eq!(second.recall().await, [None, None]);
    assert_eq!(second.held(), (0, 0));
    assert!(second.refused().contains("has restarted since"), "{}", second.refused());
}

// bug 53
#[tokio::test]
async fn predictions_about_an_engine_that_cannot_be_told_apart_live_shortly() {
    let folder = left_behind().await;
    let second = Process::start(folder.path(), 0, |_| {});
    second.recall().await;
    let now_s = second.clock.now_s();
    let held = |later_s: f64| second.index.overlap(&HASHES, now_s + later_s).device[1];
    assert_eq!(held(second.memory.config.unverified_ttl_s - 5.0), 3);
    assert_eq!(held(second.memory.config.unverified_ttl_s + 1.0), 0);
}

#[tokio::test]
async fn a_stream_that_cannot_be_replayed_gives_no_facts_back() {
    let folder = left_behind().await;
    let second = Process::start(folder.path(), STARTED, |_| {});
    second.memory.look().await;
    let wanted = Wanted { can_replay: false, ..second.wanted(&second.exact) };
    assert_eq!(recall(&second.memory, &wanted).await, None);
    assert_eq!(second.held().0, 0);
}

#[tokio::test]
async fn blocks_of_another_shape_are_refused_and_the_reason_is_named() {
    let folder = left_behind().await;
    let second = Process::start(folder.path(), STARTED, |_| {});
    second.memory.look().await;
    let bytes = Wanted { basis: "bytes", ..second.wanted(&second.silent) };
    assert_eq!(recall(&second.memory, &bytes).await, None);
    let other = Arc::new(Index::new(IndexOptions { block_size: 32, ..options() }));
    let other = Wanted { index: other, ..second.wanted(&second.silent) };
    assert_eq!(recall(&second.memory, &other).await, None);
    assert!(second.refused().contains("tokens or bytes") && second.refused().contains("another size"));
    // It is still there for the replica when that turns out to be as it was.
    recall(&second.memory, &second.wanted(&second.silent)).await;
    assert_eq!(second.held().1, 3);
}

#[tokio::test]
async fn a_torn_old_or_foreign_file_never_stops_the_start_and_is_named() {
    let folder = left_behind().await;
    let path = folder.path().join("snapshot");
    let whole = std::fs::read(&path).unwrap();
    std::fs::write(&path, &whole[..whole.len() - 1]).unwrap();
    let torn = Process::start(folder.path(), STARTED, |_| {});
    assert_eq!(torn.recall().await, [None, None]);
    assert!(torn.refused().contains("torn"), "{}", torn.refused());
    std::fs::write(&path, b"something else").unwrap();
    let foreign = Process::start(folder.path(), STARTED, |_| {});
    assert_eq!(foreign.recall().await, [None, None]);
    assert!(foreign.refused().contains("not a snapshot"));
    std::fs::write(&path, &whole).unwrap();
    let old = Process::start(folder.path(), STARTED, |config| config.max_age_s = 0.0);
    assert_eq!(old.recall().await, [None, None]);
    assert!(old.refused().contains("snapshot.max_age_s"));
    let none = Process::start(tempfile::tempdir().unwrap().path(), STARTED, |_| {});
    assert_eq!(none.recall().await, [None, None]);
    assert_eq!(none.refused(), "", "a first start is no failure");
}

#[tokio::test]
async fn a_file_that_is_no_snapshot_is_never_written_over() {
    let folder = left_behind().await;
    let path = folder.path().join("snapshot");
    let ours = std::fs::read(&path).unwrap();
    std::fs::write(&path, b"[Interface]\nPrivateKey = \n").unwrap();
    let second = Process::start(folder.path(), STARTED, |_| {});
    second.end().await;
    assert!(second.memory.report().failure.unwrap().contains("not a snapshot of warmfront"));
    assert_eq!(std::fs::read(&path).unwrap(), b"[Interface]\nPrivateKey = \n");
    for mine in [&b""[..], &ours[..5], &ours[..ours.len() - 1]] {
        std::fs::write(&path, mine).unwrap();
        second.end().await;
        assert!(second.memory.report().failure.is_none(), "{} bytes of a snapshot", mine.len());
    }
}

#[tokio::test]
async fn a_file_that_cannot_be_written_leaves_the_old_one_and_is_counted() {
    let folder = left_behind().await;
    let path = folder.path().join("snapshot");
    let before = std::fs::read(&path).unwrap();
    let second = Process::start(folder.path(), STARTED, |_| {});
    std::fs::create_dir(folder.path().join("snapshot.part")).unwrap();
    second.end().await;
    second.end().await;
    let report = second.memory.report();
    assert_eq!(report.failures, 2);
    assert!(report.failure.is_some() && report.age_s.is_none());
    assert_eq!(std::fs::read(&path).unwrap(), before);
    std::fs::remove_dir(folder.path().join("snapshot.part")).unwrap();
    second.end().await;
    assert!(second.memory.report().failure.is_none());
}

#[tokio::test]
async fn a_full_disk_is_an_error_of_its_own() {
    let folder = tempfile::tempdir().unwrap();
    let process = Process::start(folder.path(), STARTED, |_| {});
    process.learn().await;
    let full = OpenOptions::new().write(true).open("/dev/full").unwrap();
    let error = process.memory.copy(full).await.unwrap_err();
    assert_eq!(keep::failure(&error), "disk_full");
}

#[tokio::test]
async fn without_a_path_nothing_is_written() {
    let folder = tempfile::tempdir().unwrap();
    let process = Process::start(folder.path(), STARTED, |config| config.path = None);
    process.learn().await;
    process.end().await;
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[tokio::test]
async fn a_snapshot_is_written_when_the_process_is_asked_to_stop_and_before_it_has() {
    let folder = tempfile::tempdir().unwrap();
    let process = Process::start(folder.path(), STARTED, |_| {});
    let (ended_sender, ended) = watch::channel(false);
    let stop = Stop::default();
    let keeper = tokio::spawn(Arc::clone(&process.memory).keep(stop.clone(), ended));
    stop.set();
    while process.memory.report().bytes.is_none() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let small = process.memory.report().bytes;
    process.learn().await; // by answers that still run
    ended_sender.send_replace(true);
    keeper.await.unwrap();
    assert!(process.memory.report().bytes > small);
}

#[tokio::test]
async fn a_slot_that_is_given_away_while_it_is_copied_is_left_out() {
    let folder = left_behind().await;
    let process = Process::start(folder.path(), STARTED, |_| {});
    process.learn().await;
    let view = process.memory.parts.view.load_full();
    let mut pool = Pool { replicas: vec![], ..copy_of(&view.pools[0]) };
    pool.replicas = vec![None, Some(Arc::clone(&process.silent))];
    process.memory.parts.view.store(Arc::new(FleetView { pools: vec![Arc::new(pool)], ..FleetView::default() }));
    let mut written = keep::Written::default();
    assert!(process.memory.replica(&view.pools[0], &process.exact, &mut written).await.is_none());
    assert!(process.memory.replica(&view.pools[0], &process.silent, &mut written).await.is_some());
}

fn copy_of(pool: &Pool) -> Pool {
    Pool {
        name: pool.name.clone(),
        models: pool.models.clone(),
        model_cards: vec![],
        tokens: pool.tokens.clone(),
        tokenizer: None,
        replicas: pool.replicas.clone(),
        block_sizes: pool.block_sizes.clone(),
        indexes: pool.indexes.clone(),
    }
}

#[tokio::test]
async fn another_router_gets_the_snapshot_in_chunks_and_can_read_it() {
    let folder = tempfile::tempdir().unwrap();
    let process = Process::start(folder.path(), STARTED, |config| config.path = None);
    process.learn().await;
    let ask = async |payload: serde_json::Value| process.memory.answer(payload.to_string().as_bytes()).await;
    let (status, opened) = ask(serde_json::json!({"open": true})).await;
    assert_eq!(status, 200);
    let opened: serde_json::Value = serde_json::from_slice(&opened).unwrap();
    let mut bytes = Vec::new();
    while (bytes.len() as u64) < opened["bytes"].as_u64().unwrap() {
        let (status, chunk) = ask(serde_json::json!({"export": opened["export"], "offset": bytes.len()})).await;
        assert_eq!(status, 200);
        bytes.extend_from_slice(&chunk);
    }
    let path = folder.path().join("seed");
    std::fs::write(&path, &bytes).unwrap();
    let archive = Archive::open(std::fs::File::open(path).unwrap()).unwrap();
    assert_eq!(archive.replicas.len(), 2);
    assert_eq!(archive.calibration, [b"{\"pool\":\"m\"}"]);
    assert_eq!(ask(serde_json::json!({"open": true})).await.0, 200);
    assert_eq!(ask(serde_json::json!({"open": true})).await.0, 503, "exports are bounded");
    assert_eq!(ask(serde_json::json!({"export": opened["export"], "close": true})).await.0, 200);
    assert_eq!(ask(serde_json::json!({"export": opened["export"], "offset": 0})).await.0, 404);
    assert_eq!(ask(serde_json::json!({"open": true})).await.0, 200);
    assert_eq!(process.memory.answer(b"nonsense").await.0, 400);
    assert_eq!(process.memory.answer(b"").await.0, 200);
}

#[tokio::test]
async fn a_copy_waits_for_the_message_that_is_being_applied() {
    let folder = tempfile::tempdir().unwrap();
    let process = Process::start(folder.path(), STARTED, |_| {});
    process.learn().await;
    let applying = process.exact.place.lock().await;
    let (_sender, ended) = watch::channel(true);
    let copy = tokio::spawn(Arc::clone(&process.memory).keep(Stop::default(), ended));
    // The copy is under way once it holds its own lock, and cannot be done before the message is.
    while process.memory.copying.try_lock().is_ok() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    assert!(process.memory.report().bytes.is_none());
    drop(applying);
    copy.await.unwrap();
    assert!(process.memory.report().bytes.is_some());
}
