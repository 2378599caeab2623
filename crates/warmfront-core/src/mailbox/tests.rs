//! The queues: bounds, waking, time, and the guard's promise of exactly one end.

use std::collections::BTreeMap;
use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Waker};
use std::thread;
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use bytes::Bytes;
use futures_util::FutureExt as _;
use serde_json::Value;

use super::queue::PATIENT_EVENTS_MAX;
use super::{Basis, Decision, Event, Failure, Full, InFlight, Mailbox, Outcome, Received, RequestFacts, Route};
use crate::block::{BlockExtras, SeqHash};
use crate::clock::Clock;
use crate::config::{MetricConfig, MetricKind, QueueConfig};
use crate::error::FLEET_SATURATED;
use crate::fleet::{FleetView, Pool, Replica, ReplicaUpdate, Tokens};
use crate::index::{Feed, Index, IndexOptions};
use crate::metrics::Metrics;
use crate::requests::{Prompt, RequestTable};

const LONG: Duration = Duration::from_secs(20);
const SHORT: Duration = Duration::from_millis(1);
/// An event that the router hears of at once.
const STOPPING: Event = Event::Stopping { time_s: 0.0, grace_s: 0.0 };

fn mailbox(events_max: usize, tick_interval_s: f64) -> Arc<Mailbox> {
    let family = |(name, kind): (&str, MetricKind)| MetricConfig {
        name: name.to_owned(),
        kind,
        help: String::new(),
        labels: vec![],
        buckets: vec![1.0],
    };
    let catalogue = [
        ("warmfront_event_queue_depth", MetricKind::Gauge),
        ("warmfront_command_queue_depth", MetricKind::Gauge),
        ("warmfront_decision_duration_seconds", MetricKind::Histogram),
    ]
    .map(family);
    let limits = QueueConfig { events_max, commands_max: 2, batch_max: 4, tick_interval_s };
    Arc::new(Mailbox::new(Clock::start(), limits, &Metrics::new(&catalogue, 10)))
}

fn facts(id: u64) -> RequestFacts {
    RequestFacts {
        id,
        time_s: 0.0,
        pool: "p".into(),
        model: "m".into(),
        adapter: None,
        flow: "default".into(),
        priority: 0,
        route: Route::Load,
        basis: Basis::None,
        prompt_tokens: 0,
        blocks: 0,
        turn: 0,
        output_tokens_max: None,
        affinity_key: None,
        prefix_key: 0,
        stream: false,
        fallback: None,
        deadline_s: None,
    }
}

fn table() -> Arc<RequestTable> {
    Arc::new(RequestTable::new(Arc::default(), Clock::start()))
}

fn enter(mailbox: &Arc<Mailbox>, table: &Arc<RequestTable>) -> InFlight {
    InFlight::enter(mailbox, table, facts(mailbox.next_id()), Arc::new(Prompt::default())).unwrap()
}

/// A table over one pool `p` with one replica, and the replica's index.
fn table_with_index() -> (Arc<RequestTable>, Arc<Index>) {
    let index = Arc::new(Index::new(IndexOptions::default()));
    index.add_slot(0, Feed::Approximate, None);
    let replica = Replica {
        slot: 0,
        id: "a".into(),
        authority: String::new(),
        rank: None,
        headers: http::HeaderMap::new(),
        ready: true,
        block_size: 16,
        feed: Feed::Approximate,
        events: Arc::default(),
        place: Arc::default(),
        update: ReplicaUpdate::default(),
    };
    let pool = Pool {
        name: "p".into(),
        models: BTreeMap::new(),
        model_cards: vec![],
        tokens: Tokens::Exact,
        tokenizer: None,
        replicas: vec![Some(Arc::new(replica))],
        block_sizes: vec![16],
        indexes: BTreeMap::from([(16, Arc::clone(&index))]),
    };
    let view = FleetView { pools: vec![Arc::new(pool)], ..FleetView::default() };
    (Arc::new(RequestTable::new(Arc::new(ArcSwap::from_pointee(view)), Clock::start())), index)
}

