//! The index through its public face: residency, predictions, time, room, tiers, groups.

use std::sync::Arc;

use warmfront_core::block::{BlockExtras, SeqHash};
use warmfront_core::index::{Feed, Index, IndexOptions, LAG_S_MAX, OverlapColumns, Restoring};
use warmfront_core::kv::apply::ApplyReport;
use warmfront_core::kv::wire::{EngineHash, EventBatch, KvEvent, Removed, SpecKind, Stored, Tier};

const BLOCK_SIZE: u32 = 4;

fn options() -> IndexOptions {
    IndexOptions { block_size: BLOCK_SIZE, seed: 3, ..IndexOptions::default() }
}

/// An index with `slots` exact replicas.
fn index(slots: u32) -> Index {
    index_with(options(), slots)
}

fn index_with(options: IndexOptions, slots: u32) -> Index {
    let index = Index::new(options);
    for slot in 0..slots {
        index.add_slot(slot, Feed::Exact, None);
    }
    index
}

/// `blocks` blocks of a prompt that begins with `first`.
fn prompt(first: u32, blocks: u32) -> Vec<u32> {
    (first..first + blocks * BLOCK_SIZE).collect()
}

fn hashes(index: &Index, tokens: &[u32]) -> Vec<SeqHash> {
    index.hasher().chain(tokens, &BlockExtras::default())
}

fn names(first: u64, count: usize) -> Vec<EngineHash> {
    (first..first + count as u64).map(EngineHash).collect()
}

/// A store of whole blocks named `first`, `first + 1`, ...
fn stored(tokens: &[u32], first: u64, parent: Option<u64>) -> Stored {
    Stored {
        block_hashes: names(first, tokens.len() / BLOCK_SIZE as usize),
        parent: parent.map(EngineHash),
        token_ids: tokens.to_vec(),
        block_size: BLOCK_SIZE,
        ..Stored::default()
    }
}

fn apply(index: &Index, slot: u32, events: Vec<KvEvent>, now_s: f64) -> ApplyReport {
    index.apply(slot, &EventBatch { events, ..EventBatch::default() }, now_s)
}

fn store(index: &Index, slot: u32, tokens: &[u32], first: u64, parent: Option<u64>) -> ApplyReport {
    apply(index, slot, vec![KvEvent::Stored(Box::new(stored(tokens, first, parent)))], 0.0)
}

fn remove(index: &Index, slot: u32, name: u64) -> ApplyReport {
    remove_from(index, slot, &[name], Tier::Gpu, None)
}

fn remove_from(index: &Index, slot: u32, hashes: &[u64], tier: Tier, group: Option<u32>) -> ApplyReport {
    let block_hashes = hashes.iter().copied().map(EngineHash).collect();
    apply(index, slot, vec![KvEvent::Removed(Removed { block_hashes, tier, group })], 0.0)
}

fn overlap(index: &Index, tokens: &[u32], now_s: f64) -> OverlapColumns {
    index.overlap(&hashes(index, tokens), now_s)
}

// bug 14
#[test]
fn depth_is_the_unbroken_prefix_of_each_slot() {
    let index = index(3);
    let tokens = prompt(100, 5);
    store(&index, 0, &tokens, 1, None);
    store(&index, 1, &tokens[..12], 1, None);
    assert_eq!(overlap(&index, &tokens, 0.0).device, [5, 3, 0]);
    remove(&index, 0, 2);
    assert_eq!(overlap(&index, &tokens, 0.0).device, [1, 3, 0]);
}

#[test]
fn a_block_is_gone_when_its_last_physical_copy_is() {
    let index = index(1);
    let tokens = prompt(0, 2);
    store(&index, 0, &tokens, 1, None);
    assert_eq!(store(&index, 0, &tokens[4..], 2, Some(1)).duplicates, 1);
    remove(&index, 0, 2);
    assert_eq!(overlap(&index, &tokens, 0.0).device, [2]);
    remove(&index, 0, 2);
    assert_eq!(overlap(&index, &tokens, 0.0).device, [1]);
    assert_eq!(remove(&index, 0, 2).unknown_removals, 1);
}

