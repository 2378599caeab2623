//! The only place that reads clocks.
//!
//! Times that leave the core are seconds since the process's own start, as `f64`, never wall time: the router compares
//! and subtracts them, and a wall clock jumps. The one use of wall time is to compare with a time stamp that an engine
//! wrote.

use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// Seconds since this clock was made. Cheap to copy; all copies agree.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    origin: Instant,
}

impl Clock {
    /// Starts at zero now.
    #[must_use]
    #[allow(clippy::disallowed_methods, reason = "the one place that reads the clock")]
    pub fn start() -> Self {
        Self { origin: Instant::now() }
    }

    /// Seconds since the start.
    #[must_use]
    pub fn now_s(&self) -> f64 {
        self.origin.elapsed().as_secs_f64()
    }

    /// Seconds since 1970 by this machine's wall clock; 0 if it is set before that.
    #[must_use]
    #[allow(clippy::disallowed_methods, reason = "the one place that reads the clock")]
    pub fn wall_s(&self) -> f64 {
        SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
    }
}
