//! LoRA adapters on the device: a few slots, least recently used out, never one that a running sequence uses.

use std::sync::Arc;

#[derive(Debug)]
struct Resident {
    name: Arc<str>,
    users: usize,
    used: u64,
}

#[derive(Debug)]
pub(super) struct Adapters {
    /// 0: every adapter is always there.
    slots: usize,
    resident: Vec<Resident>,
    uses: u64,
}

impl Adapters {
    pub(super) fn new(slots: usize) -> Self {
        Self { slots, resident: Vec::new(), uses: 0 }
    }

    /// Whether a sequence with this adapter can run beside those that do.
    pub(super) fn has_room(&self, name: Option<&Arc<str>>) -> bool {
        let Some(name) = name else { return true };
        self.slots == 0
            || self.resident.len() < self.slots
            || self.resident.iter().any(|each| each.users == 0 || each.name == *name)
    }

    /// Starts using an adapter for which there is room; true when it has to be loaded first.
    pub(super) fn enter(&mut self, name: Option<&Arc<str>>) -> bool {
        let Some(name) = name.filter(|_| self.slots > 0) else { return false };
        self.uses += 1;
        if let Some(known) = self.resident.iter_mut().find(|each| each.name == *name) {
            known.users += 1;
            known.used = self.uses;
            return false;
        }
        if self.resident.len() == self.slots {
            let idle = self.resident.iter().enumerate().filter(|(_, each)| each.users == 0);
            let (place, _) = idle.min_by_key(|(_, each)| each.used).expect("the caller has asked for room");
            self.resident.swap_remove(place);
        }
        self.resident.push(Resident { name: Arc::clone(name), users: 1, used: self.uses });
        true
    }

    /// A sequence does not run any more.
    pub(super) fn leave(&mut self, name: Option<&Arc<str>>) {
        if let Some(known) = name.and_then(|name| self.resident.iter_mut().find(|each| each.name == *name)) {
            known.users -= 1;
        }
    }
}
