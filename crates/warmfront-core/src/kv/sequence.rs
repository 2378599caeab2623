//! What to do with the next message of one replica's event stream: order, gaps, replay, restarts.
//!
//! Pure: no socket, no clock. Inputs are what the sockets saw, actions are what the subscription has to do, and the
//! invariant between them is: whenever the last [`Action::Trust`] was `true`, the batches applied since the last
//! [`Action::Forget`] are of the process that is connected now, and one contiguous run since the last [`Action::Doubt`].
//!
//! Engines number batches from 0 in every process and name no process, so a number alone proves nothing after a
//! reconnect: a restarted engine may already have passed the old number. Every replay therefore starts *at* the last
//! applied batch, and that batch has to come back with the same bytes. Live messages that arrive before the end of the
//! replay are held back and never mixed in between: the two sockets may reach different processes for a moment, and
//! only a run that ends with the messages of one of them can be checked by its last batch later.
//!
//! Batches that lie before the first one we ever see are missing knowledge, not wrong knowledge. Batches lost in the
//! middle may have been removals. One hole makes a little of what is known wrong, while dropping all of it would make
//! the replica look cold although it is warm: its facts stay, in doubt. Where holes keep coming, a stream is worth less
//! than none, since what was sent says more: then it is [`Phase::Lossy`] until another one begins.

use std::collections::BTreeMap;

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

/// Replays in a row that bring nothing new before the hole counts as lost.
pub const BARREN_REPLAYS_MAX: u32 = 3;
/// Answered attempts to win back history that could not be had at first: each sends the engine's whole buffer.
const START_ATTEMPTS_MAX: u32 = 3;
/// Live messages held back while a replay runs.
pub const HELD_MESSAGES_MAX: usize = 16_384;
/// Holes that no replay fills, on one connection, below which a stream is not lossy.
const LOSSY_HOLES_MIN: u64 = 8;
/// Batches for each such hole below which it is.
const LOSSY_BATCHES_A_HOLE: u64 = 100;
/// Bytes held back while a replay runs.
pub const HELD_BYTES_MAX: usize = 64 * 1024 * 1024;

/// What the sockets saw.
#[derive(Clone, Debug)]
pub enum Input {
    Connected,
    Disconnected(String),
    Live {
        number: u64,
        payload: Bytes,
    },
    Replayed {
        number: u64,
        payload: Bytes,
    },
    /// The end marker came. It does not prove that nothing was left out.
    ReplayEnded,
    ReplayFailed(String),
    /// Time to look for a hole behind the last message of a quiet stream.
    Probe,
    /// A batch could not be decoded: what it said is lost.
    Malformed(String),
    /// The applied batches contradict themselves, for example by many unknown parents in a row.
    Distrust(String),
}

/// What the subscription has to do, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    Apply {
        number: u64,
        payload: Bytes,
    },
    /// Ask for everything from `from`, in place of a replay that may still run; `again`: after a pause, since the one
    /// before brought nothing.
    Replay {
        from: u64,
        again: bool,
    },
    /// Drop all confirmed facts of the replica.
    Forget,
    /// Some batches are lost for good: keep the facts, but take any removal for that of the last copy.
    Doubt,
    /// Whether the facts may be used.
    Trust(bool),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    Disconnected,
    CatchingUp,
    Live,
    /// Too much is lost: batches pass unread until another process or connection begins anew.
    Lossy,
}

/// Counts since the subscription began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Holes seen in the numbers, whether or not a replay filled them.
    pub gaps: u64,
    /// Replays asked for, without the periodic checks.
    pub replays: u64,
    /// Times another engine process was recognised.
    pub restarts: u64,
}

/// Where a stream is: enough to go on from there in another process, and to notice that the engine is another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Position {
    /// Number of the last applied batch.
    pub last: u64,
    /// Its xxh3.
    pub print: u64,
    /// First number of the contiguous run that is applied.
    pub base: u64,
    /// Whether that run begins at the engine's start.
    pub complete: bool,
}

#[derive(Clone, Copy, Debug)]
struct Applied {
    number: u64,
    print: u64,
}

