//! The fleet as a control process would report it, in the core's own types.

use std::collections::BTreeMap;
use std::sync::Arc;

use warmfront_core::fleet::{
    EngineLoad, EventSource, EventState, FleetState, FleetView, Pool, Replica, ReplicaUpdate, Tokens, encode,
};
use warmfront_core::index::Feed as FeedKind;
use warmfront_core::mailbox::{Event, Slot};

use super::member::Member;
use super::{Fleet, FleetOptions, Load, POOL};

impl FleetOptions {
    pub(super) fn kind_of_feed(&self) -> FeedKind {
        if self.publish { FeedKind::Exact } else { FeedKind::Approximate }
    }
}

impl Fleet {
    /// Looks at every engine, as the control process does now and then, and tells the router what it found.
    pub fn probe(&mut self) {
        self.catch_up();
        self.version += 1;
        let pool = Arc::new(self.pool());
        let state = FleetState { version: self.version, pools: vec![pool.state()] };
        let by_model = pool.models.iter().map(|(name, adapter)| (name.clone(), (0, adapter.clone()))).collect();
        let view = FleetView { version: self.version, pools: vec![pool], by_model, ..FleetView::default() };
        self.view.store(Arc::new(view));
        self.events.push(Event::FleetChanged { time_s: self.now_s, fleet: encode(&state) });
    }

    fn pool(&self) -> Pool {
        let block_size = self.options.index.block_size;
        let adapters = self.options.adapters.iter().map(|name| (name.clone(), Some(name.clone())));
        Pool {
            name: POOL.into(),
            models: adapters.chain([(POOL.into(), None)]).collect(),
            model_cards: Vec::new(),
            tokens: Tokens::Exact,
            tokenizer: None,
            replicas: self
                .members
                .iter()
                .enumerate()
                .map(|(slot, member)| self.replica(slot as Slot, member))
                .collect(),
            block_sizes: vec![block_size],
            indexes: BTreeMap::from([(block_size, Arc::clone(&self.index))]),
        }
    }

    fn replica(&self, slot: Slot, member: &Member) -> Option<Arc<Replica>> {
        if !member.present {
            return None;
        }
        let block_size = self.options.index.block_size;
        let capacity = u64::from(member.spec.config.blocks - 1) * u64::from(block_size);
        let source = || EventSource { endpoint: format!("tcp://engine-{slot}:5557"), ..EventSource::default() };
        let update = ReplicaUpdate {
            id: member.spec.id.clone(),
            url: member.spec.id.clone(),
            engine: "vllm".into(),
            incarnation: member.incarnation,
            ready: member.engine.is_some(),
            block_size: Some(block_size),
            capacity_tokens: Some(capacity),
            events: self.options.publish.then(source),
            load: EngineLoad {
                rtt_s: (member.spec.rtt_s > 0.0).then_some(member.spec.rtt_s),
                ..member.engine.as_ref().map_or_else(EngineLoad::default, |engine| told(Load::of(engine)))
            },
            lacks: member.spec.lacks.clone(),
            ..ReplicaUpdate::default()
        };
        let events = self.event_state(slot, member);
        Some(Arc::new(Replica::new(slot, &update, block_size, self.options.kind_of_feed(), events)))
    }

    fn event_state(&self, slot: Slot, member: &Member) -> EventState {
        let state = match (self.options.publish, &member.engine) {
            (false, _) => "none",
            (true, None) => "connecting",
            (true, Some(_)) => "live",
        };
        EventState {
            state: state.into(),
            last_sequence: self.feed.last_sequence(slot),
            lag_s: self.options.publish.then_some(self.options.delay_s),
            gaps: self.feed.gaps(slot),
            restarts: member.incarnation.saturating_sub(1),
            complete: self.options.publish && self.feed.gaps(slot) == 0,
            ..EventState::default()
        }
    }
}

fn told(load: Load) -> EngineLoad {
    EngineLoad {
        running: Some(load.running as f64),
        waiting: Some(load.waiting as f64),
        kv_usage: Some(load.kv_usage),
        age_s: Some(0.0),
        worked_tokens: None,
        rtt_s: None,
    }
}