#[test]
fn an_unknown_parent_is_counted_and_teaches_nothing() {
    let index = index(2);
    store(&index, 0, &prompt(0, 1), 1, None);
    // Slot 1 never stored block 1, though slot 0 did.
    assert_eq!(store(&index, 1, &prompt(50, 2), 7, Some(1)).unknown_parents, 2);
    assert_eq!(index.stats().blocks, 1);
}

// bug 41
#[test]
fn publishers_that_disagree_about_a_hash_do_not_touch_each_other() {
    let index = index(2);
    let (one, other) = (prompt(0, 1), prompt(100, 1));
    store(&index, 0, &one, 9, None);
    store(&index, 1, &other, 9, None);
    remove(&index, 1, 9);
    assert_eq!(overlap(&index, &one, 0.0).device, [1, 0]);
    assert_eq!(overlap(&index, &other, 0.0).device, [0, 0]);
}

#[test]
fn publishers_with_own_hashes_share_blocks() {
    let index = index(2);
    let tokens = prompt(0, 3);
    store(&index, 0, &tokens, 1, None);
    store(&index, 1, &tokens, 1001, None);
    assert_eq!(index.stats().blocks, 3);
    assert_eq!(overlap(&index, &tokens, 0.0).device, [3, 3]);
    assert_eq!(remove(&index, 1, 1).unknown_removals, 1);
    remove(&index, 1, 1003);
    assert_eq!(overlap(&index, &tokens, 0.0).device, [3, 2]);
}

#[test]
fn a_hash_that_names_other_content_replaces_what_it_named() {
    let index = index(1);
    let (one, other) = (prompt(0, 1), prompt(100, 1));
    store(&index, 0, &one, 9, None);
    store(&index, 0, &other, 9, None);
    assert_eq!(overlap(&index, &one, 0.0).device, [0]);
    assert_eq!(overlap(&index, &other, 0.0).device, [1]);
    assert_eq!(index.stats().blocks, 1);
}

// bug 39
#[test]
fn a_clear_empties_the_device_and_leaves_tiers() {
    let index = index(2);
    let tokens = prompt(0, 2);
    store(&index, 0, &tokens, 1, None);
    store(&index, 1, &tokens, 1, None);
    let placeholder = Stored { block_hashes: names(1, 1), tier: Tier::Cpu, ..Stored::default() };
    assert_eq!(apply(&index, 0, vec![KvEvent::Stored(Box::new(placeholder))], 0.0).offloaded, 1);
    assert_eq!(apply(&index, 0, vec![KvEvent::Cleared], 0.0).cleared, 1);
    let columns = overlap(&index, &tokens, 0.0);
    assert_eq!((columns.device, columns.host, columns.disk), (vec![0, 2], vec![1, 2], vec![1, 2]));
    assert_eq!(remove_from(&index, 0, &[1], Tier::Cpu, None).removed, 1);
    assert_eq!(overlap(&index, &tokens, 0.0).host, [0, 2]);
}

#[test]
fn tiers_extend_the_device() {
    let index = index(1);
    let tokens = prompt(0, 4);
    store(&index, 0, &tokens, 1, None);
    for (first, tier) in [(3, Tier::Cpu), (4, Tier::Remote)] {
        let placeholder = Stored { block_hashes: names(first, 1), tier, ..Stored::default() };
        apply(&index, 0, vec![KvEvent::Stored(Box::new(placeholder))], 0.0);
    }
    remove(&index, 0, 4);
    remove(&index, 0, 3);
    let columns = overlap(&index, &tokens, 0.0);
    assert_eq!((columns.device[0], columns.host[0], columns.disk[0]), (2, 3, 4));
}