#[derive(Clone, Copy, Debug)]
struct Asked {
    purpose: Purpose,
    /// Last applied batch when it was asked; the first answer has to be the same.
    last: Option<Applied>,
    checked: bool,
    /// Lowest and highest number answered.
    first: Option<u64>,
    seen: Option<u64>,
    /// No number was left out in between.
    whole: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Purpose {
    /// Fill what is missing; live messages wait.
    CatchUp,
    /// See whether anything is missing; nothing is applied and live messages pass.
    Check,
    /// See whether history can be had that could not be had earlier.
    CheckStart,
}

impl Asked {
    fn note(&mut self, number: u64) {
        self.whole &= self.seen.is_none_or(|seen| number == seen + 1);
        self.first = self.first.or(Some(number));
        self.seen = self.seen.max(Some(number));
    }
}

/// The state of one stream. See the module's text for the invariant.
#[derive(Debug)]
#[allow(clippy::struct_excessive_bools, reason = "independent facts about one stream")]
pub struct Sequence {
    can_replay: bool,
    phase: Phase,
    applied: Option<Applied>,
    /// First number of the contiguous run that is applied now.
    base: u64,
    held: BTreeMap<u64, Bytes>,
    held_bytes: usize,
    /// Highest live number on this connection.
    newest: Option<u64>,
    /// Set exactly while catching up, and during a check.
    asked: Option<Asked>,
    /// Live messages came since the last probe: a hole would have shown itself.
    busy: bool,
    barren: u32,
    complete: bool,
    /// History was given up because replays failed; how many answered attempts to win it back are left.
    start_attempts: u32,
    distrusted: bool,
    /// What is applied is of the process at the other end of this connection.
    is_same_process: bool,
    /// Facts from before a hole are still believed.
    in_doubt: bool,
    /// Applied on this connection, and holes in that which no replay filled.
    batches: u64,
    holes: u64,
    /// The position is one of a former process and nothing has contradicted it yet: its facts are believed until the
    /// stream answers.
    resumed: bool,
    reason: Option<String>,
    counts: Counts,
    actions: Vec<Action>,
}

impl Sequence {
    pub fn new(can_replay: bool) -> Self {
        Self {
            can_replay,
            phase: Phase::Disconnected,
            applied: None,
            base: 0,
            held: BTreeMap::new(),
            held_bytes: 0,
            newest: None,
            asked: None,
            busy: false,
            barren: 0,
            complete: false,
            start_attempts: 0,
            distrusted: false,
            is_same_process: false,
            in_doubt: false,
            batches: 0,
            holes: 0,
            resumed: false,
            reason: None,
            counts: Counts::default(),
            actions: Vec::new(),
        }
    }

    /// Goes on where a former process was. Its facts may be believed from the start: the first answer of the replay proves
    /// them or makes them be forgotten, and a stream that cannot be reached makes them stale.
    pub fn resume(can_replay: bool, position: Position) -> Self {
        let Position { last, print, base, complete } = position;
        let applied = Some(Applied { number: last, print });
        Self { applied, base, complete, resumed: true, ..Self::new(can_replay) }
    }

    /// Where the stream is; `None`: nothing is applied.
    pub fn position(&self) -> Option<Position> {
        let Applied { number: last, print } = self.applied?;
        Some(Position { last, print, base: self.base, complete: self.complete })
    }

    /// Takes one input and returns what has to be done, in order.
    pub fn take(&mut self, input: Input) -> Vec<Action> {
        match input {
            Input::Connected => self.connected(),
            Input::Disconnected(reason) => self.disconnected(reason),
            Input::Live { number, payload } => self.live(number, payload),
            Input::Replayed { number, payload } => self.replayed(number, payload),
            Input::ReplayEnded => self.replay_ended(),
            Input::ReplayFailed(reason) => self.replay_failed(&reason),
            Input::Probe => self.probe(),
            Input::Malformed(reason) => self.malformed(reason),
            Input::Distrust(reason) => self.distrust(reason),
        }
        std::mem::take(&mut self.actions)
    }

    pub fn phase(&self) -> Phase {
        self.phase
    }

    /// Why the stream is not live, or what is missing although it is.
    pub fn reason(&self) -> Option<&str> {
        self.reason.as_deref()
    }

