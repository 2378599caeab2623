//! Who goes first on a thread: requests without an answer before the pieces of answers that are under way.
//!
//! A runtime polls what is ready in the order in which it became so. Engines send the tokens of all their streams at
//! once, so that a burst of some hundred pieces stands before a new request, and again when its decision comes, and again
//! when its engine answers: a client that waits for its first byte waits for three bursts. Here a connection counts as
//! waiting from the moment it is woken until it is polled, unless an answer is under way on it, and while anyone waits,
//! those with an answer under way go to the end of the line. What one would get wrong: that costs a poll more each time,
//! so it happens only while somebody waits, and [`ASIDE_MAX`] times in a row at most, whatever arrives.

use std::sync::atomic::{AtomicIsize, AtomicU8, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Wake, Waker};

/// Times in a row that a connection goes to the end of the line: a flood of requests slows streams down and no more.
const ASIDE_MAX: u8 = 4;

/// Goes first when woken; as every connection begins.
const AHEAD: u8 = 0;
/// Has been woken and goes first.
const WAITING: u8 = 1;
/// An answer is under way: others go first.
const BEHIND: u8 = 2;

/// All connections of a front, some of which wait. Clones are one line.
#[derive(Clone, Debug, Default)]
pub(super) struct Line(Arc<AtomicIsize>);

impl Line {
    /// Somebody who goes first has been woken and not polled.
    fn has_waiting(&self) -> bool {
        self.0.load(Ordering::Relaxed) > 0 // below zero for a moment where a poll on another thread overtakes its wake
    }
}

/// A connection's place in the line, and the waker that its parts have in place of the task's own.
#[derive(Debug, Default)]
pub(super) struct Place {
    line: Line,
    state: AtomicU8,
    /// Of the task that serves the connection, which is always the same.
    task: OnceLock<Waker>,
}

impl Place {
    /// An answer has begun: until the guard is dropped the connection lets others go first.
    pub(super) fn give_way(self: &Arc<Self>) -> GivesWay {
        self.set(BEHIND);
        GivesWay(Arc::clone(self))
    }

