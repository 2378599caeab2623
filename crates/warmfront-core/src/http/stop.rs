//! Where the front is on its way to the end.
//!
//! *Draining*: `/ready` says 503, and each answer is the last of its connection; can be taken back. *Stopping*: the same,
//! and accepting ends after the settle time. *Closing*: idle connections are closed, running answers are the last.
//! *Cut*: the grace time is over, and running answers end with an error.

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::sync::Notify;

/// The switch. Clones are one.
#[derive(Clone, Debug, Default)]
pub struct Stop(Arc<StopState>);

#[derive(Debug, Default)]
struct StopState {
    is_draining: AtomicBool,
    is_set: AtomicBool,
    is_handed_over: AtomicBool,
    is_closing: AtomicBool,
    is_cut: AtomicBool,
    notify: Notify,
}

impl Stop {
    /// Begins to take leave of clients, or thinks better of it. Accepting goes on.
    pub fn drain(&self, is_draining: bool) {
        self.0.is_draining.store(is_draining, Ordering::Release);
    }

    pub fn is_draining(&self) -> bool {
        self.0.is_draining.load(Ordering::Acquire) || self.is_set()
    }

    /// Begins the end.
    pub fn set(&self) {
        self.0.is_set.store(true, Ordering::Release);
        self.0.notify.notify_waiters();
    }

    /// Begins the end without settling: another process accepts at the same socket.
    pub fn hand_over(&self) {
        self.0.is_handed_over.store(true, Ordering::Release);
        self.set();
    }

    pub fn is_set(&self) -> bool {
        self.0.is_set.load(Ordering::Acquire)
    }

    /// Ready once stopping.
    pub async fn wait(&self) {
        self.wait_for(|state| &state.is_set).await;
    }

    /// Ready once nothing is accepted any more.
    pub async fn closing(&self) {
        self.wait_for(|state| &state.is_closing).await;
    }

    pub fn is_handed_over(&self) -> bool {
        self.0.is_handed_over.load(Ordering::Acquire)
    }

    pub(super) fn close(&self) {
        self.0.is_closing.store(true, Ordering::Release);
        self.0.notify.notify_waiters();
    }

    /// Ends what has not ended by itself.
    pub(super) fn cut(&self) {
        self.0.is_cut.store(true, Ordering::Release);
        self.0.notify.notify_waiters();
    }

    /// Ready once the grace time is over: answers end now.
    pub(super) async fn cutting(&self) {
        self.wait_for(|state| &state.is_cut).await;
    }

    async fn wait_for(&self, flag: impl Fn(&StopState) -> &AtomicBool) {
        loop {
            let mut notified = pin!(self.0.notify.notified());
            notified.as_mut().enable();
            if flag(&self.0).load(Ordering::Acquire) {
                return;
            }
            notified.await;
        }
    }
}
