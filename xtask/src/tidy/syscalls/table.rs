//! Generator of the table of system calls.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use super::super::finding::Finding;
use super::parse::{Row, WHO};

const HEAD: &str = "\
//! Made by `cargo xtask syscalls` from the `#syscall` lines in the sources. Not to be edited.

use super::syscalls::{
    Allowed, CARD, DAEMON, DISK, DRIVER, FRONTEND, PROXY, SHIELD, UPLINK, has, is, is_whole, lacks,
    masked, on, own_pid,
};

";

/// Key of rows that are merged: the same call under the same conditions.
type Key<'a> = (&'a str, &'a [String], Option<&'a str>);

/// Files that need the call, with the reason.
type Origins<'a> = BTreeSet<(&'a str, &'a str)>;

/// Returns the text of the generated file.
pub(super) fn render(rows: &[Row]) -> String {
    let mut text = HEAD.to_owned();
    let allowed = rows.iter().filter(|row| !row.refused);
    table(&mut text, "The system calls that are allowed.", "LIST", allowed);
    text.push('\n');
    let refused = rows.iter().filter(|row| row.refused);
    table(
        &mut text,
        "System calls that libraries try, and that are refused: the libraries have another way.",
        "REFUSED",
        refused,
    );
    text
}

fn table<'a>(text: &mut String, what: &str, name: &str, rows: impl Iterator<Item = &'a Row>) {
    let mut merged: BTreeMap<Key<'_>, (u8, Origins<'_>)> = BTreeMap::new();
    for row in rows {
        let key = (&*row.call, &*row.when, row.arch.as_deref());
        let (who, origins) = merged.entry(key).or_default();
        *who |= row.who;
        origins.insert((&row.path, &row.why));
    }
    let head = format!("/// {what}\n#[rustfmt::skip]\npub(super) const {name}: &[Allowed] = &[\n");
    text.push_str(&head);
    for ((call, when, arch), (who, origins)) in merged {
        for (path, why) in origins {
            let path = path.trim_start_matches("crates/");
            let _ = writeln!(text, "    // {path}: {why}");
        }
        if let Some(arch) = arch {
            let _ = writeln!(text, "    #[cfg(target_arch = \"{arch}\")]");
        }
        let when = when.join(", ");
        let _ = writeln!(text, "    on({}, libc::SYS_{call}, &[{when}]),", names(who));
    }
    text.push_str("];\n");
}

fn names(who: u8) -> String {
    let among = WHO.iter().enumerate().filter(|(bit, _)| who & 1 << bit != 0);
    among.map(|(_, (_, name))| *name).collect::<Vec<_>>().join(" | ")
}

/// Returns findings for conditions without effect, because the same process may make the call without them,
/// and for calls that are both refused and allowed.
pub(super) fn idle_conditions(rows: &[Row]) -> Vec<Finding> {
    let mut findings = vec![];
    for row in rows {
        let same = |other: &&Row| other.call == row.call && other.who & row.who != 0;
        if !row.when.is_empty()
            && let Some(free) = rows.iter().filter(same).find(|r| r.when.is_empty() && !r.refused)
        {
            let message = format!(
                "`#syscall`: the conditions on {} have no effect: {}:{} allows it without them",
                row.call, free.path, free.line
            );
            findings.push(Finding::at(&row.path, row.line, message));
        }
        if row.refused
            && let Some(allowed) = rows.iter().filter(same).find(|other| !other.refused)
        {
            let message = format!(
                "`#syscall`: {} is refused here and allowed by {}:{}",
                row.call, allowed.path, allowed.line
            );
            findings.push(Finding::at(&row.path, row.line, message));
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(path: &str, who: u8, call: &str, when: &[&str], why: &str) -> Row {
        Row {
            path: path.to_owned(),
            line: 1,
            who,
            call: call.to_owned(),
            arch: None,
            refused: false,
            when: when.iter().map(|text| (*text).to_owned()).collect(),
            why: why.to_owned(),
        }
    }

    #[test]
    fn rows_with_same_call_and_conditions_are_merged() {
        let rows = [
            row("crates/b.rs", 0b10, "read", &[], "disks"),
            row("crates/a.rs", 0b01, "read", &[], "frames"),
            row("crates/a.rs", 0b100, "ioctl", &["is(1, 2)"], "room"),
            Row { refused: true, ..row("crates/a.rs", 0b1, "mremap", &[], "tried") },
            Row { arch: Some("x86_64".into()), ..row("crates/a.rs", 8, "poll", &[], "waiting") },
        ];
        let text = render(&rows);
        let tables = text.strip_prefix(HEAD).unwrap();
        let expected = "\
/// The system calls that are allowed.
#[rustfmt::skip]
pub(super) const LIST: &[Allowed] = &[
    // a.rs: room
    on(UPLINK, libc::SYS_ioctl, &[is(1, 2)]),
    // a.rs: waiting
    #[cfg(target_arch = \"x86_64\")]
    on(DAEMON, libc::SYS_poll, &[]),
    // a.rs: frames
    // b.rs: disks
    on(DRIVER | FRONTEND, libc::SYS_read, &[]),
];

/// System calls that libraries try, and that are refused: the libraries have another way.
#[rustfmt::skip]
pub(super) const REFUSED: &[Allowed] = &[
    // a.rs: tried
    on(DRIVER, libc::SYS_mremap, &[]),
];
";
        assert_eq!(tables, expected);
    }

    #[test]
    fn condition_without_effect_is_a_finding() {
        let free = row("crates/a.rs", 0b11, "ioctl", &[], "x");
        let narrow = row("crates/b.rs", 0b10, "ioctl", &["is(1, 2)"], "x");
        let of_another = row("crates/b.rs", 0b100, "ioctl", &["is(1, 2)"], "x");
        let refused = Row { refused: true, ..free.clone() };
        assert_eq!(idle_conditions(&[free.clone(), narrow]).len(), 1);
        assert_eq!(idle_conditions(&[free.clone(), of_another]), []);
        assert_eq!(idle_conditions(&[free.clone(), refused]).len(), 1);
        assert_eq!(idle_conditions(&[free.clone(), free]), []);
    }
}