// bug 174
#[test]
fn a_dispatch_is_a_prediction_until_it_is_confirmed_or_runs_out() {
    let index = index(2);
    let tokens = prompt(0, 3);
    index.dispatched(1, &hashes(&index, &tokens), 1, 0.0);
    index.released(1);
    let columns = overlap(&index, &tokens, 4.9);
    assert_eq!((columns.device, columns.confirmed), (vec![0, 3], vec![0, 0]));
    store(&index, 1, &tokens[..8], 1, None);
    assert_eq!(overlap(&index, &tokens, 5.0).device, [0, 2]);
    let stats = index.slot_stats(1).unwrap();
    assert_eq!((stats.unconfirmed, stats.predictions, stats.predicted), (1, 3, 0));
    assert_eq!(index.stats().blocks, 2);
}

#[test]
fn time_does_not_run_while_the_request_is_in_flight() {
    let index = index(1);
    let tokens = prompt(0, 2);
    index.dispatched(1, &hashes(&index, &tokens), 0, 0.0);
    assert_eq!(overlap(&index, &tokens, 100.0).device, [2]);
    index.released(1);
    assert_eq!(overlap(&index, &tokens, 104.0).device, [2]);
    assert_eq!(overlap(&index, &tokens, 106.0).device, [0]);
}

#[test]
fn a_withdrawn_request_leaves_no_prediction_and_no_complaint() {
    let index = index(1);
    let tokens = prompt(0, 2);
    index.dispatched(1, &hashes(&index, &tokens[..4]), 0, 0.0);
    index.dispatched(2, &hashes(&index, &tokens), 0, 0.0);
    index.withdrawn(2);
    assert_eq!(overlap(&index, &tokens, 0.0).device, [1]);
    index.withdrawn(1);
    assert_eq!(index.stats().blocks, 0);
    assert_eq!(index.slot_stats(0).unwrap().unconfirmed, 0);
}

#[test]
fn a_request_that_moves_leaves_its_first_replica() {
    let index = index(2);
    let tokens = prompt(0, 2);
    index.dispatched(1, &hashes(&index, &tokens), 0, 0.0);
    index.dispatched(1, &hashes(&index, &tokens), 1, 0.0);
    let columns = overlap(&index, &tokens, 0.0);
    assert_eq!((columns.device, columns.active), (vec![0, 2], vec![0, 2]));
}

#[test]
fn active_blocks_are_counted_once_however_many_requests_use_them() {
    let index = index(1);
    let tokens = prompt(0, 3);
    index.dispatched(1, &hashes(&index, &tokens), 0, 0.0);
    index.dispatched(2, &hashes(&index, &tokens[..8]), 0, 0.0);
    assert_eq!(overlap(&index, &tokens, 0.0).active_blocks, [3]);
    index.released(1);
    let columns = overlap(&index, &tokens, 0.0);
    assert_eq!((columns.active, columns.active_blocks), (vec![2], vec![2]));
    index.released(2);
    index.released(2);
    assert_eq!(overlap(&index, &tokens, 0.0).active_blocks, [0]);
}

#[test]
fn a_stale_slot_counts_with_predictions_only() {
    let index = index(1);
    let tokens = prompt(0, 3);
    store(&index, 0, &tokens, 1, None);
    index.set_stale(0, true);
    assert_eq!(overlap(&index, &tokens, 0.0).device, [0]);
    index.dispatched(1, &hashes(&index, &tokens[..8]), 0, 0.0);
    assert_eq!(overlap(&index, &tokens, 0.0).device, [2]);
    index.released(1);
    index.set_stale(0, false);
    let columns = overlap(&index, &tokens, 100.0);
    assert_eq!((columns.device, columns.confirmed, columns.resident), (vec![3], vec![3], vec![3]));
    assert_eq!(index.slot_stats(0).unwrap().unconfirmed, 0);
}

#[test]
fn predictions_live_long_while_a_slot_is_stale_and_short_again_afterwards() {
    let index = index(1);
    let tokens = prompt(0, 3);
    index.set_stale(0, true);
    index.dispatched(1, &hashes(&index, &tokens), 0, 0.0);
    index.released(1);
    let options = options();
    assert!(options.approximate_ttl_s > options.predicted_ttl_s + 1.0);
    assert_eq!(overlap(&index, &tokens, options.predicted_ttl_s + 1.0).device, [3]);
    index.set_stale(0, false);
    assert_eq!(overlap(&index, &tokens, options.predicted_ttl_s + 1.0).device, [0]);
}

