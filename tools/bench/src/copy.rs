//! `ringfence-bench copy`: time of each copy routine of lent memory, beside `memcpy`.
//!
//! A row has a length, an offset (destination minus source, modulo 4096) and a cache that has the source:
//!
//! * `own`: the same two ranges, copied again and again on one core.
//! * `other`: ranges that a thread on another core has just written. The threads pass the memory back and
//!   forth; only copies are measured. Needs two cores.
//!
//! The routines take turns within a round, so that a disturbance hits all of them. The time is this thread's CPU
//! time, which excludes preemption, and the row has the median of all rounds.

use std::hint::black_box;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use anyhow::{Context, ensure};
use clap::{Args, ValueEnum};
use ringfence_memory::{CopyRoutine, PAGE_SIZE};
use rustix::time::ClockId;
use serde::Serialize;

use super::affinity::{allowed, bind};
use super::usage::clock;
use crate::harness::{Format, Layout, Report, Value, median, progress, right};

/// Maximum length of a copy in bytes.
const SIZE_MAX: u32 = 1 << 20;
/// Bytes of one measurement whose source is in this core's cache.
const OWN_BYTES: usize = 1 << 17;
/// Bytes that the other core writes at a time: a part of its second-level cache.
const OTHER_BYTES: usize = 1 << 18;

const NOTES: &str = "\
Each figure is the median of the rounds, in nanoseconds of the thread's processor time for each
copy. `chosen` is the routine that every copy of lent memory uses on this processor, `memcpy` that
of the C library.

The offset is destination minus source, modulo 4096. Payload that is copied from a page into a
buffer can have any offset. On some processors `rep movsb`, and a memcpy that uses it, is many times
slower at small ones.";

/// Time of each copy routine of lent memory, beside memcpy
#[derive(Debug, Args)]
#[command(after_help = NOTES)]
pub struct CopyArgs {
    /// Bytes of a copy
    #[arg(long, value_name = "BYTES", value_delimiter = ',',
          default_value = "16,64,128,256,512,768,1024,1500,2048,3968,4096,9000,16384,65000",
          value_parser = clap::value_parser!(u32).range(1..=i64::from(SIZE_MAX)))]
    pub size: Vec<u32>,

    /// Destination minus source, modulo 4096
    #[arg(long, value_name = "BYTES", value_delimiter = ',', default_value = "0,2,14,16,64,66,2048,4094",
          value_parser = clap::value_parser!(u32).range(0..=4095))]
    pub offset: Vec<u32>,

    /// Cache that has the source
    #[arg(long, value_name = "CACHE", value_delimiter = ',', default_value = "own,other")]
    pub cache: Vec<Cache>,

    /// Rounds of which the median is taken
    #[arg(long, value_name = "N", default_value = "15",
          value_parser = clap::value_parser!(u32).range(1..=1001))]
    pub rounds: u32,

    /// One JSON object a line
    #[arg(long)]
    pub json: bool,
}

/// Cache that has the source of a copy.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Cache {
    /// Cache of the core that copies
    Own,
    /// Cache of another core, which has just written it
    Other,
}

/// Copy function under measurement; `None` is memcpy.
type Subject = Option<CopyRoutine>;

pub(super) fn run(args: &CopyArgs) -> anyhow::Result<()> {
    let subjects: Vec<Subject> =
        CopyRoutine::available().into_iter().map(Some).chain([None]).collect();
    let bar = progress(args.size.len() * args.offset.len() * args.cache.len());
    let format = Format::of(args.json);
    let table = Report::begin(table(&subjects), format)?.beside(&bar);
    let lines = table.continued(layout());
    for &size in &args.size {
        for &offset in &args.offset {
            for &cache in &args.cache {
                let times = match cache {
                    Cache::Own => own(&subjects, size, offset, args.rounds)?,
                    Cache::Other => other(&subjects, size, offset, args.rounds)?,
                };
                let times = CopyTimes { size, offset, cache, subjects: &subjects, times };
                match format {
                    Format::Table => table.row(&times)?,
                    Format::Json => times.each().try_for_each(|time| lines.row(&time))?,
                }
                bar.inc(1);
            }
        }
    }
    Ok(())
}

/// Times of all routines for one length, offset and cache: a line of the table.
struct CopyTimes<'a> {
    size: u32,
    offset: u32,
    cache: Cache,
    subjects: &'a [Subject],
    /// Median time of each subject in nanoseconds.
    times: Vec<f64>,
}

