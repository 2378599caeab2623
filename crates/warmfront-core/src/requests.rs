//! What the core keeps of a request while it lives: its hashes, under the number the router knows it by.
//!
//! The router asks for the overlap of a request by number and marks its blocks as in use; both find the hashes here. An
//! entry lives as long as the request's `InFlight`, so the table is bounded by the connections.

use std::collections::HashMap;
use std::sync::Arc;

use arc_swap::ArcSwap;
use parking_lot::Mutex;

use crate::block::SeqHash;
use crate::clock::Clock;
use crate::error::CoreError;
use crate::fleet::FleetView;
use crate::index::Index;
use crate::mailbox::{RequestId, Slot};

/// Requests whose prompts agree in so many leading tokens share a prefix key.
const PREFIX_KEY_TOKENS: u32 = 256;

/// The hash at [`PREFIX_KEY_TOKENS`] of a prompt's hashes by block size, or the last one of a shorter prompt.
pub fn prefix_key(hashes: &[(u32, Arc<[SeqHash]>)]) -> u64 {
    let Some((block_size, hashes)) = hashes.first() else { return 0 };
    let row = (PREFIX_KEY_TOKENS / block_size.max(&1)).max(1) as usize - 1;
    hashes.get(row).or(hashes.last()).map_or(0, |hash| hash.0)
}

/// The blocks of one prompt, hashed once for each block size of its pool.
#[derive(Debug, Default)]
pub struct Prompt {
    pub pool: String,
    /// Length in tokens of the prompt that routes, the first of several; estimated where it could not be tokenized.
    pub tokens: u32,
    /// The engine looks it up in its cache; some requests only fill it.
    pub reads_cache: bool,
    /// Block size in tokens and the sequence hashes at that size; in the pool's order, the first is the main one.
    pub hashes: Vec<(u32, Arc<[SeqHash]>)>,
}

impl Prompt {
    /// Hashes at the given block size; empty if the prompt was not hashed at that size.
    pub fn at(&self, block_size: u32) -> &[SeqHash] {
        self.hashes.iter().find(|(size, _)| *size == block_size).map_or(&[], |(_, hashes)| hashes)
    }
}

/// Where a request's blocks are marked as in use.
#[derive(Debug, Default)]
struct Marked {
    index: Option<Arc<Index>>,
    /// The request has ended: nothing may be marked any more.
    is_over: bool,
}

#[derive(Debug)]
struct Entry {
    prompt: Arc<Prompt>,
    /// A lock for each request: marking a long prompt must not hold up the others.
    marked: Mutex<Marked>,
}

/// All requests in flight.
#[derive(Debug)]
pub struct RequestTable {
    entries: Mutex<HashMap<RequestId, Arc<Entry>>>,
    fleet: Arc<ArcSwap<FleetView>>,
    clock: Clock,
}

impl RequestTable {
    #[must_use]
    pub fn new(fleet: Arc<ArcSwap<FleetView>>, clock: Clock) -> Self {
        Self { entries: Mutex::default(), fleet, clock }
    }

    /// Keeps the prompt of a request until it is removed.
    pub fn insert(&self, id: RequestId, prompt: Arc<Prompt>) {
        self.entries.lock().insert(id, Arc::new(Entry { prompt, marked: Mutex::default() }));
    }

    /// Keeps the prompt of a request that is only asked about, until the value is dropped.
    #[must_use]
    pub fn visit(self: &Arc<Self>, id: RequestId, prompt: Arc<Prompt>) -> Visit {
        self.insert(id, prompt);
        Visit { table: Arc::clone(self), id }
    }

    /// The prompt of a request in flight.
    pub fn get(&self, id: RequestId) -> Result<Arc<Prompt>, CoreError> {
        Ok(Arc::clone(&self.entry(id)?.prompt))
    }

    /// Marks the request's blocks as in use on `slot`, and as held there soon, instead of where they were marked.
    ///
    /// The router calls this while it decides, so that the next decision of the same batch sees it. A slot that is gone
    /// has nothing to mark: the dispatch will fail by itself.
    pub fn dispatched(&self, id: RequestId, slot: Slot) -> Result<(), CoreError> {
        self.dispatched_at(id, slot, self.clock.now_s())
    }

