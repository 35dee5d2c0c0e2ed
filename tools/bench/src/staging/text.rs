//! Tables of the staging experiment, as text and on a page.

use std::fmt::Write;

use ringfence_access::Mode;

use super::report::{COPY_SHARE_MIN, Judgement, Results, gbps};
use super::{Forwarder, Point, VerifyExtent, published};
use crate::harness::Table;

impl Results<'_> {
    /// Returns all tables and notes for a terminal.
    pub(super) fn text(&self) -> String {
        let mut text = String::new();
        for table in self.tables() {
            text += &table.text();
            text.push('\n');
        }
        for note in self.notes() {
            text += &wrapped(&note);
            text.push('\n');
        }
        text
    }

    /// Returns the tables of the source document, then those of the peers.
    pub(super) fn tables(&self) -> Vec<Table<'static>> {
        let mut tables: Vec<Table<'static>> =
            self.args.sizes.iter().map(|size| self.before_and_after(*size)).collect();
        if !self.args.vs.is_empty() {
            tables.push(self.beside_peers());
        }
        tables
    }

    fn before_and_after(&self, size: u32) -> Table<'static> {
        let bulk = size >= published::BULK;
        let unit = if bulk { "Gbit/s" } else { "Mpps" };
        let rate = |pps: f64| format!("{:.2}", if bulk { gbps(pps, size) } else { pps / 1e6 });
        let mut rows = Vec::new();
        for point in self.points().filter(|point| point.size == size && self.in_tables(*point)) {
            let Forwarder::Ringfence(Mode::Staging, verify) = point.forwarder else { continue };
            let copy = point.with(Forwarder::Ringfence(Mode::Copy, verify));
            let mut row = vec![
                point.queues.to_string(),
                point.direction.to_string(),
                verify.name().to_owned(),
            ];
            let (Some(before), Some(after)) = (self.pps(copy), self.pps(point)) else {
                let why = self.skipped(point).unwrap_or("not measured");
                row.extend(["-"; 8].map(str::to_owned));
                row.push(format!("skipped: {why}"));
                rows.push(row);
                continue;
            };
            let beside = self.beside_copy(point);
            let ratio = beside.as_ref().map_or(0.0, |beside| beside.ratio);
            let wanted = beside.as_ref().and_then(|beside| beside.wanted);
            let share = beside.as_ref().and_then(|beside| beside.copy_share).unwrap_or(0.0);
            row.extend([rate(before), rate(after), format!("{ratio:.2}")]);
            row.push(wanted.map_or("-".to_owned(), |wanted| format!("{wanted:.2}")));
            row.push(format!("{share:.2}"));
            row.extend([10.0, 40.0, 100.0].map(|gigabits| {
                format!("{:.0}%", 100.0 * after / published::line_rate(gigabits, size))
            }));
            row.push(self.words(point, beside.map(|beside| beside.judgement), after));
            rows.push(row);
        }
        Table {
            title: format!("{} octets, {unit}: before (copy) and after (staging)", size),
            heading: vec![
                "queues",
                "dir",
                "verified",
                "before",
                "after",
                "ratio",
                "published",
                "share",
                "of 10G",
                "40G",
                "100G",
                "judgement",
            ],
            rows,
        }
    }

    /// Returns the judgement and, if a bulk transfer falls short, the bound that applies.
    fn words(&self, point: Point, judgement: Option<Judgement>, after: f64) -> String {
        let mut words = judgement.map(|judgement| judgement.to_string()).unwrap_or_default();
        if let (Some(bound), 1) = (self.hand_over(point.size), point.queues) {
            let part = gbps(after, point.size) / bound.max(f64::MIN_POSITIVE);
            let _ = write!(words, " ({part:.2} of a bare hand-over, {bound:.0} Gbit/s)");
        }
        words
    }

    fn in_tables(&self, point: Point) -> bool {
        self.args.queues.contains(&point.queues)
    }

    fn beside_peers(&self) -> Table<'static> {
        let mut rows = Vec::new();
        for point in self.points() {
            let Forwarder::Peer(peer) = point.forwarder else { continue };
            let ours = |verify| self.pps(point.with(Forwarder::Ringfence(Mode::Staging, verify)));
            let mpps =
                |rate: Option<f64>| rate.map_or("-".to_owned(), |pps| format!("{:.2}", pps / 1e6));
            let mut row =
                vec![point.size.to_string(), point.direction.to_string(), peer.name().to_owned()];
            row.extend([
                mpps(self.pps(point)),
                mpps(ours(VerifyExtent::Sequence)),
                mpps(ours(VerifyExtent::Full)),
            ]);
            match (self.beside_peer(point), self.skipped(point)) {
                (Some(beside), _) => {
                    let wanted =
                        beside.wanted.map_or("-".to_owned(), |wanted| format!("{wanted:.1}"));
                    row.extend([
                        format!("{:.2}", beside.ratio),
                        wanted,
                        beside.judgement.to_string(),
                    ]);
                }
                (None, why) => {
                    row.extend(["-", "-"].map(str::to_owned));
                    row.push(format!("skipped: {}", why.unwrap_or("not measured")));
                }
            }
            rows.push(row);
        }
        Table {
            title: "Mpps beside DPDK's testpmd: one queue, the same two cores".to_owned(),
            heading: vec![
                "octets",
                "dir",
                "peer",
                "peer's",
                "staging",
                "verified",
                "ratio",
                "wanted",
                "judgement",
            ],
            rows,
        }
    }

    /// Returns the explanations of the tables, one paragraph each.
    pub(super) fn notes(&self) -> Vec<String> {
        let mut notes = vec![
            format!(
                "`before` is mode copy: a system call by which the kernel copies, for each packet or run of neighbouring pages. In the \
                 published figures it was a hypercall by which Xen copies, for a batch of slots, behind it a NIC of 100 Gbit/s and the \
                 network stack of a Linux of 2017. These are different costs, and nothing of the stack is measured here: a ratio says \
                 what staging saves of the one, not of the other. It is judged only while copy reaches {COPY_SHARE_MIN} of the bare kernel \
                 copy (`share`: the part of its time that one bare pread or pwrite for each packet takes)."
            ),
            "`verified`: what the sink looks at. `sequence`: length and sequence number of each packet; `full`: every byte as well. \
             `of 10G`, `40G`, `100G`: the rate after, as a share of what a link carries of such packets, with preamble, check sequence and \
             gap (24 bytes a packet)."
                .to_owned(),
        ];
        if self.args.queues.iter().any(|queues| self.oversubscribed(*queues)) {
            notes.push(
                "Oversubscribed rows have more polling threads (one a queue on each side) than there are cores: the threads take turns."
                    .to_owned(),
            );
        }
        if self.args.sizes.iter().any(|size| self.hand_over(*size).is_some()) {
            notes.push(
                "A bare hand-over is one memcpy in and one memcpy out, from core to core, of buffers that are together as large as a ring's \
                 pages, in this run: what memory allows on these cores. With `sequence` nobody copies the payload of a long packet out of \
                 staged pages, so such a row can be faster than that."
                    .to_owned(),
            );
        }
        let memory = self.points().find_map(|point| self.memory(point));
        if let Some(memory) = memory {
            notes.push(format!(
                "testpmd ran with {memory}. It looks at no payload and numbers nothing, so its rate stands beside the one with sequence \
                 numbers verified; {} and {} own the memory that packets of direction tx come from.",
                "memif's client", "virtio-user"
            ));
        }
        notes
    }
}

/// Maximum columns of a line.
const COLUMNS: usize = 100;

fn wrapped(text: &str) -> String {
    let (mut lines, mut line) = (String::new(), String::new());
    for word in text.split_whitespace() {
        if !line.is_empty() && line.len() + 1 + word.len() > COLUMNS {
            lines += &line;
            lines.push('\n');
            line.clear();
        }
        if !line.is_empty() {
            line.push(' ');
        }
        line += word;
    }
    lines + &line + "\n"
}
