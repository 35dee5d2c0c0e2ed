//! Denials of a running guest: a bounded list, and the few that are announced.
//!
//! The list is made from lines of [`Journal`](crate::record::Journal), which a process that reads packets of the guest has
//! written. So lines are untrusted: those that are no record are ignored, texts are cleaned and cut
//! ([`refusal`](crate::refusal)), and list and announcements are bounded.

use std::collections::VecDeque;

use crate::record::Record;
use crate::refusal::{clean, sentence};
use crate::rule::Action;

/// Maximum number of denials in a list. The one that was seen longest ago makes room.
pub const DENIALS_MAX: usize = 256;
/// Maximum number of denials that are announced.
pub const ANNOUNCED_MAX: usize = 20;

/// Destination that was denied, with its repetitions. The field names are those of `ringfence policy why --json`.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Denial {
    #[serde(flatten)]
    pub record: Record,
    pub count: u64,
    /// Times of the first and the last one, in seconds since 1970.
    pub first: f64,
    pub last: f64,
}

/// Line of a journal.
#[derive(serde::Deserialize)]
struct Line {
    time: f64,
    #[serde(flatten)]
    record: Record,
    #[serde(default = "one")]
    count: u64,
}

fn one() -> u64 {
    1
}

/// Denials of one guest.
#[derive(Clone, Debug, Default)]
pub struct Denials {
    /// The one that was seen last is at the end.
    list: VecDeque<Denial>,
    announced: Vec<String>,
    /// Number of new denials that were not announced.
    unannounced: u64,
}

impl Denials {
    /// Adds the denial of a line, if it is one. Returns the sentence to announce if it is new.
    pub fn add(&mut self, line: &str) -> Option<String> {
        let line: Line = serde_json::from_str(line).ok()?;
        if line.record.verdict != Action::Deny {
            return None;
        }
        let record = cleaned(line.record);
        let (time, count) = (line.time, line.count);
        let known = self.list.iter().position(|known| known.record == record);
        let denial = match known.and_then(|at| self.list.remove(at)) {
            Some(known) => {
                let count = known.count.saturating_add(count);
                Denial { count, last: time.max(known.last), ..known }
            }
            None => Denial { record, count, first: time, last: time },
        };
        if self.list.len() >= DENIALS_MAX {
            self.list.pop_front();
        }
        let sentence = known.is_none().then(|| sentence(&denial.record));
        self.list.push_back(denial);
        self.announce(sentence?)
    }

    /// Returns the sentence if it is to be announced: each one once, up to the limit.
    fn announce(&mut self, sentence: String) -> Option<String> {
        if self.announced.contains(&sentence) {
            return None;
        }
        if self.announced.len() >= ANNOUNCED_MAX {
            self.unannounced += 1;
            return None;
        }
        self.announced.push(sentence.clone());
        Some(sentence)
    }

    /// Returns the number of denials that were new and not announced.
    pub fn unannounced(&self) -> u64 {
        self.unannounced
    }

    /// Iterates over the denials, that seen last first.
    pub fn latest(&self) -> impl Iterator<Item = &Denial> {
        self.list.iter().rev()
    }
}

/// Returns the record with texts that are safe to show.
fn cleaned(record: Record) -> Record {
    let text = |text: Option<String>| text.map(|text| clean(&text));
    Record {
        name: text(record.name),
        sni: text(record.sni),
        allow: text(record.allow),
        reason: clean(&record.reason),
        // Connections that reach a limit differ in their bytes.
        bytes_out: None,
        bytes_in: None,
        ..record
    }
}

#[cfg(test)]
mod tests {
    use core::time::Duration;

    use super::*;
    use crate::record::{Event, Journal};

    fn record(name: &str, verdict: Action) -> Record {
        Record {
            event: Event::Resolve,
            verdict,
            name: Some(name.to_owned()),
            address: None,
            port: None,
            protocol: None,
            reason: "no rule".into(),
            allow: Some(format!("{name}:443")),
            sni: None,
            bytes_out: None,
            bytes_in: None,
        }
    }

    /// Returns the line that a journal writes for a record.
    fn line(record: Record, time: f64) -> String {
        let mut lines = String::new();
        Journal::new("g".into()).add(record, Duration::ZERO, time, &mut lines);
        lines
    }

    #[test]
    fn repeated_denial_is_counted_and_announced_once() {
        let mut denials = Denials::default();
        assert_eq!(denials.add(&line(record("a.org", Action::Allow), 1.0)), None);
        let announced = denials.add(&line(record("a.org", Action::Deny), 2.0));
        assert_eq!(announced.as_deref(), Some("denied a.org, no rule; `--allow a.org:443`"));
        assert!(denials.add(&line(record("b.org", Action::Deny), 3.0)).is_some());
        let folded = line(record("a.org", Action::Deny), 9.0).replace("\"}\n", "\",\"count\":4}");
        assert_eq!(denials.add(&folded), None);
        let seen: Vec<_> = denials.latest().map(|d| (d.count, d.first, d.last)).collect();
        assert_eq!(seen, [(5, 2.0, 9.0), (1, 3.0, 3.0)]);
    }

    #[test]
    fn flood_of_names_is_bounded_in_list_and_announcements() {
        let mut denials = Denials::default();
        let announced = (0..1000).filter_map(|number| {
            denials.add(&line(record(&format!("n{number}.org"), Action::Deny), 1.0))
        });
        assert_eq!(announced.count(), ANNOUNCED_MAX);
        assert_eq!(denials.unannounced(), 1000 - ANNOUNCED_MAX as u64);
        assert_eq!(denials.latest().count(), DENIALS_MAX);
        assert_eq!(denials.latest().next().unwrap().record.name.as_deref(), Some("n999.org"));
    }

    #[test]
    fn line_of_a_hostile_writer_is_cleaned_or_ignored() {
        let mut denials = Denials::default();
        for garbage in ["", "{}", "[1]", "{\"lost\":4}", "{\"time\":1,\"verdict\":\"deny\"}"] {
            assert_eq!(denials.add(garbage), None);
        }
        let hostile = record("a\u{1b}[2J\u{202e}\n", Action::Deny);
        let text = denials.add(&serde_json::to_string(&serde_json::json!({
            "time": 1.0, "event": "resolve", "verdict": "deny", "name": hostile.name, "reason": "x\u{2066}".repeat(9000),
        })).unwrap());
        let text = text.unwrap();
        assert!(
            text.chars().count() <= crate::refusal::TEXT_MAX
                && !text.contains(['\u{1b}', '\u{202e}', '\n'])
        );
        let record = &denials.latest().next().unwrap().record;
        assert_eq!(record.name.as_deref(), Some("a\u{fffd}[2J\u{fffd}\u{fffd}"));
        assert!(record.reason.chars().count() <= crate::refusal::TEXT_MAX);
    }
}