#[test]
fn what_an_engine_refused_is_not_predicted_to_be_there() {
    let finished = |status| Outcome::Finished { slot: 0, status, usage: None, chunks: 0 };
    for (status, held) in [(200, 4), (399, 4), (400, 0), (503, 0)] {
        assert_eq!(held_after(|flight| flight.ends(finished(status))), held, "status {status}");
    }
}

#[test]
fn what_no_engine_has_answered_is_predicted_nowhere_and_what_broke_off_stays() {
    for is_last in [false, true] {
        let unanswered = |flight: &mut InFlight| flight.unanswered(Failure::default(), vec![0], is_last);
        assert_eq!(held_after(unanswered), 0, "the last attempt: {is_last}");
    }
    assert_eq!(held_after(|flight| flight.ends(Outcome::Failed { failure: Failure::default(), tried: vec![0] })), 4);
}

/// Blocks of a prompt of four that its engine is said to hold after a request for it has ended so.
fn held_after(end: impl FnOnce(&mut InFlight)) -> u32 {
    let mailbox = mailbox(10, 0.0);
    let (table, index) = table_with_index();
    let hashes: Arc<[SeqHash]> = index.hasher().chain(&[7; 64], &BlockExtras::default()).into();
    let prompt = Prompt { pool: "p".into(), hashes: vec![(16, Arc::clone(&hashes))], ..Prompt::default() };
    let id = mailbox.next_id();
    let mut flight = InFlight::enter(&mailbox, &table, facts(id), Arc::new(prompt)).unwrap();
    table.dispatched(id, 0).unwrap();
    end(&mut flight);
    drop(flight);
    let overlap = index.overlap(&hashes, 0.0);
    assert_eq!(overlap.active, [0]);
    overlap.device[0]
}

fn received(mailbox: &Mailbox, wait: Duration) -> Vec<Vec<Value>> {
    match mailbox.receive(wait) {
        Received::Events(bytes) => rmp_serde::from_slice(&bytes).unwrap(),
        Received::Nothing | Received::Closed => vec![],
    }
}

fn tags(events: &[Vec<Value>]) -> Vec<&str> {
    events.iter().map(|event| event[0].as_str().unwrap()).collect()
}

fn dispatch(mailbox: &Mailbox, id: u64) {
    mailbox.command(&rmp_serde::to_vec(&[("dispatch", id, [(0, 0, None::<u32>)], "")]).unwrap()).unwrap();
}

fn shed(mailbox: &Mailbox, id: u64) {
    mailbox.command(&rmp_serde::to_vec(&[("shed", id, "fleet_saturated", None::<f64>)]).unwrap()).unwrap();
}

#[test]
fn arrivals_are_bounded_and_ends_are_always_taken() {
    let (mailbox, table) = (mailbox(2, 100.0), table());
    let _flights = [enter(&mailbox, &table), enter(&mailbox, &table)];
    let refused = InFlight::enter(&mailbox, &table, facts(9), Arc::default());
    assert_eq!(refused.unwrap_err(), Full);
    assert_eq!((table.len(), mailbox.undecided()), (2, 2), "nothing of the refused one is kept");
    mailbox.push(Event::Cancelled { id: 1, time_s: 0.0 });
    assert_eq!(mailbox.depth(), 3);
}

#[test]
fn a_batch_is_bounded_and_keeps_the_order() {
    let mailbox = mailbox(10, 100.0);
    for id in 0..6 {
        mailbox.push(Event::Cancelled { id, time_s: 0.0 });
    }
    let ids = |events: Vec<Vec<Value>>| events.iter().map(|event| event[1].as_u64().unwrap()).collect::<Vec<_>>();
    assert_eq!(ids(received(&mailbox, LONG)), [0, 1, 2, 3]);
    assert_eq!(ids(received(&mailbox, LONG)), [4, 5]);
    assert_eq!(mailbox.receive(SHORT), Received::Nothing);
}