#[test]
fn predictions_outlive_the_lateness_of_the_events_that_would_confirm_them() {
    let (index, tokens) = (index(2), prompt(0, 3));
    let ttl_s = options().predicted_ttl_s;
    let device = |now_s: f64| overlap(&index, &tokens, now_s).device;
    for slot in [0, 1] {
        index.dispatched(u64::from(slot), &hashes(&index, &tokens), slot, 0.0);
        index.released(u64::from(slot));
    }
    index.note_lag(0, 30.0);
    assert_eq!(device(ttl_s + 29.0), [3, 0], "its own events alone say how late they are");
    index.note_lag(0, f64::MAX);
    assert_eq!(device(ttl_s + LAG_S_MAX - 1.0), [3, 0]);
    assert_eq!(device(ttl_s + LAG_S_MAX), [0, 0], "an engine's clock may be wrong by an hour");
    index.dispatched(2, &hashes(&index, &tokens), 0, 100.0);
    index.released(2);
    for _ in 0..58 {
        index.note_lag(0, 0.1);
    }
    assert_eq!(device(100.0 + ttl_s + 1.0), [3, 0]);
    assert_eq!(device(100.0 + ttl_s + 2.0), [0, 0], "it has fallen by a second with each event");
}

#[test]
fn a_dispatch_that_did_not_reach_a_dead_engine_leaves_nothing_of_an_equal_one_before() {
    let index = index(1);
    let tokens = prompt(0, 3);
    index.dispatched(1, &hashes(&index, &tokens), 0, 0.0);
    store(&index, 0, &tokens, 1, None);
    index.released(1);
    index.set_stale(0, true);
    index.dispatched(2, &hashes(&index, &tokens), 0, 1.0);
    index.withdrawn(2);
    assert_eq!(overlap(&index, &tokens, 1.0).device, [0]);
}

#[test]
fn a_stale_slot_keeps_to_its_capacity() {
    let index = Index::new(options());
    index.add_slot(0, Feed::Exact, Some(4));
    index.set_stale(0, true);
    index.dispatched(1, &hashes(&index, &prompt(0, 3)), 0, 0.0);
    index.dispatched(2, &hashes(&index, &prompt(100, 3)), 0, 1.0);
    assert_eq!(overlap(&index, &prompt(0, 3), 1.0).resident, [4]);
}

#[test]
fn in_doubt_facts_stay_and_one_removal_takes_all_copies() {
    let index = index(1);
    let tokens = prompt(0, 2);
    store(&index, 0, &tokens, 1, None);
    store(&index, 0, &tokens, 1, None);
    index.doubt(0);
    store(&index, 0, &tokens, 1, None);
    assert_eq!(overlap(&index, &tokens, 0.0).device, [2]);
    remove(&index, 0, 2);
    assert_eq!(overlap(&index, &tokens, 0.0).device, [1]);
}

/// A new process's index, with one slot as it was in another's.
fn restarted(index: &Index, capacity_blocks: Option<u64>, now_s: f64) -> Arc<Index> {
    let restarted = Arc::new(Index::new(options()));
    restarted.add_slot(0, Feed::Exact, capacity_blocks);
    let mut restoring = Restoring::new(Arc::clone(&restarted), index.record(0, now_s), 0, now_s);
    while restoring.step(now_s) {}
    restarted
}

#[test]
fn a_slot_in_doubt_stays_so_when_the_router_restarts() {
    let index = index(1);
    let tokens = prompt(0, 2);
    store(&index, 0, &tokens, 1, None);
    index.doubt(0);
    let index = restarted(&index, None, 0.0);
    index.set_stale(0, false);
    store(&index, 0, &tokens, 1, None);
    remove(&index, 0, 2);
    assert_eq!(overlap(&index, &tokens, 0.0).device, [1]);
}

