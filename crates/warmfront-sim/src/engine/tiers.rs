//! Host memory and disk behind the device: where evicted blocks go, and from where hits are loaded.
//!
//! A block whose last copy leaves the device goes to the host tier, from there to disk, and is gone after that. A tier keeps
//! what is loaded from it. A move is announced before the removal that it follows, because a router attaches it to the block
//! that it still knows.

use warmfront_core::index::FastMap;
use warmfront_core::kv::wire::Tier;

use super::CacheEvent;
use super::list::Ring;

/// A set of hashes of bounded size, least recently used first.
#[derive(Debug)]
struct Shelf {
    capacity: usize,
    place_of: FastMap<u64, u32>,
    hashes: Vec<u64>,
    order: Ring,
    spare: Vec<u32>,
}

impl Shelf {
    fn new(capacity: usize) -> Self {
        Self { capacity, place_of: FastMap::default(), hashes: vec![0], order: Ring::new(1), spare: Vec::new() }
    }

    /// Marks a block as just used; false when it is not here.
    fn touch(&mut self, hash: u64) -> bool {
        let Some(place) = self.place_of.get(&hash) else { return false };
        self.order.remove(*place);
        self.order.push_back(*place);
        true
    }

    /// Puts in a block that is not here; returns the one that has to go for it.
    fn put(&mut self, hash: u64) -> Option<u64> {
        let place = self.spare.pop().unwrap_or_else(|| {
            self.hashes.push(0);
            self.order.grow()
        });
        self.hashes[place as usize] = hash;
        self.place_of.insert(hash, place);
        self.order.push_back(place);
        if self.order.len() <= self.capacity {
            return None;
        }
        let oldest = self.order.first().expect("it holds more than its capacity");
        self.order.remove(oldest);
        self.spare.push(oldest);
        let gone = self.hashes[oldest as usize];
        self.place_of.remove(&gone);
        Some(gone)
    }
}

#[derive(Debug)]
pub(super) struct Tiers {
    host: Shelf,
    disk: Shelf,
}

/// Blocks to load at an admission, in prompt order behind those on the device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Loads {
    pub(super) host: usize,
    pub(super) disk: usize,
}

impl Loads {
    pub(super) fn blocks(self) -> usize {
        self.host + self.disk
    }
}

impl Tiers {
    /// Sizes in blocks; zero: no such tier.
    pub(super) fn new(host: usize, disk: usize) -> Self {
        Self { host: Shelf::new(host), disk: Shelf::new(disk) }
    }

    fn is_absent(&self) -> bool {
        self.host.capacity + self.disk.capacity == 0
    }

    /// How many of the leading `hashes` lie on a tier.
    pub(super) fn lookup(&self, hashes: &[u64]) -> Loads {
        let mut loads = Loads::default();
        if self.is_absent() {
            return loads;
        }
        for hash in hashes {
            if self.host.place_of.contains_key(hash) {
                loads.host += 1;
            } else if self.disk.place_of.contains_key(hash) {
                loads.disk += 1;
            } else {
                break;
            }
        }
        loads
    }

    /// Takes note that blocks were loaded.
    pub(super) fn used(&mut self, hashes: &[u64]) {
        for hash in hashes {
            if !self.host.touch(*hash) {
                self.disk.touch(*hash);
            }
        }
    }

    /// Takes over a block whose last copy leaves the device.
    pub(super) fn keep(&mut self, hash: u64, events: &mut Vec<CacheEvent>) {
        if self.host.capacity == 0 {
            self.keep_on_disk(hash, events);
        } else if !self.host.touch(hash) {
            let gone = self.host.put(hash);
            events.push(CacheEvent::Offloaded { tier: Tier::Cpu, hash });
            if let Some(gone) = gone {
                self.keep_on_disk(gone, events);
                events.push(CacheEvent::Dropped { tier: Tier::Cpu, hash: gone });
            }
        }
    }

    fn keep_on_disk(&mut self, hash: u64, events: &mut Vec<CacheEvent>) {
        if self.disk.capacity == 0 || self.disk.touch(hash) {
            return;
        }
        let gone = self.disk.put(hash);
        events.push(CacheEvent::Offloaded { tier: Tier::Disk, hash });
        events.extend(gone.map(|hash| CacheEvent::Dropped { tier: Tier::Disk, hash }));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_goes_from_host_to_disk_and_is_then_gone() {
        let mut tiers = Tiers::new(1, 1);
        let mut events = Vec::new();
        for hash in [1, 2, 3] {
            tiers.keep(hash, &mut events);
        }
        let offloaded = |tier, hash| CacheEvent::Offloaded { tier, hash };
        let dropped = |tier, hash| CacheEvent::Dropped { tier, hash };
        assert_eq!(
            events,
            [
                offloaded(Tier::Cpu, 1),
                offloaded(Tier::Cpu, 2),
                offloaded(Tier::Disk, 1),
                dropped(Tier::Cpu, 1),
                offloaded(Tier::Cpu, 3),
                offloaded(Tier::Disk, 2),
                dropped(Tier::Disk, 1),
                dropped(Tier::Cpu, 2),
            ]
        );
        assert_eq!(tiers.lookup(&[3, 2, 1]), Loads { host: 1, disk: 1 });
    }

    #[test]
    fn what_is_loaded_stays_longest() {
        let mut tiers = Tiers::new(2, 0);
        let mut events = Vec::new();
        tiers.keep(1, &mut events);
        tiers.keep(2, &mut events);
        tiers.used(&[1]);
        tiers.keep(3, &mut events);
        assert_eq!(tiers.lookup(&[1]).host, 1);
        assert_eq!(tiers.lookup(&[2]).host, 0);
    }
}
