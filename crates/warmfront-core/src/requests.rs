//! What the core keeps of a request while it lives: its hashes, under the number the router knows it by.
//!
//! The router asks for the overlap of a request by number and marks its blocks as in use; both find the hashes here. An
//! entry lives as long as the request's `InFlight`, so the table is bounded by the connections.

use std::any::Any;
use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::block::SeqHash;
use crate::error::CoreError;
use crate::mailbox::{RequestId, Slot};

/// The blocks of one prompt, hashed once for each block size of its pool.
#[derive(Debug, Default)]
pub struct Prompt {
    pub pool: String,
    /// Length in tokens; estimated where the prompt could not be tokenized.
    pub tokens: u32,
    /// Block size in tokens and the sequence hashes at that size; in the pool's order, the first is the main one.
    pub hashes: Vec<(u32, Arc<[SeqHash]>)>,
}

impl Prompt {
    /// Hashes at the given block size; empty if the prompt was not hashed at that size.
    pub fn at(&self, block_size: u32) -> &[SeqHash] {
        self.hashes.iter().find(|(size, _)| *size == block_size).map_or(&[], |(_, hashes)| hashes)
    }
}

/// A mark that blocks are in use on a replica; dropping it takes the mark away.
pub type ActiveMark = Box<dyn Any + Send>;
/// Marks the blocks of a prompt on another replica: how the index is told that a request has moved.
pub type MarkAt = dyn Fn(&Prompt, Slot) -> Option<ActiveMark> + Send + Sync;

#[derive(Default)]
struct Entry {
    prompt: Arc<Prompt>,
    mark: Option<ActiveMark>,
}

/// All requests in flight.
pub struct RequestTable {
    entries: Mutex<HashMap<RequestId, Entry>>,
    mark_at: Box<MarkAt>,
}

impl fmt::Debug for RequestTable {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("RequestTable").field("requests", &self.len()).finish_non_exhaustive()
    }
}

impl RequestTable {
    /// `mark_at` tells the index where a request goes when it moves to a later choice.
    #[must_use]
    pub fn new(mark_at: Box<MarkAt>) -> Self {
        Self { entries: Mutex::default(), mark_at }
    }

    pub fn insert(&self, id: RequestId, prompt: Arc<Prompt>) {
        self.entries.lock().insert(id, Entry { prompt, mark: None });
    }

    /// The prompt of a request in flight.
    pub fn get(&self, id: RequestId) -> Result<Arc<Prompt>, CoreError> {
        let entries = self.entries.lock();
        entries.get(&id).map(|entry| Arc::clone(&entry.prompt)).ok_or(CoreError::UnknownRequest(id))
    }

    /// Marks the request's blocks as in use on `slot` (and as held there soon), instead of where they were marked.
    pub fn dispatched(&self, id: RequestId, slot: Slot) -> Result<(), CoreError> {
        let prompt = self.get(id)?;
        let mark = (self.mark_at)(&prompt, slot);
        let before = match self.entries.lock().get_mut(&id) {
            Some(entry) => std::mem::replace(&mut entry.mark, mark),
            None => mark, // left meanwhile
        };
        drop(before); // not under the lock: dropping a mark takes the index's
        Ok(())
    }

    /// The request goes to a later choice.
    pub(crate) fn moved(&self, id: RequestId, slot: Slot) {
        self.dispatched(id, slot).expect("its guard keeps the entry");
    }

    /// The request is nowhere now, but may be dispatched again.
    pub(crate) fn release(&self, id: RequestId) {
        let mark = self.entries.lock().get_mut(&id).and_then(|entry| entry.mark.take());
        drop(mark);
    }

    pub(crate) fn remove(&self, id: RequestId) {
        let entry = self.entries.lock().remove(&id);
        drop(entry);
    }

    /// Requests in flight.
    pub fn len(&self) -> usize {
        self.entries.lock().len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}
