//! Prompts and events chosen to harm the index: they cost bounded memory, and at worst a wrong place.

use warmfront_core::block::{BlockExtras, BlockHasher, SeqHash};
use warmfront_core::index::{Feed, Index, IndexOptions};
use warmfront_core::kv::wire::{EngineHash, EventBatch, KvEvent, Stored};

const BLOCK_SIZE: u32 = 16;
const FACTS_MAX: u64 = 10_000;
/// Upper bound of what one fact costs with everything that hangs on it, see `index.facts_max`.
const FACT_BYTES_MAX: u64 = 300;

fn index(feed: Feed, slots: u32) -> Index {
    let options = IndexOptions { block_size: BLOCK_SIZE, facts_max: FACTS_MAX, ..IndexOptions::default() };
    let index = Index::new(options);
    (0..slots).for_each(|slot| index.add_slot(slot, feed, None));
    index
}

/// Prompt number `number`, which shares no block with any other.
fn unique(index: &Index, number: u32, blocks: u32) -> Vec<SeqHash> {
    let tokens: Vec<u32> = (0..blocks * BLOCK_SIZE).map(|place| number.wrapping_mul(7919) ^ (place << 12)).collect();
    index.hasher().chain(&tokens, &BlockExtras::default())
}

// bug 33
// bug 34
#[test]
fn unique_prompts_without_end_cost_bounded_memory_and_leave_nothing_with_their_replicas() {
    for feed in [Feed::Exact, Feed::Approximate] {
        let index = index(feed, 4);
        for number in 0..20_000 {
            let now_s = f64::from(number) / 1000.0; // faster than predictions run out
            let id = u64::from(number);
            index.dispatched(id, &unique(&index, number, 8), number % 4, now_s);
            index.released(id);
        }
        let stats = index.stats();
        assert!(stats.confirmed_facts + stats.predicted_facts <= FACTS_MAX, "{stats:?}");
        assert!(stats.bytes < FACTS_MAX * FACT_BYTES_MAX, "{stats:?}");
        assert_eq!(stats.in_flight, 0);
        (0..4).for_each(|slot| index.remove_slot(slot));
        assert_eq!(index.stats().blocks, 0);
    }
}

// bug 33
#[test]
fn an_engine_that_announces_blocks_without_end_costs_bounded_memory() {
    let index = index(Feed::Exact, 1);
    for number in 0..20_000_u32 {
        let stored = Stored {
            block_hashes: vec![EngineHash(u64::from(number) << 20)],
            token_ids: (number..number + BLOCK_SIZE).map(|token| token.wrapping_mul(7919)).collect(),
            block_size: BLOCK_SIZE,
            ..Stored::default()
        };
        let batch = EventBatch { events: vec![KvEvent::Stored(Box::new(stored))], ..EventBatch::default() };
        index.apply(0, &batch, 0.0);
    }
    let stats = index.stats();
    assert!(stats.confirmed_facts <= FACTS_MAX, "{stats:?}");
    assert!(stats.evicted_for_room > 0, "{stats:?}");
    assert!(stats.bytes < FACTS_MAX * FACT_BYTES_MAX, "{stats:?}");
}

/// Eight bytes of XXH3's own secret, as two tokens. In the third pair of words of a block, behind the head, they make a
/// factor of the sum zero under seed 0, and the two tokens that follow count no more.
const NEUTRAL: [u32; 2] = [0x4ee6_79cb, 0x78e5_c0cc];

fn crafted(third: u32, fourth: u32) -> Vec<u32> {
    let mut tokens = vec![NEUTRAL[0], NEUTRAL[1], third, fourth];
    tokens.extend(0..12);
    tokens
}

#[test]
fn a_crafted_collision_makes_two_prompts_look_alike_and_does_no_more() {
    let (one, other) = (crafted(1, 2), crafted(3, 4));
    let index = index(Feed::Exact, 2);
    let chain = |tokens: &[u32]| index.hasher().chain(tokens, &BlockExtras::default());
    assert_eq!(chain(&one), chain(&other), "the crafted pair no longer collides: craft another");
    index.dispatched(1, &chain(&one), 1, 0.0);
    assert_eq!(index.overlap(&chain(&other), 0.0).device, [0, 1], "it is taken for the other, and placed with it");
    index.released(1);
    assert_eq!(index.stats().in_flight, 0);
}

#[test]
fn a_seed_of_ones_own_breaks_a_crafted_collision() {
    let hasher = BlockHasher::new(0x5eed, BLOCK_SIZE);
    let chain = |tokens: &[u32]| hasher.chain(tokens, &BlockExtras::default());
    assert_ne!(chain(&crafted(1, 2)), chain(&crafted(3, 4)));
}

// bug 49
// bug 50
#[test]
fn lookups_dispatches_and_events_at_once_leave_a_sound_index() {
    let index = index(Feed::Exact, 8);
    std::thread::scope(|scope| {
        for worker in 0..4_u32 {
            let index = &index;
            scope.spawn(move || {
                for number in 0..2_000 {
                    let hashes = unique(index, number % 50, 4);
                    let id = u64::from(worker * 10_000 + number);
                    index.dispatched(id, &hashes, (worker + number) % 8, f64::from(number));
                    assert_eq!(index.overlap(&hashes, f64::from(number)).device.len(), 8);
                    if number % 100 == 0 {
                        index.forget_confirmed(worker);
                        index.add_slot(worker, Feed::Exact, None);
                    }
                    index.released(id);
                }
            });
        }
    });
    assert_eq!(index.stats().in_flight, 0);
    (0..8).for_each(|slot| index.remove_slot(slot));
    assert_eq!(index.stats().blocks, 0);
}