    fn set(&self, state: u8) {
        if self.state.swap(state, Ordering::Relaxed) == WAITING {
            self.line.0.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Changes the state if it is `from`. Usually it is not, and a look costs less than the attempt.
    fn step(&self, from: u8, to: u8) -> bool {
        self.is(from) && self.state.compare_exchange(from, to, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }

    fn is(&self, state: u8) -> bool {
        self.state.load(Ordering::Relaxed) == state
    }
}

impl Wake for Place {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if self.step(AHEAD, WAITING) {
            self.line.0.fetch_add(1, Ordering::Relaxed);
        }
        if let Some(task) = self.task.get() {
            task.wake_by_ref();
        }
    }
}

/// Held by an answer that is under way.
#[derive(Debug)]
pub(super) struct GivesWay(Arc<Place>);

impl Drop for GivesWay {
    fn drop(&mut self) {
        self.0.step(BEHIND, AHEAD);
    }
}

/// What a connection's task asks before each poll.
#[derive(Debug)]
pub(super) struct Turn {
    place: Arc<Place>,
    waker: Waker,
    /// Times in a row that others went first.
    aside: u8,
}

impl Turn {
    pub(super) fn new(line: &Line) -> Self {
        let place = Arc::new(Place { line: line.clone(), ..Place::default() });
        Self { waker: Waker::from(Arc::clone(&place)), place, aside: 0 }
    }

    pub(super) fn place(&self) -> &Arc<Place> {
        &self.place
    }

    /// The waker to poll the connection's parts with; `None`: others go first, and the task will be polled again.
    ///
    /// `is_needed_elsewhere`: somebody waits for this thread who is not in the line.
    pub(super) fn take(&mut self, cx: &Context<'_>, is_needed_elsewhere: bool) -> Option<&Waker> {
        let place = &self.place;
        if place.step(WAITING, AHEAD) {
            place.line.0.fetch_sub(1, Ordering::Relaxed);
        }
        let goes_last = place.is(BEHIND) && (is_needed_elsewhere || place.line.has_waiting());
        if goes_last && self.aside < ASIDE_MAX {
            self.aside += 1;
            cx.waker().wake_by_ref();
            return None;
        }
        self.aside = 0;
        place.task.get_or_init(|| cx.waker().clone());
        Some(&self.waker)
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.place.set(BEHIND); // wakers of ours may live on
    }
}

#[cfg(test)]
mod tests {
    use std::future::Future;
    use std::pin::Pin;
    use std::task::Poll;

    use parking_lot::Mutex;

    use super::*;

    /// Connections by number, in the order in which they were polled.
    type Polled = Arc<Mutex<Vec<usize>>>;

    /// A connection that does nothing but come to its turn.
    struct Connection {
        number: usize,
        turn: Turn,
        bell: Waker,
        polled: Polled,
        /// Somebody else needs the thread.
        is_needed: bool,
    }

    impl Future for Connection {
        type Output = ();

        fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
            let is_needed = self.is_needed;
            if self.turn.take(cx, is_needed).is_some() {
                let number = self.number;
                self.polled.lock().push(number);
            }
            Poll::Pending
        }
    }

    fn connections(count: usize) -> (Line, Polled, Vec<Connection>) {
        let (line, polled) = (Line::default(), Polled::default());
        let connection = |number| {
            let turn = Turn::new(&line);
            Connection { number, bell: turn.waker.clone(), turn, polled: Arc::clone(&polled), is_needed: false }
        };
        let connections = (0..count).map(connection).collect();
        (line, polled, connections)
    }

    /// Runs connections until they rest, then rings for all of them in order; who was polled after that.
    async fn rung(polled: &Polled, connections: Vec<Connection>) -> Vec<usize> {
        let bells: Vec<Waker> = connections.iter().map(|connection| connection.bell.clone()).collect();
        let tasks: Vec<_> = connections.into_iter().map(tokio::spawn).collect();
        rest().await;
        polled.lock().clear();
        bells.iter().for_each(Waker::wake_by_ref);
        rest().await;
        tasks.iter().for_each(tokio::task::JoinHandle::abort);
        std::mem::take(&mut *polled.lock())
    }

    async fn rest() {
        for _ in 0..2 * usize::from(ASIDE_MAX) {
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn a_request_without_an_answer_goes_before_answers_that_were_ready_earlier() {
        let (line, polled, connections) = connections(4);
        let _ways: Vec<_> = connections[..3].iter().map(|connection| connection.turn.place().give_way()).collect();
        assert_eq!(rung(&polled, connections).await, [3, 0, 1, 2]);
        assert!(!line.has_waiting());
    }

    #[tokio::test]
    async fn among_equals_the_order_is_that_of_arrival() {
        let (_, polled, connections) = connections(3);
        assert_eq!(rung(&polled, connections).await, [0, 1, 2]);
    }

    #[tokio::test]
    async fn whose_answer_has_ended_goes_first_again() {
        let (_, polled, connections) = connections(3);
        let mut ways: Vec<_> = connections.iter().map(|connection| connection.turn.place().give_way()).collect();
        ways.pop();
        assert_eq!(rung(&polled, connections).await, [2, 0, 1]);
    }

    #[test]
    fn nobody_goes_last_for_ever() {
        let (_, _, mut connections) = connections(1);
        let turn = &mut connections[0].turn;
        let cx = Context::from_waker(Waker::noop());
        let _way = turn.place().give_way();
        for _ in 0..2 {
            for _ in 0..ASIDE_MAX {
                assert!(turn.take(&cx, true).is_none());
            }
            assert!(turn.take(&cx, true).is_some());
        }
        assert!(turn.take(&cx, false).is_some());
    }

    #[test]
    fn who_leaves_while_waiting_is_not_waited_for() {
        let (line, _, mut connections) = connections(3);
        for connection in &connections {
            connection.bell.wake_by_ref();
            connection.bell.wake_by_ref(); // counts once
        }
        let way = connections[1].turn.place().give_way();
        assert!(line.has_waiting());
        let Connection { turn, bell, .. } = connections.remove(0);
        drop(turn);
        bell.wake(); // the socket's copy of it, say
        connections.pop();
        assert!(!line.has_waiting());
        drop(connections);
        drop(way);
        assert!(!line.has_waiting());
    }
}
