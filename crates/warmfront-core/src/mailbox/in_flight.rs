//! One request from its arrival to its end, as the router sees it.
//!
//! The value is the request: it exists from `Arrived` on, and dropping it reports how the request ended, exactly once,
//! whichever path drops it. A client that leaves drops the future that holds it, so the default end is `Cancelled`; only
//! paths that know better overwrite it. What one would get wrong: a shed request has no end to report, also when the
//! client leaves between the command and its waking.

use std::sync::Arc;

use tokio::sync::oneshot;

use super::{Decision, Event, Full, Mailbox, RequestFacts, RequestId, Slot, Usage};
use crate::requests::{Prompt, RequestTable};

/// What went wrong in one attempt to have a request answered.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Failure {
    /// A short fixed word, usable as a label.
    pub error: String,
    /// Of the engine's answer, where there was one; of an error inside a stream, the status that it stands for.
    pub status: Option<u16>,
    /// How long the engine wants to be left alone.
    pub retry_after_s: Option<f64>,
    /// The engine may have worked on the request.
    pub accepted: bool,
}

/// How a dispatched request ends.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Outcome {
    /// The client left before the end.
    #[default]
    Cancelled,
    /// The engine answered in full, with whatever status.
    Finished { slot: Slot, status: u16, usage: Option<Usage>, chunks: u32 },
    /// It may have been worked on and did not end well.
    Failed { failure: Failure, tried: Vec<Slot> },
    /// Refused by the router, or ended by its word: nothing to report.
    Shed,
}

/// Reports the end of a request exactly once, whichever path ends it.
#[derive(Debug)]
pub struct InFlight {
    id: RequestId,
    outcome: Outcome,
    mailbox: Arc<Mailbox>,
    table: Arc<RequestTable>,
    decision: Option<oneshot::Receiver<Decision>>,
}

impl InFlight {
    /// Puts the prompt in the table and `Arrived` in the queue.
    pub fn enter(
        mailbox: &Arc<Mailbox>,
        table: &Arc<RequestTable>,
        facts: RequestFacts,
        prompt: Arc<Prompt>,
    ) -> Result<Self, Full> {
        let id = facts.id;
        table.insert(id, prompt);
        let decision = mailbox.decide(facts).inspect_err(|Full| table.remove(id))?;
        mailbox.entered();
        Ok(Self {
            id,
            outcome: Outcome::default(),
            mailbox: Arc::clone(mailbox),
            table: Arc::clone(table),
            decision: Some(decision),
        })
    }

    pub fn id(&self) -> RequestId {
        self.id
    }

    /// Waits for the router; `None` when it has stopped. Safe to drop while it waits.
    pub async fn decision(&mut self) -> Option<Decision> {
        let decision = self.decision.as_mut()?.await.ok();
        self.decision = None;
        if decision.is_some() {
            self.mailbox.delivered();
        }
        if !matches!(decision, Some(Decision::Dispatch { .. })) {
            self.outcome = Outcome::Shed; // a router that stopped keeps no ledger either
        }
        decision
    }

    /// The choice before could not be reached; `slot` is tried now.
    pub fn moved(&self, slot: Slot) {
        self.table.moved(self.id, slot);
        self.mailbox.push(Event::Moved { id: self.id, time_s: self.now_s(), slot });
    }

    /// The engine has begun to answer.
    pub fn first_token(&self, time_s: f64, slot: Slot) {
        self.mailbox.push(Event::FirstToken { id: self.id, time_s, slot });
    }

    /// No choice answered and the client has not seen a byte: the router decides once more, or the request ends so where
    /// this was its last chance. No engine is predicted to hold its blocks any more, as in [`InFlight::ends`].
    pub fn unanswered(&mut self, failure: Failure, tried: Vec<Slot>, is_last: bool) {
        self.table.withdrawn(self.id);
        if is_last {
            self.outcome = Outcome::Failed { failure, tried };
            return;
        }
        self.decision = self.mailbox.wait_for_decision(self.id);
        self.mailbox.push(Event::Failed { id: self.id, time_s: self.now_s(), failure, tried, began: false });
    }

    /// Sets how the request ends; reported when this value is dropped.
    ///
    /// What an engine refused it has not computed, so its prediction goes at once: without events it would stand for
    /// minutes, and an engine that fails every request at once would look both idle and warm. An answer that broke off
    /// has been computed at least in part, and stays predicted.
    pub fn ends(&mut self, outcome: Outcome) {
        if matches!(outcome, Outcome::Finished { status: 400.., .. }) {
            self.table.withdrawn(self.id);
        }
        self.outcome = outcome;
    }

    fn now_s(&self) -> f64 {
        self.mailbox.clock().now_s()
    }

    /// The end of a request whose client left while it waited for a decision.
    fn unseen_decision(&mut self) {
        let Some(mut receiver) = self.decision.take() else { return };
        if let Some(decision) = self.mailbox.forget(self.id).or_else(|| receiver.try_recv().ok()) {
            self.mailbox.delivered();
            if !matches!(decision, Decision::Dispatch { .. }) {
                self.outcome = Outcome::Shed;
            }
        }
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.unseen_decision();
        self.mailbox.left();
        self.table.remove(self.id);
        let (id, time_s) = (self.id, self.now_s());
        self.mailbox.push(match std::mem::take(&mut self.outcome) {
            Outcome::Cancelled => Event::Cancelled { id, time_s },
            Outcome::Finished { slot, status, usage, chunks } => {
                Event::Finished { id, time_s, slot, status, usage, chunks }
            }
            Outcome::Failed { failure, tried } => Event::Failed { id, time_s, failure, tried, began: true },
            Outcome::Shed => return,
        });
    }
}