#[test]
fn a_push_wakes_the_receiver() {
    let mailbox = mailbox(10, 100.0);
    let receiver = Arc::clone(&mailbox);
    let started = Instant::now();
    let thread = thread::spawn(move || received(&receiver, LONG));
    mailbox.push(STOPPING);
    assert_eq!(thread.join().unwrap().len(), 1);
    assert!(started.elapsed() < LONG / 2);
}

fn carried(mailbox: &Arc<Mailbox>) -> tokio::task::JoinHandle<()> {
    let mailbox = Arc::clone(mailbox);
    tokio::spawn(async move { mailbox.carry().await })
}

/// What a carrier does is seen from its own thread: nothing happens before its turn, and then everything at once.
#[tokio::test]
async fn a_carrier_hands_a_batch_of_decisions_over_in_its_turn() {
    let (mailbox, table) = (mailbox(10, 100.0), table());
    let carrier = carried(&mailbox);
    tokio::task::yield_now().await;
    let mut flights = [enter(&mailbox, &table), enter(&mailbox, &table)];
    for flight in &flights {
        dispatch(&mailbox, flight.id());
    }
    assert_eq!(mailbox.undecided(), 0);
    for flight in &mut flights {
        assert_eq!(flight.decision().now_or_never(), None, "the carrier has not had its turn");
    }
    tokio::task::yield_now().await;
    for flight in &mut flights {
        assert!(matches!(flight.decision().now_or_never(), Some(Some(Decision::Dispatch { .. }))));
    }
    carrier.abort();
    assert!(carrier.await.unwrap_err().is_cancelled());
}

#[tokio::test]
async fn a_carrier_wakes_the_receiver() {
    let mailbox = mailbox(10, 100.0);
    let carrier = carried(&mailbox);
    let receiver = Arc::clone(&mailbox);
    let waiting = tokio::task::spawn_blocking(move || (received(&receiver, LONG), Instant::now()));
    tokio::task::yield_now().await;
    let pushed = Instant::now();
    mailbox.push(STOPPING);
    let (events, at) = waiting.await.unwrap();
    assert_eq!(tags(&events), ["stopping"]);
    assert!(at.duration_since(pushed) < LONG / 2);
    carrier.abort();
}

fn finished(id: u64) -> Event {
    Event::Finished { id, time_s: 0.0, slot: 0, status: 200, usage: None, chunks: 0 }
}