#[test]
fn what_a_stale_slot_predicted_outlives_a_restart_until_the_stream_answers() {
    let (tokens, later_s) = (prompt(0, 3), options().predicted_ttl_s + 1.0);
    let answers: [fn(&Index); 2] = [|index| index.set_stale(0, false), |index| index.forget_confirmed(0)];
    for answer in answers {
        let index = index(1);
        index.set_stale(0, true);
        index.dispatched(1, &hashes(&index, &tokens), 0, 0.0);
        index.released(1);
        let index = restarted(&index, None, 1.0);
        assert_eq!(overlap(&index, &tokens, later_s).device, [3]);
        assert_eq!(index.slot_stats(0).unwrap().unconfirmed, 0);
        answer(&index);
        assert_eq!(overlap(&index, &tokens, later_s).device, [0]);
    }
}

#[test]
fn a_stale_slot_is_after_a_restart_what_it_was_when_its_stream_stays_away() {
    let index = index(1);
    let tokens = prompt(0, 3);
    store(&index, 0, &tokens[..8], 1, None);
    index.set_stale(0, true);
    index.dispatched(1, &hashes(&index, &tokens), 0, 0.0);
    let index = restarted(&index, None, 1.0);
    index.set_stale(0, true);
    assert_eq!(overlap(&index, &tokens, 1.0).device, [3]);
}

#[test]
fn unverified_facts_leave_room_for_what_is_sent_now_and_capacity_bounds_that() {
    let index = index(1);
    store(&index, 0, &prompt(0, 4), 1, None);
    let index = restarted(&index, Some(4), 0.0);
    index.dispatched(1, &hashes(&index, &prompt(100, 3)), 0, 0.0);
    assert_eq!(overlap(&index, &prompt(100, 3), 0.0).device, [3]);
    index.dispatched(2, &hashes(&index, &prompt(200, 3)), 0, 0.0);
    assert_eq!(overlap(&index, &prompt(100, 3), 0.0).device, [1]);
    assert_eq!(overlap(&index, &prompt(0, 4), 0.0).device, [4]);
}

#[test]
fn an_approximate_replica_forgets_what_was_used_longest_ago() {
    let index = Index::new(options());
    index.add_slot(0, Feed::Approximate, Some(4));
    let (old, new) = (prompt(0, 3), prompt(100, 2));
    index.dispatched(1, &hashes(&index, &old), 0, 0.0);
    index.dispatched(2, &hashes(&index, &new), 0, 1.0);
    assert_eq!(overlap(&index, &old, 1.0).device, [2]);
    assert_eq!(overlap(&index, &new, 1.0).device, [2]);
    let columns = overlap(&index, &old, 1.0);
    assert_eq!((columns.resident, columns.evicted), (vec![4], vec![1]));
}

#[test]
fn capacity_takes_the_end_of_the_oldest_prompt_and_leaves_what_later_ones_share() {
    let index = index(0);
    index.add_slot(0, Feed::Approximate, Some(5));
    let (old, new) = (prompt(0, 4), [prompt(0, 2), prompt(100, 2)].concat());
    index.dispatched(1, &hashes(&index, &old), 0, 0.0);
    index.dispatched(2, &hashes(&index, &new), 0, 1.0);
    assert_eq!((overlap(&index, &old, 1.0).device, overlap(&index, &new, 1.0).device), (vec![3], vec![4]));
    // The shortened prompt is dispatched again: now the other one is the oldest.
    index.dispatched(3, &hashes(&index, &old), 0, 2.0);
    assert_eq!((overlap(&index, &old, 2.0).device, overlap(&index, &new, 2.0).device), (vec![4], vec![3]));
    (1..=3).for_each(|id| index.released(id));
    assert_eq!(overlap(&index, &old, 700.0).device, [0]);
    assert_eq!(index.stats().blocks, 0);
}