    /// Number of the last applied batch.
    pub fn last(&self) -> Option<u64> {
        self.applied.map(|applied| applied.number)
    }

    /// Whether everything since the engine's start was applied.
    pub fn complete(&self) -> bool {
        self.complete
    }

    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// Bytes of messages held back.
    pub fn held_bytes(&self) -> usize {
        self.held_bytes
    }

    fn connected(&mut self) {
        self.newest = None;
        self.barren = 0;
        self.is_same_process = false;
        self.drop_held();
        self.count_anew();
        if self.can_replay {
            if self.in_doubt {
                self.forget(); // nothing can tell whether what came before the hole is of this process
            }
            self.catch_up("catching up by replay".into());
            return;
        }
        if self.applied.is_some() {
            self.forget();
        }
        self.go_live(Some("no replay endpoint: events before this connection are unknown".into()));
    }

    fn disconnected(&mut self, reason: String) {
        self.asked = None;
        self.phase = Phase::Disconnected;
        self.resumed = false;
        self.reason = Some(reason);
        self.actions.push(Action::Trust(false));
    }

    fn live(&mut self, number: u64, payload: Bytes) {
        self.busy = true;
        if self.newest.is_some_and(|newest| number <= newest) {
            self.drop_held();
            self.another_process("its numbers went back");
        }
        self.newest = Some(number);
        let may_start = number == 0 || !self.can_replay;
        match (self.phase, self.applied) {
            (Phase::Disconnected | Phase::Lossy, _) => {}
            (Phase::Live, None) if may_start => self.offer(number, payload),
            (Phase::Live, Some(last)) if number <= last.number + 1 => self.offer(number, payload),
            (Phase::Live, _) => {
                self.hold(number, &payload);
                self.gap();
            }
            (Phase::CatchingUp, _) => self.hold(number, &payload),
        }
    }

    /// Applies a batch that is next or the first of all; drops one that is applied already.
    fn offer(&mut self, number: u64, payload: Bytes) {
        if self.applied.is_none() {
            self.base = number;
            self.complete = number == 0;
        } else if self.last() >= Some(number) {
            return;
        }
        self.is_same_process = true;
        self.batches += 1;
        self.applied = Some(Applied { number, print: xxh3_64(&payload) });
        self.actions.push(Action::Apply { number, payload });
    }

    fn gap(&mut self) {
        self.counts.gaps += 1;
        let missing = self.last().map_or(0, |last| last + 1);
        if self.can_replay {
            self.catch_up(format!("batch {missing} was lost on the way"));
        } else {
            self.give_up(format!("batch {missing} was lost and there is no replay endpoint"));
        }
    }

    fn replayed(&mut self, number: u64, payload: Bytes) {
        let Some(asked) = self.asked.as_mut() else { return };
        asked.note(number);
        if asked.checked {
            if asked.purpose == Purpose::CatchUp {
                self.fill(number, payload);
            }
            return;
        }
        match (asked.purpose, asked.last) {
            (Purpose::CheckStart, _) => {}
            (_, None) => {
                asked.checked = true;
                if asked.purpose == Purpose::CatchUp {
                    self.fill(number, payload);
                }
            }
            // An answer from before the point we asked for says nothing.
            (_, Some(last)) if number < last.number => {}
            (_, Some(last)) if number == last.number && xxh3_64(&payload) == last.print => {
                asked.checked = true;
                self.is_same_process = true;
            }
            (_, Some(last)) if number == last.number => self.another_process("a batch has other contents than before"),
            (_, Some(last)) => {
                self.counts.gaps += 1;
                self.rebuild(format!("batches {} to {} are no longer kept by the engine", last.number, number - 1));
            }
        }
    }

    /// Applies a replayed batch. A hole is asked for again, and passed when it stays.
    fn fill(&mut self, number: u64, payload: Bytes) {
        if self.held.get(&number).is_some_and(|held| *held != payload) {
            self.drop_held();
            self.newest = None;
            self.another_process("the replay contradicts the stream");
            return;
        }
        if self.last().is_some_and(|last| number > last + 1) {
            if self.may_ask_again() {
                return;
            }
            if self.is_lossy_with_another_hole() {
                return;
            }
            self.begin_run();
        }
        self.offer(number, payload);
    }

