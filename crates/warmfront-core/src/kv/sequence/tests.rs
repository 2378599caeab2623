//! A simulated engine whose buffer, losses, restarts and broken replays are drawn by proptest, in virtual time.

use std::collections::VecDeque;

use proptest::prelude::*;

use super::*;

/// What happens in the world, one step.
#[derive(Clone, Debug)]
enum Step {
    Publish(usize),
    /// Published, but the socket drops it on the way to us.
    PublishLost(usize),
    Deliver(usize),
    DeliverReplay(usize),
    /// A new process that has already published so many batches when we reach it.
    Restart(usize),
    /// The connection breaks; the process stays.
    Blip,
    Probe,
    /// Faults of the next replay.
    SpoilReplay(Spoil),
    /// We write down where we are and what we know.
    Remember,
    /// Our own process is another one, and goes on from what was written down.
    Resume,
}

#[derive(Clone, Debug)]
enum Spoil {
    NoAnswer,
    CutAfter(usize),
    /// Never the first: a full socket drops what is newest.
    HoleAt(usize),
}

#[derive(Clone, Debug)]
enum Wire {
    Message(u64, Bytes),
    Closed,
}

#[derive(Clone, Debug)]
enum Answer {
    Batch(u64, Bytes),
    End,
    Failure,
}

/// Batches applied since the last forget or doubt, and those before.
type Facts = [Vec<(u64, Bytes)>; 2];

/// One engine, the sockets to it and the index, all in plain queues.
struct World {
    sequence: Sequence,
    life: u32,
    log: Vec<Bytes>,
    buffer: usize,
    wire: VecDeque<Wire>,
    connected: bool,
    replay: VecDeque<Answer>,
    spoil: Option<Spoil>,
    /// Applied since the last forget or doubt.
    index: Vec<(u64, Bytes)>,
    /// Applied before that and since the last forget: still believed.
    doubted: Vec<(u64, Bytes)>,
    trusted: bool,
    remembered: Option<(Position, Facts)>,
}

impl World {
    fn new(buffer: usize, can_replay: bool) -> Self {
        let mut world = Self {
            sequence: Sequence::new(can_replay),
            life: 0,
            log: Vec::new(),
            buffer,
            wire: VecDeque::new(),
            connected: false,
            replay: VecDeque::new(),
            spoil: None,
            index: Vec::new(),
            doubted: Vec::new(),
            trusted: false,
            remembered: None,
        };
        world.connect();
        world
    }

    fn publish(&mut self, batches: usize, lost: bool) {
        for _ in 0..batches {
            let number = self.log.len() as u64;
            let payload = Bytes::from(format!("life {} batch {number}", self.life));
            self.log.push(payload.clone());
            if self.connected && !lost {
                self.wire.push_back(Wire::Message(number, payload));
            }
        }
    }

    fn connect(&mut self) {
        self.connected = true;
        self.feed(Input::Connected);
    }

    fn close(&mut self) {
        if self.connected {
            self.wire.push_back(Wire::Closed);
            self.connected = false;
        }
    }

    fn run(&mut self, step: &Step) {
        match step {
            Step::Publish(batches) => self.publish(*batches, false),
            Step::PublishLost(batches) => self.publish(*batches, true),
            Step::Deliver(messages) => (0..*messages).for_each(|_| self.deliver()),
            Step::DeliverReplay(answers) => (0..*answers).for_each(|_| self.deliver_replay()),
            Step::Restart(batches) => {
                self.close();
                self.life += 1;
                self.log.clear();
                self.publish(*batches, true);
            }
            Step::Blip => self.close(),
            Step::Probe => self.feed(Input::Probe),
            Step::SpoilReplay(spoil) => self.spoil = Some(spoil.clone()),
            Step::Remember => {
                let facts = [self.index.clone(), self.doubted.clone()];
                self.remembered = self.sequence.position().map(|position| (position, facts));
            }
            Step::Resume => self.resume(),
        }
        self.check();
    }

    /// Restored facts are believed on credit, which is not the trust that the invariant speaks of.
    fn resume(&mut self) {
        let can_replay = self.sequence.can_replay;
        (self.sequence, [self.index, self.doubted]) = match self.remembered.clone() {
            Some((position, facts)) => (Sequence::resume(can_replay, position), facts),
            None => (Sequence::new(can_replay), Default::default()),
        };
        self.trusted = false;
        self.wire.clear();
        self.replay.clear();
        self.connect();
    }

