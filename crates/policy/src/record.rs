//! Egress records: one JSON object a verdict. Repeated verdicts are folded, and the rate of lines is bounded.
//! Learning: the smallest policy that allows what was seen.

use core::fmt::Write;
use core::net::IpAddr;
use core::time::Duration;
use std::collections::{BTreeSet, HashMap, VecDeque};

use ringfence_base::json::escape_controls;

use crate::name::HostName;
use crate::rule::{Action, Protocol};

/// Time for which repetitions of a verdict are only counted.
pub const FOLD_FOR: Duration = Duration::from_secs(10);
/// Maximum number of verdicts that are remembered for folding.
pub const FOLDED_MAX: usize = 1024;
/// Lines at once, and interval after which one more is possible.
pub const LINES_BURST: u32 = 1000;
const LINE_EVERY: Duration = Duration::from_millis(20);
/// Maximum number of rules that are learned.
pub const LEARNED_MAX: usize = 4096;

/// Kinds of events that records describe.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Event {
    /// A DNS query.
    Resolve,
    /// A new connection, association or echo flow.
    Connect,
    /// First bytes of a connection.
    Hello,
    /// The end of a connection.
    Close,
}

/// Contents of a record, except its time.
#[derive(Clone, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
pub struct Record {
    pub event: Event,
    pub verdict: Action,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub address: Option<IpAddr>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub port: Option<u16>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub protocol: Option<Protocol>,
    /// Rule or other reason for the verdict.
    pub reason: String,
    /// Rule that would allow what was denied, if one would.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub allow: Option<String>,
    /// Server name of the TLS hello, or host of the HTTP request.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sni: Option<String>,
    /// Bytes from and to the guest, at the end of a connection.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes_out: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes_in: Option<u64>,
}

#[derive(serde::Serialize)]
struct Line<'a> {
    time: f64,
    guest: &'a str,
    #[serde(flatten)]
    record: &'a Record,
    #[serde(skip_serializing_if = "is_one")]
    count: u64,
}

#[derive(serde::Serialize)]
struct Lost<'a> {
    time: f64,
    guest: &'a str,
    lost: u64,
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde passes references")]
fn is_one(count: &u64) -> bool {
    *count == 1
}

/// Writer of JSON lines for one guest.
pub struct Journal {
    guest: String,
    /// Number of repetitions since the record's line, and the time of that line.
    repeated: HashMap<Record, u64>,
    order: VecDeque<(Duration, Record)>,
    /// Time at which the whole burst of lines is available again.
    full_at: Duration,
    lost: u64,
}

impl Journal {
    /// Creates a journal for the guest of this name.
    pub fn new(guest: String) -> Journal {
        let (repeated, order) = (HashMap::new(), VecDeque::new());
        Journal { guest, repeated, order, full_at: Duration::ZERO, lost: 0 }
    }

    /// Adds a record. Appends the lines that are due to `lines`. `now` is monotonic, `time` the time of day.
    pub fn add(&mut self, record: Record, now: Duration, time: f64, lines: &mut String) {
        self.flush(now, time, lines);
        if let Some(count) = self.repeated.get_mut(&record) {
            *count += 1;
            return;
        }
        self.write(&record, 1, now, time, lines);
        if self.order.len() >= FOLDED_MAX {
            self.unfold(now, time, lines);
        }
        self.repeated.insert(record.clone(), 0);
        self.order.push_back((now, record));
    }

    /// Appends the lines of repeated records whose time is over.
    pub fn flush(&mut self, now: Duration, time: f64, lines: &mut String) {
        while self.order.front().is_some_and(|(since, _)| *since + FOLD_FOR <= now) {
            self.unfold(now, time, lines);
        }
    }

    /// Appends the lines of all repeated records.
    pub fn finish(&mut self, now: Duration, time: f64, lines: &mut String) {
        while !self.order.is_empty() {
            self.unfold(now, time, lines);
        }
        self.write_lost(time, lines);
    }

    fn unfold(&mut self, now: Duration, time: f64, lines: &mut String) {
        let Some((_, record)) = self.order.pop_front() else { return };
        let count = self.repeated.remove(&record).unwrap_or(0);
        if count > 0 {
            self.write(&record, count, now, time, lines);
        }
    }

    fn write(&mut self, record: &Record, count: u64, now: Duration, time: f64, lines: &mut String) {
        let full_at = self.full_at.max(now) + LINE_EVERY;
        if full_at > now + LINE_EVERY * LINES_BURST {
            self.lost += count;
            return;
        }
        self.full_at = full_at;
        self.write_lost(time, lines);
        push(&Line { time, guest: &self.guest, record, count }, lines);
    }

    fn write_lost(&mut self, time: f64, lines: &mut String) {
        if self.lost > 0 {
            push(&Lost { time, guest: &self.guest, lost: self.lost }, lines);
            self.lost = 0;
        }
    }
}

fn push(value: &impl serde::Serialize, lines: &mut String) {
    // Serialization into memory fails for no value of these types.
    if let Ok(line) = serde_json::to_string(value) {
        lines.push_str(&escape_controls(line));
        lines.push('\n');
    }
}

