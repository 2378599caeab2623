//! One event of each kind with values that differ from every default: what the contract test decodes in Python.

use bytes::Bytes;
use warmfront_core::fleet::{EventSource, EventState, FleetState, PoolState, ReplicaState, ReplicaUpdate};
use warmfront_core::mailbox::{Basis, Event, Failure, RequestFacts, Route, Usage};

pub(crate) fn request() -> RequestFacts {
    RequestFacts {
        id: 7,
        time_s: 1.5,
        pool: "tiny".into(),
        model: "tiny-north".into(),
        adapter: Some("north".into()),
        flow: "tenant".into(),
        priority: -3,
        route: Route::Prefix,
        basis: Basis::Tokens,
        prompt_tokens: 4097,
        blocks: 256,
        turn: 2,
        output_tokens_max: Some(64),
        affinity_key: Some(u64::MAX),
        prefix_key: 1 << 63,
        stream: true,
        fallback: Some("media".into()),
        deadline_s: Some(61.5),
    }
}

fn fleet() -> Bytes {
    let replica = ReplicaUpdate {
        id: "http://engine:8000#1".into(),
        url: "http://engine:8000".into(),
        rank: Some(1),
        engine: "vllm".into(),
        incarnation: 9,
        ready: true,
        block_size: Some(16),
        capacity_tokens: Some(1 << 20),
        events: Some(EventSource { endpoint: "tcp://engine:5558".into(), ..EventSource::default() }),
        ..ReplicaUpdate::default()
    };
    let events =
        EventState { state: "live".into(), last_sequence: Some(3), lag_s: Some(0.25), ..EventState::default() };
    let pool = PoolState {
        name: "tiny".into(),
        models: [("tiny".into(), None), ("tiny-north".into(), Some("north".into()))].into(),
        tokens: "exact".into(),
        tokens_reason: None,
        replicas: vec![ReplicaState { slot: 4, replica, events }],
    };
    warmfront_core::fleet::encode(&FleetState { version: 11, pools: vec![pool] })
}

pub(crate) fn events() -> Vec<Event> {
    let usage = Usage { prompt_tokens: Some(10), cached_tokens: Some(8), output_tokens: None };
    let payload = Bytes::from_static(b"{}");
    let failure = Failure { error: "rejected".into(), status: Some(503), retry_after_s: Some(2.5), accepted: true };
    vec![
        Event::Arrived(request()),
        Event::Moved { id: 7, time_s: 2.0, slot: 3 },
        Event::FirstToken { id: 7, time_s: 2.5, slot: 3 },
        Event::Finished { id: 7, time_s: 3.0, slot: 3, status: 200, usage: Some(usage), chunks: 12 },
        Event::Failed { id: 7, time_s: 3.5, failure, tried: vec![1, 2], began: true },
        Event::Cancelled { id: 7, time_s: 4.0 },
        Event::FleetChanged { time_s: 4.5, fleet: fleet() },
        Event::ConfigChanged { time_s: 5.0, config: payload.clone() },
        Event::Paced {
            time_s: 5.5,
            pool: "tiny".into(),
            slots: vec![0, 2],
            gaps: vec![3, 4],
            gap_seconds: vec![0.5, 0.25],
        },
        Event::Tick { time_s: 6.0 },
        Event::Asked { id: 8, time_s: 6.5, question: "explain".into(), request: Some(request()), payload },
        Event::Stopping { time_s: 7.0, grace_s: 30.0 },
    ]
}