    fn deliver(&mut self) {
        match self.wire.pop_front() {
            None => {}
            Some(Wire::Message(number, payload)) => self.feed(Input::Live { number, payload }),
            Some(Wire::Closed) => {
                self.replay.clear();
                self.feed(Input::Disconnected("closed".into()));
                self.connect();
            }
        }
    }

    fn deliver_replay(&mut self) {
        match self.replay.pop_front() {
            Some(Answer::Batch(number, payload)) => self.feed(Input::Replayed { number, payload }),
            Some(Answer::End) => self.feed(Input::ReplayEnded),
            Some(Answer::Failure) => self.feed(Input::ReplayFailed("no answer".into())),
            None => {}
        }
    }

    fn feed(&mut self, input: Input) {
        for action in self.sequence.take(input) {
            match action {
                Action::Apply { number, payload } => self.index.push((number, payload)),
                Action::Replay { from, .. } => self.answer(from),
                Action::Forget => {
                    self.index.clear();
                    self.doubted.clear();
                }
                Action::Doubt => self.doubted.append(&mut self.index),
                Action::Trust(trusted) => self.trusted = trusted,
            }
        }
    }

    fn answer(&mut self, from: u64) {
        let kept = self.log.len().saturating_sub(self.buffer);
        let mut answers: Vec<Answer> = (kept.max(from as usize)..self.log.len())
            .map(|number| Answer::Batch(number as u64, self.log[number].clone()))
            .collect();
        answers.push(Answer::End);
        match self.spoil.take() {
            Some(Spoil::NoAnswer) => answers = vec![Answer::Failure],
            Some(Spoil::CutAfter(kept)) => {
                answers.truncate(kept);
                answers.push(Answer::Failure);
            }
            Some(Spoil::HoleAt(place)) if place + 1 < answers.len() => drop(answers.remove(place)),
            Some(Spoil::HoleAt(_)) | None => {}
        }
        self.replay = answers.into();
    }

    /// The invariant of the module's text. While a broken connection is not noticed yet, nothing can be said.
    fn check(&self) {
        if !self.trusted || self.wire.iter().any(|wire| matches!(wire, Wire::Closed)) {
            return;
        }
        for pair in self.index.windows(2) {
            assert_eq!(pair[0].0 + 1, pair[1].0, "trusted, but with a hole");
        }
        for (number, payload) in self.doubted.iter().chain(&self.index) {
            assert_eq!(Some(payload), self.log.get(*number as usize), "trusted, but of another process");
        }
    }

    /// Lets everything in flight arrive and the periodic check run.
    fn settle(&mut self) {
        self.spoil = None;
        for _ in 0..8 {
            while !self.wire.is_empty() || !self.replay.is_empty() {
                self.deliver();
                self.check();
                self.deliver_replay();
                self.check();
            }
            self.run(&Step::Probe);
        }
    }

    fn first(&self) -> Option<u64> {
        self.index.first().map(|(number, _)| *number)
    }

    fn last(&self) -> Option<u64> {
        self.index.last().map(|(number, _)| *number)
    }
}

fn spoil() -> impl Strategy<Value = Spoil> {
    prop_oneof![Just(Spoil::NoAnswer), (0..6_usize).prop_map(Spoil::CutAfter), (1..6_usize).prop_map(Spoil::HoleAt)]
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (1..6_usize).prop_map(Step::Publish),
        2 => (1..4_usize).prop_map(Step::PublishLost),
        4 => (1..12_usize).prop_map(Step::Deliver),
        4 => (1..12_usize).prop_map(Step::DeliverReplay),
        1 => (0..20_usize).prop_map(Step::Restart),
        1 => Just(Step::Blip),
        1 => Just(Step::Probe),
        1 => spoil().prop_map(Step::SpoilReplay),
        1 => Just(Step::Remember),
        1 => Just(Step::Resume),
    ]
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    proptest::collection::vec(step(), 0..60)
}