/// Rules that allow the recorded connections.
#[derive(Clone, Debug, Default)]
pub struct Learned {
    rules: BTreeSet<String>,
    is_full: bool,
}

impl Learned {
    /// Adds a destination: its name if one is known, else its address. Returns the rules that are new.
    pub fn add(
        &mut self,
        name: Option<&HostName>,
        ip: IpAddr,
        port: u16,
        protocol: Protocol,
    ) -> Vec<String> {
        let mut host = match (name, ip) {
            (Some(name), _) => name.to_string(),
            (None, IpAddr::V4(ip)) => ip.to_string(),
            (None, IpAddr::V6(ip)) => format!("[{ip}]"),
        };
        let mut rules = Vec::new();
        if protocol == Protocol::Icmp {
            rules.push("icmp".to_owned());
        } else {
            let _ = write!(host, ":{port}/{protocol}");
        }
        rules.push(host);
        rules.retain(|rule| self.insert(rule.clone()));
        rules
    }

    /// Adds a rule in its printed form. Returns `true` if it is new.
    pub fn insert(&mut self, rule: String) -> bool {
        self.is_full |= self.rules.len() >= LEARNED_MAX && !self.rules.contains(&rule);
        !self.is_full && self.rules.insert(rule)
    }

    /// Writes the policy file.
    pub fn to_toml(&self) -> String {
        let mut text =
            "# Policy learned by ringfence run --egress-learn. Review it before use.\n".to_owned();
        if self.is_full {
            let _ = writeln!(text, "# Incomplete: more than {LEARNED_MAX} destinations were seen.");
        }
        text.push_str("default = \"deny\"\nallow = [\n");
        for rule in &self.rules {
            let _ = writeln!(text, "    \"{rule}\",");
        }
        text.push_str("]\n");
        text
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn record(name: &str) -> Record {
        Record {
            event: Event::Resolve,
            verdict: Action::Deny,
            name: Some(name.to_owned()),
            address: None,
            port: None,
            protocol: None,
            reason: "no rule".into(),
            allow: None,
            sni: None,
            bytes_out: None,
            bytes_in: None,
        }
    }

    #[test]
    fn repeated_record_is_folded_with_its_count() {
        let (mut journal, mut lines) = (Journal::new("g1".into()), String::new());
        let second = Duration::from_secs(1);
        for step in 0..5 {
            journal.add(record("a.org"), second * step, 0.5, &mut lines);
        }
        let first = r#"{"time":0.5,"guest":"g1","event":"resolve","verdict":"deny","name":"a.org","reason":"no rule"}"#;
        assert_eq!(lines, format!("{first}\n"));
        lines.clear();
        journal.add(record("b.org"), FOLD_FOR, 1.0, &mut lines);
        assert!(lines.lines().next().unwrap().ends_with(r#""count":4}"#), "{lines}");
        assert_eq!(lines.lines().count(), 2);
        lines.clear();
        journal.finish(FOLD_FOR, 1.0, &mut lines);
        assert_eq!(lines, "", "a record without repetitions is complete");
    }

    #[test]
    fn lines_beyond_the_rate_are_counted_as_lost() {
        let (mut journal, mut lines) = (Journal::new("g".into()), String::new());
        for number in 0..10_000 {
            journal.add(record(&format!("n{number}.org")), Duration::ZERO, 0.0, &mut lines);
        }
        assert_eq!(lines.lines().count(), usize::try_from(LINES_BURST).unwrap());
        assert!(journal.order.len() <= FOLDED_MAX);
        lines.clear();
        journal.finish(Duration::ZERO, 0.0, &mut lines);
        assert_eq!(lines, "{\"time\":0.0,\"guest\":\"g\",\"lost\":9000}\n");
    }

    proptest! {
        #[test]
        fn learned_policy_allows_what_was_seen(
            seen in prop::collection::vec((prop::option::of("[a-c]\\.org"), any::<u32>(), 1..9000_u16), 0..20)
        ) {
            let mut learned = Learned::default();
            let name = |text: &Option<String>| text.as_ref().map(|text| HostName::parse(text).unwrap());
            for (host, ip, port) in &seen {
                let ip = core::net::Ipv4Addr::from_bits(*ip).into();
                learned.add(name(host).as_ref(), ip, *port, Protocol::Tcp);
            }
            let source = crate::file::parse("learned.toml", &learned.to_toml()).unwrap();
            let policy = crate::Policy::new(source).unwrap();
            for (host, ip, port) in &seen {
                let ip = core::net::Ipv4Addr::from_bits(*ip).into();
                let verdict = match name(host) {
                    Some(name) => Some(policy.name(&name, *port, Protocol::Tcp)),
                    None => policy.address(ip, *port, Protocol::Tcp),
                };
                prop_assert!(verdict.is_some_and(crate::Verdict::is_allowed));
            }
            prop_assert_eq!(policy.default_action(), Action::Deny);
        }
    }
}
