//! Harness of all benchmarks: cases, their runs, and the report of the measured values.
//!
//! # Theory of operation
//!
//! ```text
//!  Case ── run ──▶ measured value      (rounds: each round runs every case once)
//!                        │
//!                     Summary          (runs of one case, with those of its baseline)
//!                        │
//!  Layout ──────────▶ Report ──▶ table, lines of JSON, page
//! ```
//!
//! A [`Case`] is one combination of a benchmark's parameters. [`Runs::measure`] runs all cases in each
//! round, so that interference affects all of them alike, and compares runs of the same round only
//! ([`Summary::ratio`]).
//!
//! A row is any value that a [`Layout`] describes: each column names the field of the JSON object, computes its
//! [`Value`], and says where and how the table shows it. A [`Report`] prints rows as they come, either as a
//! table with heading and legend or as one JSON object a line. A [`Page`] takes the same layout for its tables.
//!
//! Field names, headings and widths are part of a command's interface; the layouts are their only definition.

mod layout;
mod page;
mod progress;
mod report;
mod rounds;
mod table;
mod value;

pub(crate) use layout::{Layout, left, right};
pub(crate) use page::{Axis, Bar, BarChart, BarGroup, Page, Plot, Scale, Series, number};
pub(crate) use progress::progress;
pub(crate) use report::{Format, Report};
pub(crate) use rounds::{Attempt, Case, Runs, Summary, median};
pub(crate) use table::Table;
pub(crate) use value::Value;

/// Exit status of a failed benchmark: a packet was lost or damaged, or the benchmark could not run.
pub(crate) const STATUS_BENCH_FAILED: u8 = 1;