#[test]
fn a_withdrawn_request_leaves_what_an_equal_one_computes() {
    let index = index(1);
    let tokens = prompt(0, 3);
    index.dispatched(1, &hashes(&index, &tokens), 0, 0.0);
    index.dispatched(2, &hashes(&index, &tokens), 0, 0.0);
    index.withdrawn(1);
    assert_eq!(overlap(&index, &tokens, 0.0).device, [3], "the other one is still in flight");
}

#[test]
fn without_an_event_a_withdrawn_request_leaves_nothing_where_there_are_events() {
    let index = index(1);
    let tokens = prompt(0, 3);
    for (slot, feed, left) in [(0, Feed::Exact, 0), (1, Feed::Approximate, 3)] {
        index.add_slot(slot, feed, None);
        index.dispatched(1, &hashes(&index, &tokens), slot, 0.0);
        index.released(1);
        index.dispatched(2, &hashes(&index, &tokens), slot, 0.0);
        index.withdrawn(2);
        let columns = overlap(&index, &tokens, 0.0);
        assert_eq!((columns.device[slot as usize], columns.active[slot as usize]), (left, 0));
    }
}

#[test]
fn a_block_is_found_behind_its_parent_after_that_was_away() {
    let index = index(1);
    let tokens = prompt(0, 4);
    store(&index, 0, &tokens, 1, None);
    remove(&index, 0, 2);
    store(&index, 0, &prompt(500, 1), 50, None);
    assert_eq!(overlap(&index, &tokens, 0.0).device, [1]);
    store(&index, 0, &tokens[4..8], 2, Some(1));
    assert_eq!(overlap(&index, &tokens, 0.0).device, [4]);
    assert_eq!(index.stats().blocks, 5);
}

#[test]
fn an_evicted_block_that_is_needed_again_is_regretted_once() {
    let index = index(2);
    let tokens = prompt(0, 2);
    store(&index, 0, &tokens, 1, None);
    remove(&index, 0, 2);
    index.dispatched(1, &hashes(&index, &tokens), 1, 0.0);
    index.dispatched(2, &hashes(&index, &tokens), 1, 0.0);
    let columns = overlap(&index, &tokens, 0.0);
    assert_eq!((columns.evicted, columns.regretted), (vec![1, 0], vec![1, 0]));
}

#[test]
fn age_is_the_time_since_the_prefix_was_last_dispatched() {
    let index = index(2);
    let tokens = prompt(0, 8);
    assert_eq!(overlap(&index, &tokens, 0.0).age_s, [-1.0, -1.0]);
    index.dispatched(1, &hashes(&index, &tokens[..16]), 1, 10.0);
    store(&index, 1, &tokens[..24], 1, None);
    let columns = overlap(&index, &tokens, 12.5);
    assert_eq!(columns.age_s, [-1.0, 2.5]);
    assert_eq!(columns.frontier_key, Some(hashes(&index, &tokens)[5].0));
}

// bug 33
#[test]
fn room_is_made_from_predictions_first_and_then_from_the_largest_slot() {
    let index = index_with(IndexOptions { facts_max: 6, ..options() }, 2);
    store(&index, 0, &prompt(0, 4), 1, None);
    store(&index, 1, &prompt(100, 2), 11, None);
    index.dispatched(1, &hashes(&index, &prompt(200, 2)), 1, 0.0);
    assert_eq!((index.stats().predicted_facts, index.stats().confirmed_facts), (0, 6));
    store(&index, 1, &prompt(300, 1), 21, None);
    let stats = index.stats();
    assert_eq!((stats.confirmed_facts, stats.evicted_for_room), (6, 3));
    assert_eq!(index.slot_stats(0).unwrap().confirmed, 3);
}

// bug 34, 51
#[test]
fn a_removed_slot_leaves_nothing() {
    let index = index(70);
    store(&index, 69, &prompt(0, 4), 1, None);
    index.dispatched(1, &hashes(&index, &prompt(100, 4)), 69, 0.0);
    index.remove_slot(69);
    let stats = index.stats();
    assert_eq!((stats.blocks, stats.in_flight, stats.confirmed_facts), (0, 0, 0));
    index.released(1);
    index.add_slot(69, Feed::Exact, None);
    assert_eq!(overlap(&index, &prompt(0, 4), 0.0).device[69], 0);
}