    fn replay_ended(&mut self) {
        let Some(asked) = self.asked else { return };
        match asked.purpose {
            _ if !asked.checked && asked.last.is_some() => self.another_process("it does not have the last batch"),
            Purpose::CatchUp => self.caught_up(),
            Purpose::Check | Purpose::CheckStart => {
                self.end_check(asked);
                if asked.purpose == Purpose::CheckStart && self.is_better(asked) {
                    self.start_attempts = 0;
                    self.rebuild("the start of the stream can be had again".into());
                } else if asked.seen > self.last() {
                    self.gap();
                }
            }
        }
    }

    /// A replay that can be had in full and begins earlier than what is applied.
    fn is_better(&self, asked: Asked) -> bool {
        asked.whole && asked.first.is_some_and(|first| first < self.base)
    }

    /// The end of a replay that was to fill what is missing.
    fn caught_up(&mut self) {
        if self.applied.is_some() || self.held.contains_key(&0) {
            self.apply_held();
        }
        if self.newest > self.last() {
            if !self.may_ask_again() {
                self.give_up("a hole in the replay does not fill".into());
            }
            return;
        }
        let start = (!self.complete && self.applied.is_some()).then_some(self.base);
        self.go_live(start.map(|base| format!("events before batch {base} are unknown")));
    }

    fn replay_failed(&mut self, reason: &str) {
        let Some(asked) = self.asked else { return };
        if self.phase == Phase::Live {
            self.end_check(asked);
            self.reason = Some(format!("check for lost events failed: {reason}"));
        } else if !self.may_ask_again() {
            self.start_attempts = START_ATTEMPTS_MAX;
            self.give_up(format!("replay failed: {reason}"));
        }
    }

    /// Attempts that nobody answered cost the engine nothing and do not count.
    fn end_check(&mut self, asked: Asked) {
        self.asked = None;
        if asked.purpose == Purpose::CheckStart && asked.first.is_some() {
            self.start_attempts -= 1;
        }
    }

    /// Asks for the rest again unless the last replays in a row brought nothing.
    fn may_ask_again(&mut self) -> bool {
        let before = self.asked.and_then(|asked| asked.last).map(|last| last.number);
        self.barren = if self.last() > before { 0 } else { self.barren + 1 };
        if self.barren < BARREN_REPLAYS_MAX {
            self.counts.replays += 1;
            self.ask(Purpose::CatchUp);
            return true;
        }
        false
    }

    /// Looks for a hole behind the last message, unless the stream is busy enough to show one by itself.
    fn probe(&mut self) {
        let quiet = !std::mem::take(&mut self.busy);
        if self.phase != Phase::Live || !self.can_replay || self.asked.is_some() {
            return;
        }
        if self.start_attempts > 0 && self.applied.is_some() {
            self.ask(Purpose::CheckStart);
        } else if quiet {
            self.ask(Purpose::Check);
        }
    }

    fn malformed(&mut self, reason: String) {
        self.counts.gaps += 1;
        if self.phase == Phase::Lossy {
            return;
        }
        if self.is_lossy_with_another_hole() {
            return;
        }
        self.complete = false;
        self.base = self.applied.map_or(0, |last| last.number + 1);
        self.reason = Some(reason);
    }

    fn distrust(&mut self, reason: String) {
        if self.complete && self.can_replay && !self.distrusted && self.phase != Phase::Disconnected {
            self.distrusted = true;
            self.counts.gaps += 1;
            self.rebuild(reason);
        } else {
            self.reason = Some(reason);
        }
    }

    fn another_process(&mut self, sign: &str) {
        self.counts.restarts += 1;
        self.distrusted = false;
        self.count_anew();
        if self.can_replay {
            self.rebuild(format!("the engine has restarted: {sign}"));
        } else {
            self.forget();
            self.go_live(Some(format!("the engine has restarted: {sign}")));
        }
    }

    /// Forgets everything and asks for the whole log.
    fn rebuild(&mut self, reason: String) {
        self.forget();
        self.barren = 0;
        self.catch_up(reason);
    }

