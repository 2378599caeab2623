//! The fleet on its own: when time stops, where requests go, what is told.

use warmfront_core::index::IndexOptions;
use warmfront_core::mailbox::{Event, RequestId, Slot};
use warmfront_sim::content::Segment;
use warmfront_sim::engine::{EngineConfig, Latency};
use warmfront_sim::fleet::{Arrival, Fleet, FleetOptions};

const BLOCK_SIZE: u32 = 16;

/// Steps of a second, and a hundredth for each prompt token.
fn config(blocks: u32) -> EngineConfig {
    let latency = Latency { base_s: 1.0, prefill_token_s: 0.01, host_token_s: 0.001, ..Latency::default() };
    EngineConfig {
        latency,
        blocks,
        block_size: BLOCK_SIZE,
        max_model_tokens: 512,
        max_batched_tokens: 512,
        max_sequences: 16,
        host_blocks: 0,
        disk_blocks: 0,
        adapter_slots: 0,
    }
}

fn fleet(configs: &[EngineConfig]) -> Fleet {
    let mut fleet = Fleet::new(FleetOptions {
        index: IndexOptions { block_size: BLOCK_SIZE, ..IndexOptions::default() },
        publish: true,
        delay_s: 0.5,
        loss: 0.0,
        seed: 0,
        trace: true,
        adapters: vec![],
    });
    for config in configs {
        let slot = fleet.join(config.clone(), true, vec![], 0.0).unwrap();
        fleet.start(slot);
    }
    fleet.probe();
    fleet.take_events();
    fleet
}

fn arrive(fleet: &mut Fleet, id: RequestId, prompt: &[(u64, u32)], output_tokens: u32) {
    let prompt = prompt.iter().map(|&(content, tokens)| Segment { content, tokens }).collect();
    fleet.arrive(Arrival {
        id,
        prompt,
        output_tokens,
        output_tokens_max: None,
        answer: None,
        adapter: None,
        flow: "default".into(),
        priority: 0,
        turn: 0,
        affinity_key: None,
    });
    assert!(matches!(fleet.take_events()[..], [Event::Arrived(_)]));
}

fn send(fleet: &mut Fleet, id: RequestId, slot: Slot) {
    fleet.predict(id, slot).unwrap();
    fleet.dispatch(id, &[slot]).unwrap();
}

fn near(left: f64, right: f64) -> bool {
    (left - right).abs() < 1e-9
}

#[test]
fn time_stops_at_first_token_and_end_and_nowhere_between() {
    let mut fleet = fleet(&[config(33)]);
    arrive(&mut fleet, 7, &[(1, 100)], 5);
    send(&mut fleet, 7, 0);
    assert!(near(fleet.advance(100.0), 2.0));
    assert!(matches!(fleet.take_events()[..], [Event::FirstToken { id: 7, slot: 0, .. }]));
    assert!(near(fleet.advance(100.0), 6.0));
    let events = fleet.take_events();
    let [Event::Finished { usage: Some(usage), chunks, .. }] = &events[..] else { panic!("{events:?}") };
    assert_eq!((usage.prompt_tokens, usage.cached_tokens, usage.output_tokens), (Some(100), Some(0), Some(5)));
    assert_eq!(*chunks, 4);
    assert_eq!(fleet.gaps().iter().map(|(_, count)| count).sum::<u64>(), 4);
    assert!(near(fleet.busy_s()[0], 6.0));
    assert!(near(fleet.advance(100.0), 100.0));
}

#[test]
fn a_request_that_comes_into_quiet_decoding_waits_for_the_end_of_the_step_under_way() {
    let mut fleet = fleet(&[config(33)]);
    arrive(&mut fleet, 1, &[(1, 17)], 12);
    send(&mut fleet, 1, 0);
    fleet.advance(100.0);
    fleet.take_events();
    let first_s = fleet.now_s();
    fleet.advance(first_s + 2.5);
    arrive(&mut fleet, 2, &[(2, 50)], 1);
    send(&mut fleet, 2, 0);
    assert!(near(fleet.advance(100.0), first_s + 3.0 + 1.5));
    assert!(matches!(fleet.take_events()[0], Event::FirstToken { id: 2, .. }));
    let decodes: Vec<u64> = fleet.trace().iter().map(|step| step.decodes).collect();
    assert_eq!(decodes, [0, 1, 1, 1, 1]);
}

