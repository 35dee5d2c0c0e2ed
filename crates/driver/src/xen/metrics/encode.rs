//! Encoding of metrics in the OpenMetrics text format.

use core::fmt;
use std::borrow::Cow;

use prometheus_client::encoding::{
    DescriptorEncoder, EncodeLabelSet, LabelSetEncoder, MetricEncoder, NoLabelSet,
};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Unit;

use crate::xen::status::Counts;

/// Names and values of labels. Values are escaped here, because the library writes them unchanged: a
/// guest's name must not be able to end its label.
#[derive(Clone, Debug, Default)]
pub struct Labels<'a>(Vec<(&'static str, Cow<'a, str>)>);

impl<'a> Labels<'a> {
    /// Returns the labels with another one.
    pub fn and(&self, name: &'static str, value: &'a str) -> Labels<'a> {
        let mut labels = self.clone();
        labels.0.push((name, escaped(value)));
        labels
    }
}

impl EncodeLabelSet for Labels<'_> {
    fn encode(&self, encoder: &mut LabelSetEncoder<'_>) -> fmt::Result {
        use prometheus_client::encoding::EncodeLabel;
        self.0
            .iter()
            .try_for_each(|(name, value)| (*name, value.as_ref()).encode(encoder.encode_label()))
    }
}

/// Escapes a label's value as the format requires.
fn escaped(text: &str) -> Cow<'_, str> {
    if text.contains(['\\', '"', '\n']) {
        text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n").into()
    } else {
        text.into()
    }
}

/// Description of a metric.
#[derive(Clone, Copy, Debug)]
pub struct About<'a> {
    /// Name without the prefix of all metrics of a process, and without `_total`.
    pub name: &'a str,
    pub help: &'a str,
}

impl<'a> About<'a> {
    /// Describes the metric `name`.
    pub fn new(name: &'a str, help: &'a str) -> About<'a> {
        About { name, help }
    }
}

/// Describes a metric and writes its values.
///
/// # Errors
///
/// Returns the error of the encoder.
pub fn family(
    encoder: &mut DescriptorEncoder<'_>,
    about: About<'_>,
    kind: MetricType,
    mut write: impl FnMut(&mut MetricEncoder<'_>) -> fmt::Result,
) -> fmt::Result {
    let About { name, help } = about;
    let unit = if name.ends_with("seconds") { Some(&Unit::Seconds) } else { None };
    let name = unit.map_or(name, |_| name.trim_end_matches("_seconds"));
    write(&mut encoder.encode_descriptor(name, help, unit, kind)?)
}

/// Writes the value of a gauge.
///
/// # Errors
///
/// Returns the error of the encoder.
pub fn gauge(metric: &mut MetricEncoder<'_>, labels: &Labels<'_>, value: u64) -> fmt::Result {
    if labels.0.is_empty() {
        return metric.encode_gauge(&value);
    }
    metric.encode_family(labels)?.encode_gauge(&value)
}

/// Writes the value of a counter.
///
/// # Errors
///
/// Returns the error of the encoder.
pub fn counter(metric: &mut MetricEncoder<'_>, labels: &Labels<'_>, value: u64) -> fmt::Result {
    if labels.0.is_empty() {
        return metric.encode_counter::<NoLabelSet, _, u64>(&value, None);
    }
    metric.encode_family(labels)?.encode_counter::<NoLabelSet, _, u64>(&value, None)
}

/// Writes one counter for each name, distinguished by a label.
///
/// # Errors
///
/// Returns the error of the encoder.
pub fn each(
    metric: &mut MetricEncoder<'_>,
    labels: &Labels<'_>,
    label: &'static str,
    counts: &Counts,
) -> fmt::Result {
    counts.iter().try_for_each(|(name, count)| counter(metric, &labels.and(label, name), *count))
}