/// `PROPTEST_CASES` overrides; the seed of a failing case is printed and kept by proptest.
fn config() -> ProptestConfig {
    ProptestConfig { failure_persistence: None, ..ProptestConfig::default() }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn with_the_whole_log_replayable_the_index_ends_equal_to_it(steps in steps()) {
        let mut world = World::new(usize::MAX, true);
        for step in &steps {
            world.run(step);
        }
        world.settle();
        prop_assert!(world.trusted);
        prop_assert_eq!(world.index.len(), world.log.len());
        prop_assert_eq!(world.sequence.complete(), !world.log.is_empty());
    }

    #[test]
    fn with_a_short_buffer_the_index_ends_right_or_says_what_is_missing(steps in steps(), buffer in 1..8_usize) {
        let mut world = World::new(buffer, true);
        for step in &steps {
            world.run(step);
        }
        world.settle();
        prop_assert!(world.trusted);
        prop_assert_eq!(world.last(), (world.log.len() as u64).checked_sub(1));
        prop_assert!(world.index.len() >= buffer.min(world.log.len()));
        prop_assert_eq!(world.sequence.complete(), world.first() == Some(0));
    }

    #[test]
    fn without_a_replay_endpoint_a_stream_is_live_at_its_end_unless_too_much_of_it_is_lost(steps in steps()) {
        let mut world = World::new(0, false);
        for step in &steps {
            world.run(step);
        }
        world.settle();
        world.run(&Step::Publish(1));
        world.settle();
        prop_assert_eq!(world.trusted, world.sequence.phase() == Phase::Live);
        if world.sequence.phase() == Phase::Lossy {
            prop_assert!(world.index.is_empty() && world.doubted.is_empty());
            return Ok(());
        }
        prop_assert_eq!(world.last(), Some(world.log.len() as u64 - 1));
        prop_assert!(!world.sequence.complete() || world.first() == Some(0));
    }
}

fn replays(actions: &[Action]) -> Vec<u64> {
    actions
        .iter()
        .filter_map(|action| match action {
            Action::Replay { from, .. } => Some(*from),
            _ => None,
        })
        .collect()
}

fn batch(number: u64) -> Bytes {
    Bytes::from(format!("batch {number}"))
}

/// Connected, replayed 0 to `last`, live.
fn caught_up(last: u64) -> Sequence {
    let mut sequence = Sequence::new(true);
    sequence.take(Input::Connected);
    for number in 0..=last {
        sequence.take(Input::Replayed { number, payload: batch(number) });
    }
    sequence.take(Input::ReplayEnded);
    assert_eq!(sequence.phase(), Phase::Live);
    sequence
}

// bug 45
#[test]
fn a_first_connection_asks_for_the_log_from_its_start() {
    assert_eq!(replays(&Sequence::new(true).take(Input::Connected)), [0]);
}

#[test]
fn a_late_start_is_incomplete_and_live() {
    let mut sequence = Sequence::new(true);
    sequence.take(Input::Connected);
    sequence.take(Input::Replayed { number: 21, payload: batch(21) });
    sequence.take(Input::ReplayEnded);
    assert_eq!((sequence.phase(), sequence.complete(), sequence.last()), (Phase::Live, false, Some(21)));
    assert_eq!(sequence.reason(), Some("events before batch 21 are unknown"));
}

#[test]
fn a_restarted_engine_that_has_passed_the_old_number_is_recognised_by_the_bytes_of_a_batch() {
    let mut sequence = caught_up(50);
    sequence.take(Input::Disconnected("reset".into()));
    assert_eq!(replays(&sequence.take(Input::Connected)), [50]);
    let held = sequence.take(Input::Live { number: 51, payload: Bytes::from_static(b"new 51") });
    assert_eq!(held, [], "a number that fits proves nothing");
    let actions = sequence.take(Input::Replayed { number: 50, payload: Bytes::from_static(b"new 50") });
    assert!(actions.contains(&Action::Forget));
    assert_eq!(replays(&actions), [0]);
    assert_eq!(sequence.counts().restarts, 1);
}

#[test]
fn a_restarted_engine_that_is_behind_is_recognised_by_an_empty_replay() {
    let mut sequence = caught_up(50);
    sequence.take(Input::Disconnected("reset".into()));
    sequence.take(Input::Connected);
    let actions = sequence.take(Input::ReplayEnded);
    assert!(actions.contains(&Action::Forget));
    assert_eq!(replays(&actions), [0]);
}

#[test]
fn numbers_that_go_back_on_one_connection_are_another_process() {
    let mut sequence = caught_up(50);
    sequence.take(Input::Live { number: 51, payload: batch(51) });
    let actions = sequence.take(Input::Live { number: 0, payload: Bytes::from_static(b"new 0") });
    assert!(actions.contains(&Action::Forget));
    assert_eq!(replays(&actions), [0]);
}

#[test]
fn live_messages_that_a_replay_has_overtaken_are_dropped() {
    let mut sequence = caught_up(50);
    assert_eq!(sequence.take(Input::Live { number: 49, payload: batch(49) }), []);
    assert_eq!(sequence.counts().restarts, 0);
}

