//! Where counts and gauges go: the few calls that background parts need of the metric registry.

/// Writes values of the metric catalogue by name. `labels` are the values, in the order of the catalogue.
pub trait Meter: Send + Sync {
    fn add(&self, name: &'static str, labels: &[&str], by: u64);
    fn set(&self, name: &'static str, labels: &[&str], value: f64);
    /// Drops all series with this label value: what it named is gone.
    fn forget(&self, label: &'static str, value: &str);
}

/// Keeps nothing; for tools and tests without a catalogue.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoMeter;

impl Meter for NoMeter {
    fn add(&self, _name: &'static str, _labels: &[&str], _by: u64) {}
    fn set(&self, _name: &'static str, _labels: &[&str], _value: f64) {}
    fn forget(&self, _label: &'static str, _value: &str) {}
}