/// Time of one routine: a line of JSON.
struct CopyTime {
    size: u32,
    offset: u32,
    cache: Cache,
    subject: Subject,
    ns: f64,
    /// Time of memcpy divided by this one.
    times_memcpy: f64,
}

impl CopyTimes<'_> {
    fn of(&self, subject: Subject) -> f64 {
        let at = self.subjects.iter().position(|s| *s == subject);
        at.and_then(|at| self.times.get(at)).copied().unwrap_or(f64::NAN)
    }

    fn each(&self) -> impl Iterator<Item = CopyTime> {
        let CopyTimes { size, offset, cache, .. } = *self;
        let times = self.subjects.iter().zip(&self.times);
        times.map(move |(&subject, &ns)| {
            let times_memcpy = self.of(None) / ns;
            CopyTime { size, offset, cache, subject, ns, times_memcpy }
        })
    }

    /// Returns the time of memcpy divided by that of the chosen routine.
    fn share(&self) -> f64 {
        self.of(None) / self.of(Some(CopyRoutine::Chosen))
    }
}

fn table<'a>(subjects: &[Subject]) -> Layout<CopyTimes<'a>> {
    let layout = Layout::new()
        .column("size", |row: &CopyTimes<'_>| row.size, right("bytes", 6))
        .column("offset", |row| row.offset, right("offset", 6))
        .column("cache", |row| Value::json(&row.cache), right("cache", 6));
    let time = |layout: Layout<CopyTimes<'a>>, &subject: &Subject| {
        layout.cell(right(name(subject), 8), move |row| format!("{:.1}", row.of(subject)))
    };
    let layout = subjects.iter().fold(layout, time);
    layout.tail("  memcpy/chosen", |row| format!("  {:.2}", row.share()))
}

fn layout() -> Layout<CopyTime> {
    Layout::new()
        .field("experiment", |_: &CopyTime| "copy")
        .field("size", |time| time.size)
        .field("offset", |time| time.offset)
        .field("cache", |time| Value::json(&time.cache))
        .field("routine", |time| name(time.subject))
        .field("ns", |time| time.ns)
        .field("times_memcpy", |time| time.times_memcpy)
}

fn name(subject: Subject) -> &'static str {
    subject.map_or("memcpy", CopyRoutine::name)
}

#[inline]
fn copy(subject: Subject, from: &[u8], to: &mut [u8]) {
    match subject {
        Some(routine) => routine.copy(from, to),
        None => to.copy_from_slice(from),
    }
}

/// Ranges of one size in private memory, each at the same offset from the start of a page.
struct Ranges {
    memory: Vec<u8>,
    first: usize,
    stride: usize,
    size: usize,
    count: usize,
}

impl Ranges {
    fn new(size: u32, offset: u32, count: usize) -> Ranges {
        let (size, offset) = (size as usize, offset as usize);
        let stride = (size + offset).next_multiple_of(PAGE_SIZE);
        let memory = vec![1; count * stride + PAGE_SIZE];
        let first = memory.as_ptr().addr().wrapping_neg() % PAGE_SIZE + offset;
        Ranges { memory, first, stride, size, count }
    }

    fn get(&self, number: usize) -> &[u8] {
        let at = self.first + number % self.count * self.stride;
        &self.memory[at..at + self.size]
    }

    fn get_mut(&mut self, number: usize) -> &mut [u8] {
        let at = self.first + number % self.count * self.stride;
        &mut self.memory[at..at + self.size]
    }
}

/// Returns the median time of each subject in nanoseconds for a source in this core's cache.
fn own(subjects: &[Subject], size: u32, offset: u32, rounds: u32) -> anyhow::Result<Vec<f64>> {
    let (from, mut to) = (Ranges::new(size, 0, 1), Ranges::new(size, offset, 1));
    let count = (OWN_BYTES / size as usize).clamp(4, 2000);
    let mut times = vec![Vec::new(); subjects.len()];
    for _ in 0..rounds {
        for (subject, times) in subjects.iter().zip(&mut times) {
            copy(*subject, from.get(0), to.get_mut(0));
            let began = clock(ClockId::ThreadCPUTime);
            for _ in 0..count {
                copy(*subject, black_box(from.get(0)), black_box(to.get_mut(0)));
            }
            times.push((clock(ClockId::ThreadCPUTime) - began) as f64 / count as f64);
        }
    }
    ensure!(to.get(0) == from.get(0), "a copy of {size} bytes is wrong");
    Ok(times.into_iter().map(|times| median(times.into_iter())).collect())
}