#[test]
fn a_hole_that_never_fills_puts_what_came_before_it_in_doubt() {
    let mut sequence = caught_up(5);
    let mut actions = sequence.take(Input::Live { number: 8, payload: batch(8) });
    assert_eq!(actions.first(), Some(&Action::Trust(false)));
    for _ in 0..BARREN_REPLAYS_MAX {
        assert_eq!(replays(&actions), [5]);
        sequence.take(Input::Replayed { number: 5, payload: batch(5) });
        actions = sequence.take(Input::Replayed { number: 7, payload: batch(7) });
    }
    assert_eq!(actions, [Action::Doubt, Action::Apply { number: 7, payload: batch(7) }]);
    let actions = sequence.take(Input::ReplayEnded);
    assert_eq!(actions, [Action::Apply { number: 8, payload: batch(8) }, Action::Trust(true)]);
    assert!(!sequence.complete());
}

#[test]
fn messages_held_during_a_replay_are_bounded_and_the_rest_is_replayed() {
    let mut sequence = Sequence::new(true);
    sequence.take(Input::Connected);
    let last = HELD_MESSAGES_MAX as u64 + 10;
    for number in 1..=last {
        sequence.take(Input::Live { number, payload: batch(number) });
    }
    assert!(sequence.held.len() <= HELD_MESSAGES_MAX);
    sequence.take(Input::Replayed { number: 0, payload: batch(0) });
    assert_eq!(replays(&sequence.take(Input::ReplayEnded)), [0], "asked again from the first hole");
    for number in 0..=last {
        sequence.take(Input::Replayed { number, payload: batch(number) });
    }
    sequence.take(Input::ReplayEnded);
    assert_eq!((sequence.phase(), sequence.last(), sequence.complete()), (Phase::Live, Some(last), true));
}

#[test]
fn a_malformed_batch_puts_what_was_applied_in_doubt_and_the_stream_goes_on() {
    let mut sequence = caught_up(5);
    assert_eq!(sequence.take(Input::Malformed("bad".into())), [Action::Doubt]);
    let actions = sequence.take(Input::Live { number: 6, payload: batch(6) });
    assert_eq!(actions, [Action::Apply { number: 6, payload: batch(6) }]);
    assert!(!sequence.complete());
}

#[test]
fn contradictions_rebuild_once_and_are_only_named_after_that() {
    let mut sequence = caught_up(5);
    assert_eq!(replays(&sequence.take(Input::Distrust("64 unknown parents in a row".into()))), [0]);
    for number in 0..=5 {
        sequence.take(Input::Replayed { number, payload: batch(number) });
    }
    sequence.take(Input::ReplayEnded);
    assert_eq!(sequence.take(Input::Distrust("64 unknown parents in a row".into())), []);
    assert_eq!(sequence.reason(), Some("64 unknown parents in a row"));
}

#[test]
fn a_failed_check_of_a_quiet_stream_is_named_and_does_not_distrust() {
    let mut sequence = caught_up(5);
    assert_eq!(replays(&sequence.take(Input::Probe)), [5]);
    assert_eq!(sequence.take(Input::ReplayFailed("no answer".into())), []);
    assert_eq!(sequence.phase(), Phase::Live);
    assert_eq!(sequence.reason(), Some("check for lost events failed: no answer"));
}

/// Live without a replay endpoint; every `step`-th number arrives.
fn thinned(batches: u64, step: u64) -> (Sequence, Vec<Action>) {
    let mut sequence = Sequence::new(false);
    let mut actions = sequence.take(Input::Connected);
    for number in (0..batches * step).step_by(step as usize) {
        actions.extend(sequence.take(Input::Live { number, payload: batch(number) }));
    }
    (sequence, actions)
}

#[test]
fn without_replay_one_hole_puts_what_is_known_in_doubt_and_the_stream_stays_live() {
    let mut sequence = Sequence::new(false);
    sequence.take(Input::Connected);
    sequence.take(Input::Live { number: 0, payload: batch(0) });
    let actions = sequence.take(Input::Live { number: 2, payload: batch(2) });
    assert_eq!(actions, [Action::Doubt, Action::Apply { number: 2, payload: batch(2) }]);
    assert_eq!((sequence.phase(), sequence.counts().gaps), (Phase::Live, 1));
}

