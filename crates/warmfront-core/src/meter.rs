//! Where counts and gauges go: the few calls that background parts need of the metric registry.

use crate::metrics::Metrics;

/// Writes values of the metric catalogue by name. `labels` are the values, in the order of the catalogue.
pub trait Meter: Send + Sync {
    fn add(&self, name: &'static str, labels: &[&str], by: u64);
    fn set(&self, name: &'static str, labels: &[&str], value: f64);
    /// Drops all series with this label value: what it named is gone.
    fn forget(&self, label: &'static str, value: &str);
}

impl Meter for Metrics {
    fn add(&self, name: &'static str, labels: &[&str], by: u64) {
        self.inc(name, labels, by);
    }

    fn set(&self, name: &'static str, labels: &[&str], value: f64) {
        Metrics::set(self, name, labels, value);
    }

    fn forget(&self, label: &'static str, value: &str) {
        Metrics::forget(self, label, value);
    }
}

/// Keeps nothing; for tools and tests without a catalogue.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoMeter;

impl Meter for NoMeter {
    fn add(&self, _name: &'static str, _labels: &[&str], _by: u64) {}
    fn set(&self, _name: &'static str, _labels: &[&str], _value: f64) {}
    fn forget(&self, _label: &'static str, _value: &str) {}
}