// bug 37
#[test]
fn facts_survive_more_slots_than_one_word_holds() {
    let index = index(2);
    let tokens = prompt(0, 3);
    store(&index, 1, &tokens, 1, None);
    index.add_slot(130, Feed::Exact, None);
    store(&index, 130, &tokens[..8], 1, None);
    let device = overlap(&index, &tokens, 0.0).device;
    assert_eq!((device[1], device[130], device.len()), (3, 2, 131));
}

#[test]
fn another_block_size_is_reported_and_ignored() {
    let index = index(1);
    let other = Stored { block_size: 8, ..stored(&prompt(0, 2), 1, None) };
    let report = apply(&index, 0, vec![KvEvent::Stored(Box::new(Stored { block_hashes: names(1, 1), ..other }))], 0.0);
    assert_eq!(report.other_block_size, Some(8));
    assert_eq!(index.stats().blocks, 0);
}

/// Stores a prompt in full attention (group 1) and the named blocks of it in a window group (group 0).
fn store_hybrid(index: &Index, tokens: &[u32], retained: &[u64], window: u32) {
    let sparse = Stored {
        block_hashes: retained.iter().copied().map(EngineHash).collect(),
        group: Some(0),
        kind: Some(SpecKind::Window),
        window: Some(window),
        ..stored(tokens, 1, None)
    };
    let dense = Stored { group: Some(1), kind: Some(SpecKind::Full), ..stored(tokens, 1, None) };
    apply(index, 0, vec![KvEvent::Stored(Box::new(sparse)), KvEvent::Stored(Box::new(dense))], 0.0);
}

// bug 42
#[test]
fn a_hybrid_prefix_ends_where_the_window_before_it_is_whole() {
    let index = index(1);
    let tokens = prompt(0, 8);
    // A window of 9 tokens needs the two blocks before the end.
    store_hybrid(&index, &tokens, &[3, 4, 7, 8], 9);
    assert_eq!(overlap(&index, &tokens, 0.0).device, [8]);
    assert_eq!(overlap(&index, &tokens[..28], 0.0).device, [4]);
    assert_eq!(overlap(&index, &tokens[..12], 0.0).device, [0]);
    remove_from(&index, 0, &[8], Tier::Gpu, Some(0));
    assert_eq!(overlap(&index, &tokens, 0.0).device, [4]);
    remove_from(&index, 0, &[4], Tier::Gpu, Some(1));
    assert_eq!(overlap(&index, &tokens, 0.0).device, [0]);
}

#[test]
fn a_short_hybrid_prompt_needs_all_its_blocks_in_the_window() {
    let index = index(1);
    store_hybrid(&index, &prompt(0, 2), &[1, 2], 100);
    assert_eq!(overlap(&index, &prompt(0, 2), 0.0).device, [2]);
    remove_from(&index, 0, &[1], Tier::Gpu, Some(0));
    assert_eq!(overlap(&index, &prompt(0, 2), 0.0).device, [0]);
}

#[test]
fn lookahead_tokens_separate_blocks_only_where_the_index_hashes_with_them() {
    let tokens = [1, 2, 3, 4];
    let ahead = |token: u32| Stored { lookahead: 1, lookahead_tokens: vec![token], ..stored(&tokens, 1, None) };
    for (lookahead, depths) in [(1, [1, 0]), (0, [1, 1])] {
        let index = index_with(IndexOptions { lookahead, ..options() }, 1);
        let report = apply(&index, 0, vec![KvEvent::Stored(Box::new(ahead(9)))], 0.0);
        assert_eq!(report.lookahead, 1);
        let prompts = [[1, 2, 3, 4, 9], [1, 2, 3, 4, 8]];
        assert_eq!(prompts.map(|prompt| overlap(&index, &prompt, 0.0).device[0]), depths);
    }
}