#[test]
fn a_stream_that_keeps_losing_batches_is_lossy_and_passes_unread() {
    let (mut sequence, actions) = thinned(20, 2);
    assert_eq!(sequence.phase(), Phase::Lossy);
    assert_eq!(actions.iter().filter(|action| **action == Action::Doubt).count(), LOSSY_HOLES_MIN as usize);
    assert_eq!(&actions[actions.len() - 2..], [Action::Forget, Action::Trust(false)]);
    assert_eq!(sequence.take(Input::Live { number: 40, payload: batch(40) }), []);
    assert_eq!(sequence.take(Input::Malformed("bad".into())), []);
}

#[test]
fn as_many_holes_in_a_long_stream_are_not_lossy() {
    let mut sequence = Sequence::new(false);
    sequence.take(Input::Connected);
    let lost = |number: u64| number % 1000 == 999;
    for number in (0..12_000).filter(|number| !lost(*number)) {
        sequence.take(Input::Live { number, payload: batch(number) });
    }
    assert_eq!((sequence.phase(), sequence.counts().gaps), (Phase::Live, 11));
}

#[test]
fn a_lossy_stream_gets_a_new_chance_with_another_process_and_with_another_connection() {
    let (mut sequence, _) = thinned(20, 2);
    let actions = sequence.take(Input::Live { number: 0, payload: Bytes::from_static(b"new 0") });
    assert_eq!(sequence.phase(), Phase::Live);
    assert_eq!(actions.last(), Some(&Action::Apply { number: 0, payload: Bytes::from_static(b"new 0") }));
    let (mut sequence, _) = thinned(20, 2);
    sequence.take(Input::Disconnected("reset".into()));
    sequence.take(Input::Connected);
    assert_eq!(sequence.phase(), Phase::Live);
}

#[test]
fn a_replay_that_fails_on_a_new_connection_costs_everything_since_it_may_be_another_process() {
    let mut sequence = caught_up(5);
    sequence.take(Input::Disconnected("reset".into()));
    sequence.take(Input::Connected);
    let mut actions = vec![];
    for _ in 0..BARREN_REPLAYS_MAX {
        actions = sequence.take(Input::ReplayFailed("no answer".into()));
    }
    assert!(actions.contains(&Action::Forget) && !actions.contains(&Action::Doubt));
}

/// A sequence that goes on behind batch 4 of a stream, connected.
fn resumed() -> Sequence {
    let position = Position { last: 4, print: xxh3_64(&batch(4)), base: 0, complete: true };
    let mut sequence = Sequence::resume(true, position);
    assert_eq!(
        sequence.take(Input::Connected),
        [Action::Replay { from: 4, again: false }],
        "believed until it answers"
    );
    sequence
}

// bug 45
#[test]
fn a_restarted_router_asks_from_its_stored_position_and_goes_on_where_it_was() {
    let mut sequence = resumed();
    assert_eq!(sequence.take(Input::Replayed { number: 4, payload: batch(4) }), []);
    let next = Input::Replayed { number: 5, payload: batch(5) };
    assert_eq!(sequence.take(next), [Action::Apply { number: 5, payload: batch(5) }]);
    assert_eq!(sequence.take(Input::ReplayEnded), [Action::Trust(true)]);
    assert!(sequence.complete());
}

// bug 45
#[test]
fn a_first_contact_without_a_stored_position_asks_from_the_start() {
    let mut sequence = Sequence::new(true);
    assert_eq!(replays(&sequence.take(Input::Connected)), [0]);
}

// bug 53
#[test]
fn an_engine_that_restarted_while_the_router_was_away_is_forgotten_at_its_first_answer() {
    for answer in [
        Input::ReplayEnded,                                               // it has not come so far yet
        Input::Replayed { number: 4, payload: Bytes::from("another 4") }, // it has, with other contents
        Input::Replayed { number: 9, payload: batch(9) },                 // the hole cannot be filled
        Input::Live { number: 0, payload: batch(0) },
    ] {
        let mut sequence = resumed();
        let mut actions = sequence.take(answer.clone());
        if matches!(answer, Input::Live { .. }) {
            actions = sequence.take(Input::ReplayEnded);
        }
        assert_eq!(actions[..2], [Action::Forget, Action::Trust(false)], "{answer:?}");
        assert_eq!(replays(&actions), [0]);
    }
}

#[test]
fn restored_facts_go_stale_when_the_stream_cannot_be_reached_and_go_when_it_has_no_replay() {
    assert_eq!(resumed().take(Input::Disconnected("refused".into())), [Action::Trust(false)]);
    let position = Position { last: 4, print: 0, base: 0, complete: true };
    let actions = Sequence::resume(false, position).take(Input::Connected);
    assert_eq!(actions, [Action::Forget, Action::Trust(true)]);
}