#[test]
fn events_reach_the_index_after_their_delay() {
    let mut fleet = fleet(&[config(33)]);
    arrive(&mut fleet, 1, &[(1, 64)], 2);
    fleet.dispatch(1, &[0]).unwrap();
    fleet.advance(100.0);
    fleet.take_events();
    arrive(&mut fleet, 2, &[(1, 64), (2, 10)], 2);
    assert_eq!(fleet.overlap(2).unwrap().device, [0]);
    fleet.advance(fleet.now_s() + 0.5);
    assert_eq!(fleet.overlap(2).unwrap().device, [64]);
    assert_eq!(fleet.overlap(2).unwrap().confirmed, [64]);
}

#[test]
fn a_dead_replica_is_passed_over_and_when_all_are_dead_the_router_is_asked_again() {
    let mut fleet = fleet(&[config(33), config(33)]);
    fleet.crash(0);
    arrive(&mut fleet, 1, &[(1, 64)], 2);
    fleet.dispatch(1, &[0, 1]).unwrap();
    assert!(matches!(fleet.take_events()[..], [Event::Moved { id: 1, slot: 1, .. }]));
    fleet.crash(1);
    let events = fleet.take_events();
    assert!(matches!(events[..], [Event::Failed { id: 1, began: true, .. }]), "what was sent is lost: {events:?}");
    arrive(&mut fleet, 2, &[(1, 64)], 2);
    for may_ask_again in [true, true, false] {
        fleet.dispatch(2, &[0]).unwrap();
        let events = fleet.take_events();
        assert!(matches!(events[..], [Event::Failed { id: 2, began, .. }] if began != may_ask_again), "{events:?}");
    }
    assert!(fleet.dispatch(2, &[0]).is_err());
}

#[test]
fn gaps_add_up_to_the_time_from_first_to_last_token_also_across_preemptions() {
    let mut fleet = fleet(&[EngineConfig { max_model_tokens: 320, ..config(21) }]);
    for id in [1, 2] {
        arrive(&mut fleet, id, &[(id, 150)], 60);
        send(&mut fleet, id, 0);
    }
    let (mut ended, mut streaming_s) = (0, 0.0);
    while ended < 2 {
        fleet.advance(1e6);
        for event in fleet.take_events() {
            match event {
                Event::FirstToken { time_s, .. } => streaming_s -= time_s,
                Event::Finished { time_s, .. } => (ended, streaming_s) = (ended + 1, streaming_s + time_s),
                other => panic!("{other:?}"),
            }
        }
    }
    assert!(fleet.preemptions() > 0);
    fleet.pace();
    let events = fleet.take_events();
    let [Event::Paced { gaps, gap_seconds, .. }] = &events[..] else { panic!("{events:?}") };
    assert_eq!(gaps[..], [2 * 59]);
    assert!(near(gap_seconds[0], streaming_s), "{gap_seconds:?}, {streaming_s}");
    assert_eq!(fleet.gaps().iter().map(|(_, count)| count).sum::<u64>(), 2 * 59);
}

#[test]
fn blocks_of_a_request_are_known_until_time_moves_on_from_its_end() {
    let mut fleet = fleet(&[config(33)]);
    arrive(&mut fleet, 1, &[(1, 64)], 1);
    send(&mut fleet, 1, 0);
    fleet.advance(100.0);
    assert_eq!(fleet.take_events().len(), 2);
    assert_eq!(fleet.blocks(1).unwrap().len(), 4);
    fleet.advance(100.0);
    assert!(fleet.blocks(1).is_err());
}

/// A fleet of one whose device holds one prompt, after two of them; then the first comes again.
fn after_eviction(host_blocks: u32, disk_blocks: u32) -> Fleet {
    let mut fleet = fleet(&[EngineConfig { host_blocks, disk_blocks, max_model_tokens: 320, ..config(21) }]);
    for id in [1, 2] {
        arrive(&mut fleet, id, &[(id, 300)], 1);
        send(&mut fleet, id, 0);
        fleet.advance(fleet.now_s() + 50.0);
        fleet.take_events();
        fleet.advance(fleet.now_s() + 50.0);
    }
    arrive(&mut fleet, 3, &[(1, 300)], 1);
    fleet
}

