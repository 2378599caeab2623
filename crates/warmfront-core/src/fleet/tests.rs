//! The supervisor with real indexes and sockets that nobody serves.

use std::path::Path;
use std::sync::{Arc, Barrier};
use std::time::Duration;

use arc_swap::ArcSwap;
use tokio::sync::{Notify, watch};

use super::*;
use crate::block::SeqHash;
use crate::clock::Clock;
use crate::config::{IndexConfig, KvConfig};
use crate::memory::{Memory, Parts};
use crate::meter::NoMeter;
use crate::tokenize::SegmentCache;

const DEADLINE: Duration = Duration::from_secs(10);

struct Bench {
    updates: watch::Sender<FleetUpdate>,
    states: watch::Receiver<FleetState>,
    view: Arc<ArcSwap<FleetView>>,
    /// Holds up whoever reads the tokenizer `/slow`.
    gate: Arc<Barrier>,
}

fn parts() -> Parts {
    Parts {
        clock: Clock::start(),
        meter: Arc::new(NoMeter),
        view: Arc::new(ArcSwap::from_pointee(FleetView::default())),
        calibrate: Arc::new(|_, _| Box::pin(async { None })),
        seed: 0,
        approximate_ttl_s: 600.0,
        spool: std::env::temp_dir(),
    }
}

fn bench() -> Bench {
    let means = Means {
        clock: Clock::start(),
        index: IndexConfig {
            facts_max: 1000,
            seed: 0,
            predicted_ttl_s: 10.0,
            approximate_ttl_s: 600.0,
            block_size_default: 16,
            segment_cache_bytes: 0,
        },
        kv: KvConfig {
            message_bytes_max: 1 << 20,
            replay_timeout_s: 1.0,
            replay_check_interval_s: 1.0,
            reconnect_delay_s: 0.05,
            reconnect_delay_s_max: 0.1,
            unknown_parents_max: 64,
        },
        meter: Arc::new(NoMeter),
        segments: Arc::new(SegmentCache::new(0)),
        changed: Arc::new(Notify::new()),
        memory: Arc::new(Memory::none(parts())),
    };
    let view = Arc::new(ArcSwap::from_pointee(FleetView::default()));
    let (sender, states) = watch::channel(FleetState::default());
    let gate = Arc::new(Barrier::new(2));
    let reader = Arc::clone(&gate);
    let load = move |path: &Path, _: &_| {
        if path == Path::new("/slow") {
            reader.wait();
        }
        Err(format!("{} is not there", path.display()))
    };
    let tell = Box::new(move |state: &FleetState| drop(sender.send_replace(state.clone())));
    let (updates, receiver) = watch::channel(FleetUpdate::default());
    tokio::spawn(Fleet::new(means, Arc::clone(&view), Arc::new(load), tell).run(receiver));
    Bench { updates, states, view, gate }
}

impl Bench {
    async fn send(&mut self, version: u64, tokenizer: Option<&str>, replicas: Vec<ReplicaUpdate>) -> PoolState {
        let models = [("m".to_owned(), None)].into();
        let pool = PoolUpdate {
            name: "m".into(),
            models,
            tokenizer: tokenizer.map(Into::into),
            replicas,
            ..PoolUpdate::default()
        };
        self.updates.send_replace(FleetUpdate { version, pools: vec![pool], ..FleetUpdate::default() });
        self.state(|state| state.version == version).await.pools.remove(0)
    }

    async fn state(&mut self, condition: impl Fn(&FleetState) -> bool) -> FleetState {
        let found = tokio::time::timeout(DEADLINE, self.states.wait_for(condition)).await;
        found.expect("the state in time").expect("the fleet runs").clone()
    }
}

fn replica(id: &str) -> ReplicaUpdate {
    ReplicaUpdate { id: id.into(), url: format!("http://{id}"), ready: true, ..ReplicaUpdate::default() }
}

fn slots(pool: &PoolState) -> Vec<(Slot, &str)> {
    pool.replicas.iter().map(|row| (row.slot, row.replica.id.as_str())).collect()
}

#[tokio::test]
async fn a_replica_keeps_its_slot_and_a_freed_one_is_given_again() {
    let mut bench = bench();
    let pool = bench.send(1, None, vec![replica("a"), replica("b"), replica("c")]).await;
    assert_eq!(slots(&pool), [(0, "a"), (1, "b"), (2, "c")]);
    let pool = bench.send(2, None, vec![replica("c"), replica("a")]).await;
    assert_eq!(slots(&pool), [(0, "a"), (2, "c")]);
    let pool = bench.send(3, None, vec![replica("d"), replica("c"), replica("a")]).await;
    assert_eq!(slots(&pool), [(0, "a"), (1, "d"), (2, "c")]);
}

// bug 53
#[tokio::test]
async fn another_incarnation_loses_its_facts_and_other_changes_keep_them() {
    let mut bench = bench();
    bench.send(1, None, vec![replica("a")]).await;
    let index = Arc::clone(&bench.view.load().pools[0].indexes[&16]);
    index.dispatched(1, &[SeqHash(7)], 0, 0.0);
    let busy = ReplicaUpdate { ready: false, ..replica("a") };
    bench.send(2, None, vec![busy.clone()]).await;
    assert_eq!(index.stats().predicted_facts, 1);
    assert!(!bench.view.load().pools[0].replica(0).unwrap().ready);
    bench.send(3, None, vec![ReplicaUpdate { incarnation: 1, ..busy }]).await;
    assert_eq!(index.stats().predicted_facts, 0);
}

// bug 135
#[tokio::test]
async fn a_tokenizer_that_cannot_be_read_makes_the_pool_approximate_and_says_why() {
    let mut bench = bench();
    bench.send(1, Some("/nowhere"), vec![replica("a")]).await;
    let state = bench.state(|state| state.pools[0].tokens == "approximate").await;
    let reason = state.pools[0].tokens_reason.clone().unwrap();
    assert_eq!(reason, "the tokenizer cannot be used: /nowhere is not there");
}

// bug 51
#[tokio::test]
async fn block_sizes_have_an_index_each_and_go_with_their_last_replica() {
    let mut bench = bench();
    let events = EventSource { endpoint: "ipc:///nowhere".into(), ..EventSource::default() };
    let exact = |id: &str, block_size| ReplicaUpdate {
        block_size: Some(block_size),
        events: Some(events.clone()),
        capacity_tokens: Some(6400),
        ..replica(id)
    };
    bench.send(1, Some("/slow"), vec![exact("a", 32), exact("b", 64), exact("c", 64)]).await;
    assert_eq!(bench.view.load().pools[0].tokens, Tokens::Loading);
    assert_eq!(bench.view.load().pools[0].block_sizes, [64, 32]);
    bench.gate.wait();
    bench.state(|state| state.pools[0].tokens == "approximate").await;
    assert_eq!(bench.view.load().pools[0].block_sizes, [16], "bytes have one index");
}