    /// As [`RequestTable::dispatched`], at a time that the caller knows: the simulator's clock is its own.
    pub fn dispatched_at(&self, id: RequestId, slot: Slot, now_s: f64) -> Result<(), CoreError> {
        let entry = self.entry(id)?;
        let Some((index, block_size)) = self.index_of(&entry.prompt.pool, slot) else { return Ok(()) };
        let mut marked = entry.marked.lock();
        if marked.is_over {
            return Err(CoreError::UnknownRequest(id));
        }
        if let Some(before) = marked.index.take()
            && !Arc::ptr_eq(&before, &index)
        {
            before.withdrawn(id);
        }
        index.dispatched(id, entry.prompt.at(block_size), slot, now_s);
        marked.index = Some(index);
        Ok(())
    }

    /// The request goes to a later choice.
    pub(crate) fn moved(&self, id: RequestId, slot: Slot) {
        self.dispatched(id, slot).expect("its guard keeps the entry");
    }

    /// No choice could be reached: the request is nowhere, but may be dispatched again.
    pub fn withdrawn(&self, id: RequestId) {
        let Ok(entry) = self.entry(id) else { return };
        if let Some(index) = entry.marked.lock().index.take() {
            index.withdrawn(id);
        }
    }

    /// The request has ended.
    pub fn remove(&self, id: RequestId) {
        let Some(entry) = self.entries.lock().remove(&id) else { return };
        let mut marked = entry.marked.lock();
        marked.is_over = true;
        if let Some(index) = marked.index.take() {
            index.released(id);
        }
    }

    /// Requests in flight.
    pub fn len(&self) -> usize {
        self.entries.lock().len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn entry(&self, id: RequestId) -> Result<Arc<Entry>, CoreError> {
        self.entries.lock().get(&id).cloned().ok_or(CoreError::UnknownRequest(id))
    }

    /// The index that knows the replica in a slot now, and its block size.
    fn index_of(&self, pool: &str, slot: Slot) -> Option<(Arc<Index>, u32)> {
        let fleet = self.fleet.load();
        let pool = fleet.pool(pool)?;
        Some((Arc::clone(pool.index_of(slot)?), pool.replica(slot)?.block_size))
    }
}

/// A request that is only asked about.
#[derive(Debug)]
pub struct Visit {
    table: Arc<RequestTable>,
    id: RequestId,
}

impl Drop for Visit {
    fn drop(&mut self) {
        self.table.remove(self.id);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::fleet::{EventState, Pool, Replica, ReplicaUpdate, Tokens};
    use crate::index::{Feed, IndexOptions};

    fn fleet(index: &Arc<Index>) -> Arc<ArcSwap<FleetView>> {
        let replica = |slot| {
            index.add_slot(slot, Feed::Approximate, None);
            Some(Arc::new(Replica {
                slot,
                id: slot.to_string(),
                authority: String::new(),
                rank: None,
                headers: http::HeaderMap::new(),
                ready: true,
                block_size: 16,
                feed: Feed::Approximate,
                events: Arc::new(Mutex::new(EventState::default())),
                place: Arc::default(),
                update: ReplicaUpdate::default(),
            }))
        };
        let pool = Pool {
            name: "p".to_owned(),
            models: BTreeMap::new(),
            model_cards: vec![],
            tokens: Tokens::Exact,
            tokenizer: None,
            replicas: vec![replica(0), replica(1)],
            block_sizes: vec![16],
            indexes: BTreeMap::from([(16, Arc::clone(index))]),
        };
        Arc::new(ArcSwap::from_pointee(FleetView { pools: vec![Arc::new(pool)], ..FleetView::default() }))
    }

    #[test]
    fn blocks_are_in_use_where_the_request_is_until_it_ends() {
        let index = Arc::new(Index::new(IndexOptions::default()));
        let table = RequestTable::new(fleet(&index), Clock::start());
        let hashes: Arc<[SeqHash]> = index.hasher().chain(&[7; 64], &crate::block::BlockExtras::default()).into();
        let prompt =
            Prompt { pool: "p".to_owned(), tokens: 64, reads_cache: true, hashes: vec![(16, Arc::clone(&hashes))] };
        let active = || index.overlap(&hashes, 0.0).active;
        table.insert(1, Arc::new(prompt));
        table.dispatched(1, 0).unwrap();
        assert_eq!(active(), [4, 0]);
        table.moved(1, 1);
        assert_eq!(active(), [0, 4]);
        table.withdrawn(1);
        assert_eq!(active(), [0, 0]);
        table.dispatched(1, 0).unwrap();
        table.dispatched(1, 9).unwrap();
        table.remove(1);
        assert_eq!(active(), [0, 0]);
        assert_eq!(index.overlap(&hashes, 0.0).device, [4, 0], "what was computed is still predicted to be there");
        assert!(matches!(table.dispatched(1, 0), Err(CoreError::UnknownRequest(1))));
        assert!(table.is_empty());
    }
}
