//! Two futures in one task, without the task waking itself.
//!
//! An upstream connection and the body it feeds are polled by one task, one after the other. They tell one another of
//! progress through wakers, and with the task's own waker each chunk would schedule the task once more for nothing. A
//! [`Quiet`] waker drops wakes that come from inside our own poll, on our own thread, and remembers that there were some;
//! all others (the socket, timers, other threads) pass. The caller polls again by itself where a dropped wake mattered.

use std::cell::Cell;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Wake, Waker};

use parking_lot::Mutex;

thread_local! {
    /// The filter whose poll runs on this thread.
    static INSIDE: Cell<*const Filter> = const { Cell::new(ptr::null()) };
}

#[derive(Debug)]
struct Filter {
    outer: Mutex<Waker>,
    dropped: AtomicBool,
}

impl Wake for Filter {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if INSIDE.get() == Arc::as_ptr(self) {
            self.dropped.store(true, Ordering::Relaxed);
        } else {
            self.outer.lock().wake_by_ref();
        }
    }
}

/// A waker that is silent while we poll.
#[derive(Debug)]
pub(super) struct Quiet {
    filter: Arc<Filter>,
    waker: Waker,
}

impl Quiet {
    pub(super) fn new() -> Self {
        let filter = Arc::new(Filter { outer: Mutex::new(Waker::noop().clone()), dropped: AtomicBool::new(false) });
        let waker = Waker::from(Arc::clone(&filter));
        Self { filter, waker }
    }

    /// Begins a poll on behalf of `outer`.
    pub(super) fn enter<'a>(&'a self, outer: &Waker) -> Inside<'a> {
        {
            let mut current = self.filter.outer.lock();
            if !current.will_wake(outer) {
                current.clone_from(outer);
            }
        }
        self.filter.dropped.store(false, Ordering::Relaxed);
        Inside { quiet: self, before: INSIDE.replace(Arc::as_ptr(&self.filter)) }
    }
}

/// A poll in progress; ends when dropped.
pub(super) struct Inside<'a> {
    quiet: &'a Quiet,
    before: *const Filter,
}

impl Inside<'_> {
    pub(super) fn waker(&self) -> &Waker {
        &self.quiet.waker
    }

    /// Whether a wake has been dropped since the last call.
    pub(super) fn take_dropped(&self) -> bool {
        self.quiet.filter.dropped.swap(false, Ordering::Relaxed)
    }
}

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        INSIDE.set(self.before);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Default)]
    struct Rang(AtomicBool);

    impl Wake for Rang {
        fn wake(self: Arc<Self>) {
            self.0.store(true, Ordering::Relaxed);
        }
    }

    #[test]
    fn only_wakes_from_inside_our_own_poll_are_dropped() {
        let rang = Arc::new(Rang::default());
        let outer = Waker::from(Arc::clone(&rang));
        let (quiet, other) = (Quiet::new(), Quiet::new());
        let inside = quiet.enter(&outer);
        inside.waker().wake_by_ref();
        assert!(inside.take_dropped() && !inside.take_dropped());
        assert!(!rang.0.load(Ordering::Relaxed));
        let waker = inside.waker().clone();
        std::thread::spawn(move || waker.wake()).join().unwrap();
        assert!(rang.0.swap(false, Ordering::Relaxed), "a wake from another thread passes");
        drop(other.enter(&outer));
        let waker = inside.waker().clone();
        drop(inside);
        waker.wake();
        assert!(rang.0.load(Ordering::Relaxed), "a wake after the poll passes");
    }
}