    /// Goes on behind a hole that will not be filled. What came before it stays only if it is of the same process.
    fn give_up(&mut self, reason: String) {
        if !self.is_same_process {
            self.forget();
        } else if self.is_lossy_with_another_hole() {
            return;
        } else {
            self.begin_run();
        }
        self.keep_last_run();
        self.apply_held();
        self.complete = false;
        self.go_live(Some(reason));
    }

    fn catch_up(&mut self, reason: String) {
        self.phase = Phase::CatchingUp;
        self.reason = Some(reason);
        if !self.resumed {
            self.actions.push(Action::Trust(false));
        }
        self.counts.replays += 1;
        self.ask(Purpose::CatchUp);
    }

    fn ask(&mut self, purpose: Purpose) {
        let last = self.applied.filter(|_| purpose != Purpose::CheckStart);
        self.asked = Some(Asked { purpose, last, checked: false, first: None, seen: None, whole: true });
        let from = last.map_or(0, |last| last.number);
        self.actions.push(Action::Replay { from, again: self.barren > 0 });
    }

    fn go_live(&mut self, reason: Option<String>) {
        if self.phase != Phase::Live {
            self.actions.push(Action::Trust(true));
        }
        self.phase = Phase::Live;
        self.resumed = false;
        self.asked = None;
        self.barren = 0;
        self.reason = reason;
    }

    fn forget(&mut self) {
        self.applied = None;
        self.complete = false;
        self.resumed = false;
        self.in_doubt = false;
        self.actions.push(Action::Forget);
    }

    /// Some batches will never be had: what is known is in doubt. Returns whether that was one hole too many; then the
    /// stream is lossy and nothing of it counts any more.
    fn is_lossy_with_another_hole(&mut self) -> bool {
        self.holes += 1;
        self.in_doubt = true;
        self.actions.push(Action::Doubt);
        let is_lossy = self.holes >= LOSSY_HOLES_MIN && self.batches < self.holes * LOSSY_BATCHES_A_HOLE;
        if is_lossy {
            self.go_lossy();
        }
        is_lossy
    }

    /// The next batch begins a run of its own, whatever its number.
    fn begin_run(&mut self) {
        self.applied = None;
        self.complete = false;
    }

    fn go_lossy(&mut self) {
        let (holes, batches) = (self.holes, self.batches);
        self.forget();
        self.drop_held();
        self.asked = None;
        self.phase = Phase::Lossy;
        self.reason = Some(format!("{holes} holes in {batches} batches: what was sent says more than these events"));
        self.actions.push(Action::Trust(false));
    }

    fn count_anew(&mut self) {
        self.batches = 0;
        self.holes = 0;
    }

    /// Holds a live message. When there is no room, everything held goes except the newest: the rest can be replayed,
    /// and the newest marks how far to go.
    fn hold(&mut self, number: u64, payload: &Bytes) {
        if self.held.len() >= HELD_MESSAGES_MAX || self.held_bytes + payload.len() > HELD_BYTES_MAX {
            self.drop_held();
        }
        // A copy, because the original pins the whole read buffer it was cut from.
        let payload = Bytes::copy_from_slice(payload);
        self.held_bytes += payload.len();
        self.held.insert(number, payload);
    }

    fn drop_held(&mut self) {
        self.held.clear();
        self.held_bytes = 0;
    }

    /// Applies held messages up to the first hole and drops those that are applied already.
    fn apply_held(&mut self) {
        while let Some(entry) = self.held.first_entry() {
            if self.applied.is_some_and(|last| *entry.key() > last.number + 1) {
                return;
            }
            let (number, payload) = entry.remove_entry();
            self.held_bytes -= payload.len();
            self.offer(number, payload);
        }
    }

    /// Keeps of the held messages only the contiguous run that ends with the newest.
    fn keep_last_run(&mut self) {
        let Some((&newest, _)) = self.held.last_key_value() else { return };
        let mut first = newest;
        while first > 0 && self.held.contains_key(&(first - 1)) {
            first -= 1;
        }
        self.held = self.held.split_off(&first);
        self.held_bytes = self.held.values().map(Bytes::len).sum();
    }
}

#[cfg(test)]
mod tests;