#[test]
fn what_falls_out_of_the_host_is_told_to_be_on_disk_until_it_is_gone_from_there() {
    for (host_blocks, disk_blocks, expected) in [(4, 40, [16, 80, 288]), (0, 40, [16, 16, 288]), (4, 4, [16, 80, 144])]
    {
        let mut fleet = after_eviction(host_blocks, disk_blocks);
        let overlap = fleet.overlap(3).unwrap();
        assert_eq!([overlap.device[0], overlap.host[0], overlap.disk[0]], expected, "{host_blocks} + {disk_blocks}");
    }
}

#[test]
fn what_an_evicted_block_becomes_is_told_by_tier() {
    let mut fleet = after_eviction(40, 0);
    let overlap = fleet.overlap(3).unwrap();
    assert_eq!((overlap.device[0], overlap.host[0]), (16, 288), "the tail went first");
    send(&mut fleet, 3, 0);
    fleet.advance(fleet.now_s() + 50.0);
    let events = fleet.take_events();
    let Event::Finished { usage: Some(usage), .. } = &events[1] else { panic!("{events:?}") };
    assert_eq!(usage.cached_tokens, Some(288));
}

/// A fleet of one that is 0.6 s away, there and back.
fn far_fleet() -> Fleet {
    let mut fleet = fleet(&[]);
    let slot = fleet.join(config(33), true, vec![], 0.6).unwrap();
    fleet.start(slot);
    fleet.probe();
    fleet.take_events();
    fleet
}

#[test]
fn a_far_replica_gets_requests_late_and_its_words_are_heard_late() {
    let mut fleet = far_fleet();
    arrive(&mut fleet, 7, &[(1, 100)], 5);
    send(&mut fleet, 7, 0);
    assert!(near(fleet.advance(100.0), 0.3 + 2.0 + 0.3));
    let events = fleet.take_events();
    let [Event::FirstToken { id: 7, time_s, .. }] = events[..] else { panic!("{events:?}") };
    assert!(near(time_s, 2.6));
    assert_eq!(fleet.overlap(7).unwrap().active, [96], "it has not ended for the router");
    assert!(near(fleet.advance(100.0), 6.6));
    assert!(matches!(fleet.take_events()[..], [Event::Finished { id: 7, chunks: 4, .. }]));
    assert!(near(fleet.busy_s()[0], 6.0), "the engine computes as a near one does");
    assert_eq!(fleet.gaps().iter().map(|(_, count)| count).sum::<u64>(), 4);
}

#[test]
fn what_is_under_way_when_a_far_replica_dies_is_lost() {
    let mut fleet = far_fleet();
    for (id, output_tokens) in [(1, 1), (2, 5)] {
        arrive(&mut fleet, id, &[(id, 50)], output_tokens);
        send(&mut fleet, id, 0);
    }
    assert!(near(fleet.advance(2.4), 2.4), "request 1 has ended, and nobody knows");
    arrive(&mut fleet, 3, &[(3, 50)], 1);
    send(&mut fleet, 3, 0);
    fleet.crash(0);
    fleet.start(0);
    let failed: Vec<RequestId> =
        fleet.take_events().iter().map(|event| if let Event::Failed { id, .. } = event { *id } else { 0 }).collect();
    assert_eq!(failed, [1, 2, 3]);
    assert!(near(fleet.advance(100.0), 100.0));
    assert!(fleet.take_events().is_empty());
}

#[test]
fn a_replica_that_stops_reusing_goes_on_publishing_and_may_begin_again() {
    let mut fleet = fleet(&[config(33)]);
    let mut cached = Vec::new();
    for (id, caching) in [(1, true), (2, false), (3, true)] {
        fleet.set_caching(0, caching);
        arrive(&mut fleet, id, &[(1, 64), (id + 1, 10)], 1);
        let held = fleet.overlap(id).unwrap().device[0];
        send(&mut fleet, id, 0);
        fleet.advance(fleet.now_s() + 50.0);
        let events = fleet.take_events();
        let Event::Finished { usage: Some(usage), .. } = &events[1] else { panic!("{events:?}") };
        cached.push((held, usage.cached_tokens.unwrap()));
        fleet.advance(fleet.now_s() + 50.0);
    }
    assert_eq!(cached, [(0, 0), (64, 0), (64, 64)]);
}
