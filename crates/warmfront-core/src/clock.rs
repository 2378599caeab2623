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

/// A calendar date and time of day, as chat templates print it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CivilTime {
    pub year: i64,
    /// 1 to 12.
    pub month: u32,
    /// 1 to 31.
    pub day: u32,
    pub hour: u32,
    pub minute: u32,
    pub second: u32,
    /// 0 is Sunday.
    pub weekday: u32,
    /// 1 to 366.
    pub year_day: u32,
}

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const WEEKDAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];

impl CivilTime {
    /// The wall clock's date in UTC, where engines in containers live. Only for text, never for measuring.
    #[must_use]
    #[allow(clippy::disallowed_methods, reason = "the one place that reads the clock")]
    pub fn now_utc() -> Self {
        let since_epoch = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        Self::of_unix_s(since_epoch.as_secs().cast_signed())
    }

    /// Seconds since 1970-01-01 00:00 in the clock's own zone.
    ///
    /// Source: Howard Hinnant, "chrono-compatible low-level date algorithms", `civil_from_days`.
    #[must_use]
    pub fn of_unix_s(seconds: i64) -> Self {
        let (days, time) = (seconds.div_euclid(86_400), seconds.rem_euclid(86_400) as u32);
        let shifted = days + 719_468;
        let era = shifted.div_euclid(146_097);
        let day_of_era = shifted.rem_euclid(146_097);
        let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
        let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let shifted_month = (5 * day_of_year + 2) / 153;
        let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 } as u32;
        let year = year_of_era + era * 400 + i64::from(month <= 2);
        let day = (day_of_year - (153 * shifted_month + 2) / 5 + 1) as u32;
        let is_leap = (year % 4 == 0 && year % 100 != 0) || year % 400 == 0;
        let before = [0, 31, 59, 90, 120, 151, 181, 212, 243, 273, 304, 334][month as usize - 1];
        Self {
            year,
            month,
            day,
            hour: time / 3600,
            minute: time / 60 % 60,
            second: time % 60,
            weekday: (days + 4).rem_euclid(7) as u32,
            year_day: before + day + u32::from(is_leap && month > 2),
        }
    }

    /// The conversions of C's `strftime` that chat templates use; `None` for any other.
    #[must_use]
    pub fn strftime(&self, format: &str) -> Option<String> {
        use std::fmt::Write as _;
        let mut out = String::new();
        let mut characters = format.chars();
        while let Some(c) = characters.next() {
            if c != '%' {
                out.push(c);
                continue;
            }
            let (month, weekday) = (MONTHS[self.month as usize - 1], WEEKDAYS[self.weekday as usize]);
            let written = match characters.next()? {
                'Y' => write!(out, "{}", self.year),
                'y' => write!(out, "{:02}", self.year.rem_euclid(100)),
                'm' => write!(out, "{:02}", self.month),
                'd' => write!(out, "{:02}", self.day),
                'e' => write!(out, "{:2}", self.day),
                'B' => write!(out, "{month}"),
                'b' | 'h' => write!(out, "{}", &month[..3]),
                'A' => write!(out, "{weekday}"),
                'a' => write!(out, "{}", &weekday[..3]),
                'w' => write!(out, "{}", self.weekday),
                'j' => write!(out, "{:03}", self.year_day),
                'H' => write!(out, "{:02}", self.hour),
                'I' => write!(out, "{:02}", (self.hour + 11) % 12 + 1),
                'M' => write!(out, "{:02}", self.minute),
                'S' => write!(out, "{:02}", self.second),
                'p' => write!(out, "{}", if self.hour < 12 { "AM" } else { "PM" }),
                'F' => write!(out, "{}-{:02}-{:02}", self.year, self.month, self.day),
                'T' => write!(out, "{:02}:{:02}:{:02}", self.hour, self.minute, self.second),
                '%' => write!(out, "%"),
                _ => return None,
            };
            written.ok()?;
        }
        Some(out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_those_of_the_calendar() {
        let time = CivilTime::of_unix_s(1_709_210_096);
        assert_eq!(
            time.strftime("%A %a %d %b %B %Y %F %T %j %I%p %e %y %%").as_deref(),
            Some("Thursday Thu 29 Feb February 2024 2024-02-29 12:34:56 060 12PM 29 24 %")
        );
        assert_eq!(CivilTime::of_unix_s(-1).strftime("%F %T").as_deref(), Some("1969-12-31 23:59:59"));
        assert_eq!(time.strftime("%Q"), None);
        assert_eq!(time.strftime("%"), None);
    }
}