/// Whether an event has a sleeping receiver woken: seen from the errand, which nobody runs here.
fn rings(event: Event, is_somebody_waiting: bool, lying: usize) -> bool {
    let mailbox = mailbox(100, 100.0);
    let _decision = is_somebody_waiting.then(|| mailbox.wait_for_decision(7).unwrap());
    let mut carrier = pin!(mailbox.carry());
    assert!(carrier.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    let receiver = Arc::clone(&mailbox);
    let thread = thread::spawn(move || receiver.receive(LONG));
    let start = Instant::now();
    while !mailbox.is_asleep() {
        assert!(start.elapsed() < LONG, "the receiver does not sleep");
        thread::yield_now();
    }
    (0..lying as u64).for_each(|id| mailbox.push(finished(id)));
    mailbox.push(event);
    let rings = mailbox.has_errand();
    mailbox.close();
    thread.join().unwrap();
    rings
}

#[test]
fn how_decided_requests_fare_wakes_the_receiver_only_while_others_wait() {
    for event in
        [finished(1), Event::FirstToken { id: 1, time_s: 0.0, slot: 0 }, Event::Cancelled { id: 1, time_s: 0.0 }]
    {
        assert!(!rings(event.clone(), false, 0), "{event:?}");
        assert!(rings(event.clone(), true, 0), "{event:?} while a request waits");
    }
    assert!(rings(STOPPING, false, 0));
    assert!(!rings(finished(1), false, PATIENT_EVENTS_MAX - 1));
    assert!(rings(finished(1), false, PATIENT_EVENTS_MAX), "a crowd");
}

/// Not only with what comes next, but also with the next tick.
#[test]
fn what_wakes_nobody_is_received_all_the_same() {
    let mailbox = mailbox(10, 0.001);
    let receiver = Arc::clone(&mailbox);
    let thread = thread::spawn(move || {
        let deadline = Instant::now() + LONG;
        let mut events = vec![];
        while events.is_empty() && Instant::now() < deadline {
            events = received(&receiver, LONG);
        }
        events
    });
    mailbox.push(finished(1));
    assert_eq!(tags(&thread.join().unwrap()), ["finished"]);
}

/// The end of the front's runtime drops the carrier with whatever it still had to carry.
#[tokio::test]
async fn what_a_carrier_leaves_behind_arrives_all_the_same() {
    let (mailbox, table) = (mailbox(10, 100.0), table());
    let mut flight = enter(&mailbox, &table);
    {
        let mut carrier = pin!(mailbox.carry());
        assert!(carrier.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
        dispatch(&mailbox, flight.id());
        assert_eq!(flight.decision().now_or_never(), None);
    }
    assert!(matches!(flight.decision().now_or_never(), Some(Some(Decision::Dispatch { .. }))));
}

#[test]
fn time_is_told_only_while_something_waits() {
    let (mailbox, table) = (mailbox(10, 0.001), table());
    assert_eq!(mailbox.receive(Duration::from_millis(20)), Received::Nothing);
    let flight = enter(&mailbox, &table);
    let mut seen = vec![];
    while !tags(&seen).contains(&"tick") {
        seen.extend(received(&mailbox, LONG));
    }
    assert_eq!(seen[0][0], "arrived");
    drop(flight);
    while received(&mailbox, SHORT).iter().any(|event| event[0] != "cancelled") {}
    while mailbox.receive(SHORT) != Received::Nothing {}
    assert_eq!(mailbox.receive(Duration::from_millis(20)), Received::Nothing);
}

#[test]
fn gaps_between_tokens_come_with_the_tick_interval_though_nothing_waits() {
    let mailbox = mailbox(10, 0.001);
    mailbox.pace("p", 4).note(3, 0.5);
    let events = received(&mailbox, LONG);
    assert_eq!(tags(&events), ["paced"]);
    assert_eq!(events[0][3..], [serde_json::json!([4]), serde_json::json!([3]), serde_json::json!([0.5])]);
}

#[tokio::test]
async fn a_closed_mailbox_drains_tells_who_waits_and_refuses_more() {
    let (mailbox, table) = (mailbox(10, 100.0), table());
    let mut flight = enter(&mailbox, &table);
    let question = mailbox.ask("fleet", None, Bytes::new()).unwrap();
    mailbox.close();
    assert_eq!(flight.decision().await, None);
    assert!(question.await.is_err());
    drop(flight);
    assert!(matches!(mailbox.receive(LONG), Received::Events(_)), "what was there is still handed out");
    assert_eq!(mailbox.receive(LONG), Received::Closed);
    assert_eq!(InFlight::enter(&mailbox, &table, facts(5), Arc::default()).unwrap_err(), Full);
}

#[tokio::test]
async fn an_answer_reaches_who_asked() {
    let mailbox = mailbox(10, 100.0);
    let question = mailbox.ask("explain", Some(facts(7)), Bytes::from_static(b"{}")).unwrap();
    let command = b"\x91\x94\xa8answered\x07\xcc\xc8\xc4\x02[]";
    mailbox.command(command).unwrap();
    let answer = question.await.unwrap();
    assert_eq!((answer.status, &answer.body[..]), (200, &b"[]"[..]));
}

#[test]
fn the_deciding_thread_waits_while_decisions_are_not_picked_up() {
    let (mailbox, table) = (mailbox(10, 100.0), table());
    let mut flights: Vec<InFlight> = (0..3).map(|_| enter(&mailbox, &table)).collect();
    let commander = Arc::clone(&mailbox);
    let thread = thread::spawn(move || {
        for id in 1..=3 {
            dispatch(&commander, id);
        }
    });
    let deadline = Instant::now() + LONG;
    while mailbox.undecided() > 1 {
        assert!(Instant::now() < deadline);
        thread::yield_now();
    }
    assert!(!thread.is_finished(), "two decisions lie there, the third has to wait");
    drop(flights.remove(0));
    thread.join().unwrap();
    assert_eq!(mailbox.undecided(), 0);
}

/// Every way a request can go and the one end that it must report; `None`: the router has shed it.
// bug 9, 11
#[tokio::test]
async fn every_path_reports_exactly_one_end() {
    type Path = fn(&Mailbox, &mut InFlight);
    let decided: Path = |mailbox, flight| dispatch(mailbox, flight.id());
    let paths: [(&str, Path, bool, Path, Option<&str>); 9] = [
        ("left before any decision", |_, _| (), false, |_, _| (), Some("cancelled")),
        ("left with a dispatch unseen", decided, false, |_, _| (), Some("cancelled")),
        ("left with a shed unseen", |mailbox, flight| shed(mailbox, flight.id()), false, |_, _| (), None),
        ("shed", |mailbox, flight| shed(mailbox, flight.id()), true, |_, _| (), None),
        ("left while the engine worked", decided, true, |_, _| (), Some("cancelled")),
        (
            "finished",
            decided,
            true,
            |_, flight| flight.ends(Outcome::Finished { slot: 0, status: 200, usage: None, chunks: 0 }),
            Some("finished"),
        ),
        (
            "failed",
            decided,
            true,
            |_, flight| flight.ends(Outcome::Failed { failure: Failure::default(), tried: vec![0] }),
            Some("failed"),
        ),
        (
            "unreached, then left",
            decided,
            true,
            |_, flight| flight.unanswered(Failure::default(), vec![0], false),
            Some("cancelled"),
        ),
        (
            "unreached, then shed unseen",
            decided,
            true,
            |mailbox, flight| {
                flight.unanswered(Failure::default(), vec![0], false);
                shed(mailbox, flight.id());
            },
            None,
        ),
    ];
    let each_way = [false, true].into_iter().flat_map(|is_carried| paths.map(|path| (is_carried, path)));
    for (is_carried, (name, first, is_seen, then, expected)) in each_way {
        let (mailbox, table) = (mailbox(10, 100.0), table());
        let carrier = is_carried.then(|| carried(&mailbox));
        tokio::task::yield_now().await;
        let mut flight = enter(&mailbox, &table);
        first(&mailbox, &mut flight);
        if is_seen {
            let decision = flight.decision().await.unwrap();
            assert!(matches!(decision, Decision::Dispatch { .. } | Decision::Shed { face: FLEET_SATURATED, .. }));
        }
        then(&mailbox, &mut flight);
        drop(flight);
        let mut events = received(&mailbox, SHORT);
        events.extend(received(&mailbox, SHORT));
        let is_end = |event: &&Vec<Value>| match event[0].as_str().unwrap() {
            "finished" | "cancelled" => true,
            "failed" => event[5] == true,
            _ => false,
        };
        let ends: Vec<&str> = events.iter().filter(is_end).map(|event| event[0].as_str().unwrap()).collect();
        assert_eq!(ends, expected.into_iter().collect::<Vec<_>>(), "{name}, carried: {is_carried}");
        assert_eq!((table.len(), mailbox.undecided()), (0, 0), "{name}, carried: {is_carried}");
        carrier.inspect(tokio::task::JoinHandle::abort);
    }
}