/// Returns the median time of each subject in nanoseconds for sources that another core has just written.
fn other(subjects: &[Subject], size: u32, offset: u32, rounds: u32) -> anyhow::Result<Vec<f64>> {
    let cores = std::thread::available_parallelism()?.get();
    ensure!(cores > 1, "--cache other needs two cores, this machine lets us use {cores}");
    let stride = (size as usize).next_multiple_of(PAGE_SIZE);
    let count = (OTHER_BYTES / stride).max(1);
    let (to_writer, of_reader) = sync_channel::<Ranges>(1);
    let (to_reader, of_writer) = sync_channel::<Ranges>(1);
    std::thread::scope(|scope| {
        let writer = scope.spawn(move || write_ranges(&of_reader, &to_reader));
        let reader = scope.spawn(move || {
            choose_core(0)?;
            let mut from = Ranges::new(size, 0, count);
            let mut to = Ranges::new(size, offset, count);
            let mut times = vec![Vec::new(); subjects.len()];
            for _ in 0..rounds {
                for (subject, times) in subjects.iter().zip(&mut times) {
                    to_writer.send(from).ok().context("the writer ended")?;
                    from = of_writer.recv().context("the writer ended")?;
                    let began = clock(ClockId::ThreadCPUTime);
                    for number in 0..count {
                        copy(*subject, black_box(from.get(number)), black_box(to.get_mut(number)));
                    }
                    times.push((clock(ClockId::ThreadCPUTime) - began) as f64 / count as f64);
                    let last = count - 1;
                    ensure!(to.get(last) == from.get(last), "a copy of {size} bytes is wrong");
                }
            }
            drop(to_writer);
            Ok(times.into_iter().map(|times| median(times.into_iter())).collect())
        });
        let times = reader.join().ok().context("the reader panicked")?;
        writer.join().ok().context("the writer panicked")??;
        times
    })
}

/// Writes ranges on another core until the reader ends.
fn write_ranges(asked: &Receiver<Ranges>, done: &SyncSender<Ranges>) -> anyhow::Result<()> {
    choose_core(1)?;
    let mut value = 0u8;
    while let Ok(mut ranges) = asked.recv() {
        value = value.wrapping_add(1);
        for number in 0..ranges.count {
            ranges.get_mut(number).fill(value);
        }
        if done.send(ranges).is_err() {
            break;
        }
    }
    Ok(())
}

/// Binds this thread to the core of that number among those that it may use.
fn choose_core(number: usize) -> anyhow::Result<()> {
    bind(*allowed()?.get(number).context("too few cores")?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_subject_has_a_time_in_each_cache() {
        let subjects = [Some(CopyRoutine::Chosen), None];
        for (size, offset) in [(16, 0), (1500, 2), (65_000, 4094)] {
            for times in [own(&subjects, size, offset, 2), other(&subjects, size, offset, 2)] {
                let times = times.unwrap();
                assert!(times.len() == 2 && times.iter().all(|ns| *ns > 0.0), "{times:?}");
            }
        }
    }

    #[test]
    fn ranges_begin_at_their_offset_within_a_page() {
        for offset in [0, 1, 66, 4095] {
            let ranges = Ranges::new(1500, offset, 3);
            for number in 0..3 {
                let range = ranges.get(number);
                assert_eq!(range.as_ptr().addr() % PAGE_SIZE, offset as usize);
                assert_eq!(range.len(), 1500);
            }
        }
    }

    #[test]
    fn row_of_json_names_routine_and_memcpy_share() {
        let subjects = [Some(CopyRoutine::Chosen), None];
        let times = CopyTimes {
            size: 64,
            offset: 2,
            cache: Cache::Own,
            subjects: &subjects,
            times: vec![2.0, 3.0],
        };
        let lines = times.each().map(|time| layout().json(&time).unwrap());
        let lines: Vec<String> = lines.collect();
        let first: serde_json::Value = serde_json::from_str(&lines[0]).unwrap();
        assert_eq!((first["routine"].as_str(), first["ns"].as_f64()), (Some("chosen"), Some(2.0)));
        assert_eq!(
            (first["cache"].as_str(), first["times_memcpy"].as_f64()),
            (Some("own"), Some(1.5))
        );
        assert_eq!(lines.len(), 2);
        let table = table(&subjects);
        assert_eq!(table.heading(), " bytes offset  cache   chosen   memcpy  memcpy/chosen");
        assert_eq!(table.line(&times), "    64      2    own      2.0      3.0  1.50");
    }
}
