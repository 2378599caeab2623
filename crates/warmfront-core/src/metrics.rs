//! The metric registry: families come from the catalogue in the configuration and are found by name.
//!
//! A registry of our own rather than the `prometheus-client` crate: that one fixes the type of each family when the
//! program is compiled, renames counters, and has no bound on label values; the catalogue is data, and a client-chosen
//! label must not grow memory. What is left is a few atomics. A handle ([`Counter`], [`Gauge`], [`Histogram`]) is a
//! cheap clone that the hot paths look up once. Label values beyond the configured number count under `other`. An
//! unknown name is a bug of ours: it panics in debug builds and is counted in release builds.

use std::collections::{HashMap, HashSet};
use std::fmt::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use hashbrown::HashTable;
use parking_lot::Mutex;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::config::{MetricConfig, MetricKind};

/// Label value that stands for all beyond the bound.
const OTHER: &str = "other";
/// Counts uses of names that the catalogue does not have; not in the catalogue itself, since it only shows our bugs.
const UNKNOWN_NAMES: &str = "warmfront_unknown_metrics_total";

/// A number that only grows.
#[derive(Clone, Debug, Default)]
pub struct Counter(Arc<AtomicU64>);

impl Counter {
    pub fn inc(&self, n: u64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }

    pub fn value(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// A number that goes up and down.
#[derive(Clone, Debug, Default)]
pub struct Gauge(Arc<AtomicU64>);

impl Gauge {
    pub fn set(&self, value: f64) {
        self.0.store(value.to_bits(), Ordering::Relaxed);
    }

    pub fn add(&self, delta: f64) {
        add_f64(&self.0, delta);
    }

    pub fn value(&self) -> f64 {
        f64::from_bits(self.0.load(Ordering::Relaxed))
    }
}

/// A distribution over the bucket bounds of the catalogue.
#[derive(Clone, Debug, Default)]
pub struct Histogram(Arc<Buckets>);

#[derive(Debug, Default)]
struct Buckets {
    bounds: Vec<f64>,
    /// One a bound and one for everything above.
    counts: Vec<AtomicU64>,
    sum: AtomicU64,
}

impl Histogram {
    fn new(bounds: &[f64]) -> Self {
        let counts = (0..=bounds.len()).map(|_| AtomicU64::new(0)).collect();
        Self(Arc::new(Buckets { bounds: bounds.to_vec(), counts, sum: AtomicU64::new(0) }))
    }

    pub fn observe(&self, value: f64) {
        self.observe_many(value, 1);
    }

    /// Notes the same value `n` times: one chunk may carry several events.
    pub fn observe_many(&self, value: f64, n: u64) {
        let Some(count) = self.0.counts.get(self.0.bounds.partition_point(|bound| *bound < value)) else {
            return; // a default handle of an unknown name
        };
        count.fetch_add(n, Ordering::Relaxed);
        add_f64(&self.0.sum, value * n as f64);
    }

    pub fn count(&self) -> u64 {
        self.0.counts.iter().map(|count| count.load(Ordering::Relaxed)).sum()
    }
}

fn add_f64(cell: &AtomicU64, delta: f64) {
    let mut current = cell.load(Ordering::Relaxed);
    while let Err(newer) = cell.compare_exchange_weak(
        current,
        (f64::from_bits(current) + delta).to_bits(),
        Ordering::Relaxed,
        Ordering::Relaxed,
    ) {
        current = newer;
    }
}

#[derive(Clone, Debug)]
enum Series {
    Counter(Counter),
    Gauge(Gauge),
    Histogram(Histogram),
}

#[derive(Debug)]
struct Family {
    config: MetricConfig,
    series: Mutex<SeriesMap>,
}

/// A row: label values in the order of the catalogue, and what is counted for them.
type Row = (Box<[String]>, Series);

#[derive(Debug, Default)]
struct SeriesMap {
    /// Under the hash of the label values, so that a lookup makes no strings.
    rows: HashTable<Row>,
    /// Distinct values seen, a set for each label.
    values: Vec<HashSet<String>>,
}

/// All metrics of the data process.
#[derive(Debug)]
pub struct Metrics {
    families: HashMap<String, Family>,
    order: Vec<String>,
    label_values_max: usize,
    unknown_names: AtomicU64,
}

impl Metrics {
    /// Registers every family of the catalogue. Those without labels exist at once, so that they show as zero.
    #[must_use]
    pub fn new(catalogue: &[MetricConfig], label_values_max: usize) -> Self {
        let families: HashMap<String, Family> = catalogue
            .iter()
            .map(|config| {
                let values = vec![HashSet::new(); config.labels.len()];
                let series = Mutex::new(SeriesMap { rows: HashTable::new(), values });
                (config.name.clone(), Family { config: config.clone(), series })
            })
            .collect();
        let order = catalogue.iter().map(|config| config.name.clone()).collect();
        let metrics = Self { families, order, label_values_max, unknown_names: AtomicU64::new(0) };
        for config in catalogue.iter().filter(|config| config.labels.is_empty()) {
            metrics.series(&config.name, config.kind, &[]);
        }
        metrics
    }

    pub fn counter(&self, name: &str, labels: &[&str]) -> Counter {
        match self.series(name, MetricKind::Counter, labels) {
            Some(Series::Counter(counter)) => counter,
            _ => Counter::default(),
        }
    }

    pub fn gauge(&self, name: &str, labels: &[&str]) -> Gauge {
        match self.series(name, MetricKind::Gauge, labels) {
            Some(Series::Gauge(gauge)) => gauge,
            _ => Gauge::default(),
        }
    }

    pub fn histogram(&self, name: &str, labels: &[&str]) -> Histogram {
        match self.series(name, MetricKind::Histogram, labels) {
            Some(Series::Histogram(histogram)) => histogram,
            _ => Histogram::default(),
        }
    }

    /// Adds `n` to a counter. `labels` are the values in the order of the catalogue.
    pub fn inc(&self, name: &str, labels: &[&str], n: u64) {
        self.counter(name, labels).inc(n);
    }

    pub fn set(&self, name: &str, labels: &[&str], value: f64) {
        self.gauge(name, labels).set(value);
    }

    pub fn observe(&self, name: &str, labels: &[&str], value: f64) {
        self.histogram(name, labels).observe(value);
    }

    /// Drops all series whose value of this label is none of `known`, whoever wrote them and when. The value that stands
    /// for all beyond the bound stays.
    pub fn retain(&self, label: &str, known: &HashSet<&str>) {
        for family in self.families.values() {
            let Some(position) = family.config.labels.iter().position(|name| name == label) else { continue };
            let mut series = family.series.lock();
            series.rows.retain(|(labels, _)| labels[position] == OTHER || known.contains(labels[position].as_str()));
            series.values[position].retain(|value| known.contains(value.as_str()));
        }
    }

    /// The label values and the value of each series of a counter or gauge, in the order of the labels.
    pub fn rows(&self, name: &str) -> Vec<(Box<[String]>, f64)> {
        let Some(family) = self.families.get(name) else { return Vec::new() };
        let map = family.series.lock();
        let mut rows: Vec<_> = map
            .rows
            .iter()
            .filter_map(|(labels, series)| match series {
                Series::Counter(counter) => Some((labels.clone(), counter.value() as f64)),
                Series::Gauge(gauge) => Some((labels.clone(), gauge.value())),
                Series::Histogram(_) => None,
            })
            .collect();
        rows.sort_unstable_by(|(one, _), (other, _)| one.cmp(other));
        rows
    }

    /// The Prometheus text format, families in the order of the catalogue.
    #[must_use]
    pub fn render(&self) -> String {
        let mut out = String::with_capacity(16 * 1024);
        for name in &self.order {
            self.families[name].render(&mut out);
        }
        let unknown = self.unknown_names.load(Ordering::Relaxed);
        if unknown > 0 {
            push_line(&mut out, UNKNOWN_NAMES, "", "", &unknown.to_string());
        }
        out
    }

    fn series(&self, name: &str, kind: MetricKind, labels: &[&str]) -> Option<Series> {
        let family = self
            .families
            .get(name)
            .filter(|family| family.config.kind == kind && family.config.labels.len() == labels.len());
        debug_assert!(family.is_some(), "metric {name} of kind {kind:?} with {} labels", labels.len());
        let Some(family) = family else {
            self.unknown_names.fetch_add(1, Ordering::Relaxed);
            return None;
        };
        Some(family.series(labels, self.label_values_max))
    }
}

impl Family {
    fn series(&self, labels: &[&str], label_values_max: usize) -> Series {
        let mut map = self.series.lock();
        if let Some((_, series)) = map.rows.find(hash_of(labels), |(row, _)| **row == *labels) {
            return series.clone();
        }
        let labels: Box<[String]> = labels
            .iter()
            .zip(&mut map.values)
            .map(|(value, seen)| {
                if seen.contains(*value) || seen.len() < label_values_max {
                    seen.insert((*value).to_owned());
                    (*value).to_owned()
                } else {
                    OTHER.to_owned()
                }
            })
            .collect();
        let hash = hash_of(&labels);
        let found = map.rows.entry(hash, |(row, _)| *row == labels, |(row, _)| hash_of(row));
        found.or_insert_with(|| (labels.clone(), self.fresh())).get().1.clone()
    }

    fn fresh(&self) -> Series {
        match self.config.kind {
            MetricKind::Counter => Series::Counter(Counter::default()),
            MetricKind::Gauge => Series::Gauge(Gauge::default()),
            MetricKind::Histogram => Series::Histogram(Histogram::new(&self.config.buckets)),
        }
    }

    fn render(&self, out: &mut String) {
        let MetricConfig { name, kind, help, labels: names, .. } = &self.config;
        let kind = match kind {
            MetricKind::Counter => "counter",
            MetricKind::Gauge => "gauge",
            MetricKind::Histogram => "histogram",
        };
        let help = help.replace('\\', "\\\\").replace('\n', "\\n");
        writeln!(out, "# HELP {name} {help}\n# TYPE {name} {kind}").expect("writing to a string cannot fail");
        let map = self.series.lock();
        let mut rows: Vec<&Row> = map.rows.iter().collect();
        rows.sort_unstable_by_key(|(values, _)| values);
        for (values, series) in rows {
            let labels = label_text(names, values);
            match series {
                Series::Counter(counter) => push_line(out, name, "", &labels, &counter.value().to_string()),
                Series::Gauge(gauge) => push_line(out, name, "", &labels, &number(gauge.value())),
                Series::Histogram(histogram) => render_histogram(out, name, &labels, &histogram.0),
            }
        }
    }
}

/// Hash of the label values, each hashed under the hash of those before it.
fn hash_of<S: AsRef<str>>(labels: &[S]) -> u64 {
    labels.iter().fold(0, |seed, value| xxh3_64_with_seed(value.as_ref().as_bytes(), seed))
}

fn render_histogram(out: &mut String, name: &str, labels: &str, buckets: &Buckets) {
    let comma = if labels.is_empty() { "" } else { "," };
    let mut total = 0;
    for (slot, count) in buckets.counts.iter().enumerate() {
        total += count.load(Ordering::Relaxed);
        let bound = buckets.bounds.get(slot).map_or_else(|| "+Inf".to_owned(), |bound| number(*bound));
        push_line(out, name, "_bucket", &format!("{labels}{comma}le=\"{bound}\""), &total.to_string());
    }
    push_line(out, name, "_sum", labels, &number(f64::from_bits(buckets.sum.load(Ordering::Relaxed))));
    push_line(out, name, "_count", labels, &total.to_string());
}

fn label_text(names: &[String], values: &[String]) -> String {
    let pairs = names.iter().zip(values).map(|(name, value)| {
        let value = value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
        format!("{name}=\"{value}\"")
    });
    pairs.collect::<Vec<_>>().join(",")
}

fn push_line(out: &mut String, name: &str, suffix: &str, labels: &str, value: &str) {
    let (open, close) = if labels.is_empty() { ("", "") } else { ("{", "}") };
    writeln!(out, "{name}{suffix}{open}{labels}{close} {value}").expect("writing to a string cannot fail");
}

fn number(value: f64) -> String {
    if value.is_infinite() {
        return if value > 0.0 { "+Inf".to_owned() } else { "-Inf".to_owned() };
    }
    value.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn family(name: &str, kind: MetricKind, labels: &[&str]) -> MetricConfig {
        MetricConfig {
            name: name.to_owned(),
            kind,
            help: "Some help.".to_owned(),
            labels: labels.iter().map(|label| (*label).to_owned()).collect(),
            buckets: vec![0.1, 1.0],
        }
    }

    #[test]
    fn a_family_without_labels_shows_as_zero_from_the_start() {
        let metrics = Metrics::new(&[family("a_total", MetricKind::Counter, &[])], 10);
        assert_eq!(metrics.render(), "# HELP a_total Some help.\n# TYPE a_total counter\na_total 0\n");
    }

    #[test]
    fn buckets_are_cumulative_and_end_with_infinity() {
        let metrics = Metrics::new(&[family("a_seconds", MetricKind::Histogram, &["model"])], 10);
        let histogram = metrics.histogram("a_seconds", &["m"]);
        histogram.observe(0.1);
        histogram.observe_many(0.5, 2);
        histogram.observe(7.0);
        let text = metrics.render();
        assert!(text.contains("a_seconds_bucket{model=\"m\",le=\"0.1\"} 1\n"), "{text}");
        assert!(text.contains("a_seconds_bucket{model=\"m\",le=\"1\"} 3\n"), "{text}");
        assert!(text.contains("a_seconds_bucket{model=\"m\",le=\"+Inf\"} 4\n"), "{text}");
        assert!(text.contains("a_seconds_sum{model=\"m\"} 8.1\n"), "{text}");
        assert!(text.contains("a_seconds_count{model=\"m\"} 4\n"), "{text}");
    }

    #[test]
    fn label_values_beyond_the_bound_count_under_other() {
        let metrics = Metrics::new(&[family("a_total", MetricKind::Counter, &["model"])], 2);
        for model in ["x", "y", "z", "w", "x"] {
            metrics.inc("a_total", &[model], 1);
        }
        let text = metrics.render();
        assert!(text.contains("a_total{model=\"x\"} 2\n"), "{text}");
        assert!(text.contains("a_total{model=\"other\"} 2\n"), "{text}");
    }

    // bug 134, 142
    #[test]
    fn a_forgotten_replica_shows_no_more_and_frees_its_label_value() {
        let metrics = Metrics::new(&[family("ready", MetricKind::Gauge, &["replica"])], 1);
        metrics.set("ready", &["a"], 1.0);
        metrics.retain("replica", &HashSet::new());
        metrics.set("ready", &["b"], 1.0);
        assert!(metrics.render().ends_with("ready{replica=\"b\"} 1\n"));
    }

    // bug 134 and 142
    #[test]
    fn series_of_what_is_gone_go_and_all_others_stay() {
        let metrics = Metrics::new(&[family("c_total", MetricKind::Counter, &["model"])], 10);
        for model in ["a", "b"] {
            metrics.inc("c_total", &[model], 1);
        }
        metrics.retain("model", &HashSet::from(["b"]));
        let text = metrics.render();
        assert!(!text.contains(r#"model="a""#) && text.contains(r#"model="b""#), "{text}");
    }

    #[test]
    fn label_values_are_escaped() {
        let metrics = Metrics::new(&[family("a_total", MetricKind::Counter, &["model"])], 10);
        metrics.inc("a_total", &["a\"b\\c\nd"], 1);
        assert!(metrics.render().contains(r#"a_total{model="a\"b\\c\nd"} 1"#));
    }

    #[test]
    #[should_panic(expected = "metric nothing")]
    #[cfg(debug_assertions)]
    fn an_unknown_name_is_a_bug() {
        Metrics::new(&[], 10).inc("nothing", &[], 1);
    }
}
