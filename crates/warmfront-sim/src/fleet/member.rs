//! One engine of the fleet: what it computes now, and what its steps add up to.

use warmfront_core::mailbox::Slot;

use super::tally::{Tally, Traced};
use crate::engine::{Engine, EngineConfig, StepResult};

/// What is known of a replica for as long as it exists.
#[derive(Clone, Debug)]
pub(super) struct Spec {
    pub(super) id: String,
    pub(super) config: EngineConfig,
    /// False: the engine looks nothing up, though it publishes what it stores.
    pub(super) caching: bool,
    /// Names of models that it does not serve.
    pub(super) lacks: Vec<String>,
    /// Seconds from the router to it and back.
    pub(super) rtt_s: f64,
}

#[derive(Debug)]
pub(super) enum Work {
    Idle,
    /// The next step begins as soon as everything that happens now has happened.
    Starting,
    Step(StepResult),
    Quiet(Quiet),
}

/// Steps in a row in which nothing happens but one more token for each decoding sequence.
#[derive(Clone, Copy, Debug)]
pub(super) struct Quiet {
    steps: u64,
    done: u64,
    /// End of the last step that was accounted for.
    at_s: f64,
}

/// Gaps between two tokens since the last report.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Pace {
    pub(super) gaps: u64,
    pub(super) seconds: f64,
}

#[derive(Debug)]
pub(super) struct Member {
    pub(super) slot: Slot,
    pub(super) spec: Spec,
    /// `None`: its process does not run.
    pub(super) engine: Option<Engine>,
    pub(super) work: Work,
    /// Distinguishes the appointment that holds from those that were overtaken.
    pub(super) epoch: u64,
    /// Number of its process.
    pub(super) incarnation: u64,
    /// In the fleet that routers see.
    pub(super) present: bool,
    pub(super) in_flight: u64,
    pub(super) busy_s: f64,
    pub(super) pace: Pace,
    /// Of processes that are gone.
    pub(super) preemptions: u64,
}

impl Member {
    pub(super) fn new(slot: Slot, spec: Spec) -> Self {
        Self {
            slot,
            spec,
            engine: None,
            work: Work::Idle,
            epoch: 0,
            incarnation: 0,
            present: true,
            in_flight: 0,
            busy_s: 0.0,
            pace: Pace::default(),
            preemptions: 0,
        }
    }

    pub(super) fn accepts(&self) -> bool {
        self.present && self.engine.is_some()
    }

    /// Begins what comes next at `now_s`; returns when it ends, `None`: nothing to do.
    pub(super) fn begin(&mut self, now_s: f64) -> Option<f64> {
        self.work = Work::Idle;
        let engine = self.engine.as_mut().filter(|engine| engine.has_work())?;
        let steps = engine.quiet_steps();
        if steps < 2 {
            let result = engine.step();
            let end_s = now_s + result.duration_s;
            self.work = Work::Step(result);
            return Some(end_s);
        }
        let end_s = (1..=steps).fold(now_s, |at_s, ahead| at_s + engine.quiet_step_s(ahead));
        self.work = Work::Quiet(Quiet { steps, done: 0, at_s: now_s });
        Some(end_s)
    }

    /// Accounts for the quiet steps that have ended by `now_s`.
    pub(super) fn settle(&mut self, now_s: f64, tally: &mut Tally) {
        let (Work::Quiet(quiet), Some(engine)) = (&mut self.work, &self.engine) else { return };
        let sequences = engine.running() as u64;
        while quiet.done < quiet.steps {
            let seconds = engine.quiet_step_s(quiet.done + 1);
            if quiet.at_s + seconds > now_s {
                return;
            }
            quiet.at_s += seconds;
            quiet.done += 1;
            self.busy_s += seconds;
            self.pace.gaps += sequences;
            self.pace.seconds += sequences as f64 * seconds;
            tally.gaps.add(seconds, sequences);
            tally.note(Traced { slot: self.slot, end_s: quiet.at_s, prefill_tokens: 0, decodes: sequences });
        }
    }

    /// Ends the quiet steps with the one under way at `now_s`, because a request has come; returns when that is.
    pub(super) fn cut(&mut self, now_s: f64, tally: &mut Tally) -> Option<f64> {
        self.settle(now_s, tally);
        let (Work::Quiet(quiet), Some(engine)) = (&mut self.work, &self.engine) else { return None };
        let is_between = quiet.at_s >= now_s;
        quiet.steps = quiet.done + u64::from(!is_between);
        Some(if is_between { now_s } else { quiet.at_s + engine.quiet_step_s(quiet.steps) })
    }

    /// Closes the quiet steps, all of which have ended.
    pub(super) fn close(&mut self, now_s: f64, tally: &mut Tally) {
        self.settle(now_s, tally);
        let (Work::Quiet(quiet), Some(engine)) = (&self.work, &mut self.engine) else { return };
        debug_assert_eq!(quiet.done, quiet.steps, "the appointment is the end of the last step");
        engine.skip(quiet.done);
        self.work = Work::Idle;
    }

    /// Accounts for a step that has ended.
    pub(super) fn ended(&mut self, now_s: f64, result: &StepResult, tally: &mut Tally) {
        self.busy_s += result.duration_s;
        self.note_gaps(result.duration_s, result.decodes, tally);
        let (prefill_tokens, decodes) = (result.prefill_tokens, result.decodes);
        tally.note(Traced { slot: self.slot, end_s: now_s, prefill_tokens, decodes });
    }

    pub(super) fn note_gaps(&mut self, seconds: f64, count: u64, tally: &mut Tally) {
        if count > 0 {
            self.pace.gaps += count;
            self.pace.seconds += count as f64 * seconds;
            tally.gaps.add(seconds, count);
        }
    }
}

/// An appointment: this member's work ends, or begins.
#[derive(Clone, Copy, Debug)]
pub(super) struct Appointment {
    pub(super) at_s: f64,
    /// Breaks ties in the order in which appointments were made.
    pub(super) number: u64,
    pub(super) slot: Slot,
    pub(super) epoch: u64,
}

impl PartialEq for Appointment {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Appointment {}

impl PartialOrd for Appointment {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Appointment {
    /// The earliest is the greatest: a heap gives the greatest first.
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        other.at_s.total_cmp(&self.at_s).then(other.number.cmp(&self.number))
    }
}
